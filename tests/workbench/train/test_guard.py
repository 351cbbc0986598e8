"""No update is made with what is not finite, whoever notices when."""

import pytest
import torch
from torch import Tensor, nn

from deepcontrol.step import Engine, TrainingStep
from deepcontrol.workbench.optim import sgd
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.guard import Gauge, Guard


def square(x: Tensor, scale: Tensor) -> Tensor:
    return (scale * x).square().mean()


@pytest.mark.parametrize("sharded", [False, True])  # the optimizer for sharded parameters
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_the_first_bad_step_and_all_after_it_change_nothing(
    device: str, bad: float, sharded: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    optimizer = sgd(model.parameters(), lr=0.1, momentum=0.9, sharded=sharded)
    guard = Guard(optimizer, Group(torch.device(device)))
    gauge = Gauge(guard)
    engine: Engine = "eager" if sharded else "graph"  # sharded ones are never captured
    step = TrainingStep(model, square, optimizer, engine, before_update=guard)
    kept = []
    for number in range(12):
        scale = torch.tensor(bad if number == 8 else 1.0, device=device)
        step(torch.ones(2, 4, device=device), scale)
        state = [s["momentum_buffer"] for s in optimizer.state.values()]
        kept.append([a.detach().clone() for a in (*model.parameters(), *state)])
    for before, after in zip(kept[7], kept[11], strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(kept[6][0], kept[7][0])
    reading = gauge.read_now()
    assert (reading.bad, reading.good_steps) == (True, 8)


@pytest.mark.parametrize("count", [1, 3])
def test_a_gradient_whose_norm_alone_overflows_is_finite(device: str, count: int) -> None:
    parameters = [nn.Parameter(torch.ones(4, device=device)) for _ in range(count)]
    optimizer = sgd(parameters, lr=1e-20, momentum=0.0)
    guard = Guard(optimizer, Group(torch.device(device)))
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e30)
    guard(torch.tensor(0.0, device=device))
    assert guard.bad == 0
    assert parameters[-1].grad is not None
    parameters[-1].grad[2] = torch.nan  # which no maximum may lose
    guard(torch.tensor(0.0, device=device))
    assert guard.bad == 1


def test_a_gradient_that_is_not_finite_counts_too() -> None:
    """The loss is 0; its gradient is that of a square root at 0."""
    x = nn.Parameter(torch.zeros(3))
    optimizer = sgd([x], lr=0.1, momentum=0.0)
    guard = Guard(optimizer, Group(torch.device("cpu")))
    x.sqrt().sum().backward()
    assert guard(torch.tensor(0.0)) == 0
    optimizer.step()
    assert torch.equal(x, torch.zeros(3))
    assert guard.bad == 1
