"""Steps that are not finite change nothing, and their first layer is found."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGCConv2d
from deepcontrol.step import Engine, TrainingStep
from deepcontrol.workbench.optim import sgd
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.faults import Guard, GuardReader, find_first_nonfinite


def square(x: Tensor, scale: Tensor) -> Tensor:
    return (scale * x).square().mean()


@pytest.mark.parametrize("sharded", [False, True])  # SGD for sharded parameters
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_updates_are_skipped_from_the_first_bad_step_on(
    device: str, bad: float, sharded: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    optimizer = sgd(model.parameters(), lr=0.1, momentum=0.9, sharded=sharded)
    guard = Guard(optimizer, Group(torch.device(device)))
    reader = GuardReader(guard)
    engine: Engine = "eager" if sharded else "graph"  # sharded steps are never captured
    step = TrainingStep(model, square, optimizer, engine, before_update=guard)
    states = []
    for number in range(12):
        scale = torch.tensor(bad if number == 8 else 1.0, device=device)
        step(torch.ones(2, 4, device=device), scale)
        momentum = [s["momentum_buffer"] for s in optimizer.state.values()]
        states.append([a.detach().clone() for a in (*model.parameters(), *momentum)])
    for before, after in zip(states[7], states[11], strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(states[6][0], states[7][0])
    status = reader.wait()
    assert (status.bad, status.good_steps) == (True, 8)


@pytest.mark.parametrize("count", [1, 3])
def test_finite_gradients_with_an_infinite_2_norm_are_accepted(device: str, count: int) -> None:
    parameters = [nn.Parameter(torch.ones(4, device=device)) for _ in range(count)]
    optimizer = sgd(parameters, lr=1e-20, momentum=0.0)
    guard = Guard(optimizer, Group(torch.device(device)))
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e30)
    guard(torch.tensor(0.0, device=device))
    assert guard.bad == 0
    assert parameters[-1].grad is not None
    parameters[-1].grad[2] = torch.nan  # a maximum must not lose it
    guard(torch.tensor(0.0, device=device))
    assert guard.bad == 1


def test_bad_gradient_with_a_finite_loss_is_detected() -> None:
    """The loss is 0; its gradient is that of a square root at 0."""
    x = nn.Parameter(torch.zeros(3))
    optimizer = sgd([x], lr=0.1, momentum=0.0)
    guard = Guard(optimizer, Group(torch.device("cpu")))
    x.sqrt().sum().backward()
    assert guard(torch.tensor(0.0)) == 0
    optimizer.step()
    assert torch.equal(x, torch.zeros(3))
    assert guard.bad == 1


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.nan


class BrokenBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NanBackward.apply(x)


def test_find_first_nonfinite_value() -> None:
    model = nn.Sequential(AGCConv2d(3, 4, 3), AGCConv2d(4, 4, 3), BrokenBackward())
    x = torch.randn(1, 3, 8, 8)
    found = find_first_nonfinite(model, lambda y: y.mean(), x, ())
    assert found == "the gradient at the output of 1 (AGCConv2d)"
    assert find_first_nonfinite(model[:2], lambda y: y.mean(), x, ()) == ""
    assert "images" in find_first_nonfinite(model, lambda y: y.mean(), x / 0, ())
    found = find_first_nonfinite(model[:2], lambda y: y.mean() * torch.nan, x, ())
    assert found == "the loss"
