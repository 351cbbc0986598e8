"""GEMS: each filter's gradient divided by its open points, under accumulation and DDP."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from deepcontrol import GEMS, AGCConv2d, AGCConvTranspose2d, AGCLinear, TrainingStep
from deepcontrol.nn import AGCConvPool2d
from tests.processes import WORLD, run_two

NAMES = ("weight", "gain", "bias", "mean_scale")


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(
        AGCConv2d(3, 8, 3, padding=1),
        AGCConvPool2d(8, 6, 3, padding=1),
        First(),
        AGCConv2d(6, 6, 1, activation="none"),
        nn.Flatten(),
        AGCLinear(6 * 4 * 4, 10),
        nn.Linear(10, 4),
    ).double()
    for layer in model:  # filters open at different shares
        if hasattr(layer, "gain"):
            nn.init.uniform_(layer.bias, -1.0, 1.0)  # type: ignore[arg-type]
    return model


def batch(samples: int = 6) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(samples, 3, 8, 8, dtype=torch.float64, generator=rng)
    return x, torch.randn(samples, 4, dtype=torch.float64, generator=rng)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_gradients_are_divided_by_open_points() -> None:
    model, (x, target) = network(), batch()
    outputs: dict[nn.Module, Tensor] = {}
    for layer in model:
        layer.register_forward_hook(lambda m, _, y: outputs.update({m: y}))
    plain = copy.deepcopy(model)
    nn.functional.mse_loss(plain(x), target).backward()
    optimizer = sgd(model)
    GEMS(model, optimizer, cap=1e9)
    nn.functional.mse_loss(model(x), target).backward()
    optimizer.step()
    for i, layer in enumerate(model):
        for name, parameter in layer.named_parameters():
            factor = torch.ones(parameter.shape[0], dtype=torch.float64)
            if i in (0, 1, 5):
                y = outputs[layer][0] if i == 1 else outputs[layer]
                is_open = (y > 0).transpose(0, 1).flatten(1)
                factor = is_open.shape[1] / is_open.sum(1).clamp(min=1)
                assert len(factor.unique()) > 1
            expected = plain[i].get_parameter(name).grad
            assert expected is not None
            expected = expected * factor.reshape(-1, *(1,) * (expected.dim() - 1))
            torch.testing.assert_close(parameter.grad, expected)


def test_the_cap_limits_the_factor() -> None:
    model = AGCConv2d(3, 4, 3)
    nn.init.constant_(model.bias, 0.0)
    with torch.no_grad():
        model.bias[0], model.bias[1] = -100.0, 100.0  # never open, always open
    gems = GEMS(model, sgd(model), cap=1.5)
    model(torch.randn(2, 3, 9, 9))
    (factors,) = gems.factors()
    assert factors[0] == 1.5
    assert factors[1] == 1.0
    assert ((factors >= 1) & (factors <= 1.5)).all()


@pytest.mark.parametrize("control", [False, True])
def test_accumulation_equals_the_whole_batch(control: bool) -> None:
    x, target = batch()
    whole, parts = network(), network()
    for model, accumulate in ((whole, 1), (parts, len(x))):
        optimizer = sgd(model)
        GEMS(model, optimizer, control=control)

        def loss(y: Tensor, target: Tensor, accumulate: int = accumulate) -> Tensor:
            return nn.functional.mse_loss(y, target) / accumulate

        step = TrainingStep(model, loss, optimizer, "eager", accumulate=accumulate)
        for _ in range(3):
            step(x, target)
    start = network().state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value, rtol=1e-12, atol=1e-12)
        assert not torch.equal(value, start[name])


def test_control_has_the_norm_of_gems_and_the_plain_direction() -> None:
    x, target = batch()
    found = {}
    for kind in ("plain", "gems", "control"):
        model = network()
        optimizer = sgd(model)
        if kind != "plain":
            GEMS(model, optimizer, control=kind == "control")
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
        found[kind] = torch.cat([g.flatten() for g in gradients(model)])
    norms = {kind: gradient.norm() for kind, gradient in found.items()}
    torch.testing.assert_close(norms["control"], norms["gems"])
    assert norms["gems"] > 1.1 * norms["plain"]
    torch.testing.assert_close(found["control"] / norms["control"], found["plain"] / norms["plain"])


def distributed(rank: int, folder: str) -> None:
    model = network()
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(model)
    GEMS(wrapped, optimizer)
    x, target = (a.chunk(WORLD)[rank] for a in batch())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(x), target).backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.state_dict(), Path(folder) / "state.pt")


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    run_two(distributed, str(tmp_path))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    model, (x, target) = network(), batch()
    optimizer = sgd(model)
    GEMS(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def test_nothing_is_left_between_steps() -> None:
    """A forward without gradients, in eval mode or before reset() does not count."""
    x, target = batch()
    model = network()
    optimizer = sgd(model)
    gems = GEMS(model, optimizer)
    assert all((f == 1).all() for f in gems.factors())
    with torch.no_grad():
        model(x)
    model.eval()(x)
    model.train()
    assert all((f == 1).all() for f in gems.factors())
    nn.functional.mse_loss(model(x), target).backward()
    assert any((f > 1).any() for f in gems.factors())
    gems.reset()
    assert all((f == 1).all() for f in gems.factors())
    before = gradients(model)
    optimizer.step()  # nothing was counted since
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(model), strict=True))
    gems.remove()
    model(x)
    assert all((f == 1).all() for f in gems.factors())


def test_scaling_before_clipping() -> None:
    x, target = batch()
    model = network()
    optimizer = sgd(model)
    gems = GEMS(model, optimizer)
    nn.functional.mse_loss(model(x), target).backward()
    gems.scale_()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    before = gradients(model)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(model), strict=True))


def test_checkpointing_counts_the_same_share() -> None:
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    factors = []
    for again in (False, True):
        torch.manual_seed(1)
        model = AGCConv2d(3, 8, 3)
        gems = GEMS(model, sgd(model))
        y = checkpoint(model, x, use_reentrant=False) if again else model(x)
        y.sum().backward()
        factors.append(gems.factors()[0])
    torch.testing.assert_close(*factors)


def test_inputs_without_a_batch() -> None:
    torch.manual_seed(0)
    conv, linear = AGCConv2d(3, 8, 3), AGCLinear(5, 7)
    for layer, x in ((conv, torch.randn(3, 9, 9)), (linear, torch.randn(5))):
        gems = GEMS(layer, sgd(layer), cap=100)
        layer(x)
        alone = gems.factors()[0]
        gems.reset()
        layer(x[None])
        assert torch.equal(gems.factors()[0], alone)


@pytest.mark.slow
def test_compiled_models_count() -> None:
    x, target = batch()
    states = []
    for engine in ("eager", "compile"):
        model = network()
        optimizer = sgd(model)
        GEMS(model, optimizer)
        run = model
        if engine == "compile":
            run = torch.compile(model, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.mse_loss(run(x), target).backward()
            optimizer.step()
        states.append(model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value)


@pytest.mark.gpu
@pytest.mark.parametrize("control", [False, True])
def test_captured_steps_equal_eager_ones(control: bool) -> None:
    states, (x, target) = [], (a.cuda() for a in batch())
    for engine in ("eager", "graph"):
        model = network().cuda()
        optimizer = sgd(model)
        GEMS(model, optimizer, control=control)
        step = TrainingStep(model, nn.functional.mse_loss, optimizer, engine)  # type: ignore[arg-type]
        for i in range(8):
            step(x * (1 + i), target)
        assert (step.why_eager is None) == (engine == "graph")
        states.append(model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value)


def test_errors() -> None:
    model = network()
    with pytest.raises(ValueError, match="at least 1"):
        GEMS(model, sgd(model), cap=0.5)
    plain = nn.Sequential(nn.Conv2d(3, 3, 3))
    with pytest.raises(ValueError, match="no layer of Sequential"):
        GEMS(plain, sgd(plain))
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    with pytest.raises(ValueError, match="remove the parametrization"):
        GEMS(model, sgd(model))


@pytest.mark.parametrize(("channels", "groups"), [((4, 4), 1), ((4, 6), 1), ((4, 4), 2)])
def test_transposed_filters_are_scaled_by_their_output_channel(
    channels: tuple[int, int], groups: int
) -> None:
    model = AGCConvTranspose2d(*channels, 2, stride=2, groups=groups).double()
    nn.init.uniform_(model.bias, -1.0, 1.0)
    plain, x = copy.deepcopy(model), torch.randn(2, channels[0], 5, 5, dtype=torch.float64)
    y = plain(x)
    y.square().mean().backward()
    factor = y[:, 0].numel() / (y > 0).transpose(0, 1).flatten(1).sum(1)
    optimizer = sgd(model)
    GEMS(model, optimizer, cap=1e9)
    model(x).square().mean().backward()
    optimizer.step()
    # By output channel: (C_in, C_out / groups, *) of every group of input channels.
    by_group = zip(plain.weight.grad.chunk(groups), factor.chunk(groups), strict=True)
    expected = torch.cat([rows * own[None, :, None, None] for rows, own in by_group])
    torch.testing.assert_close(model.weight.grad, expected)
    torch.testing.assert_close(model.gain.grad, plain.gain.grad * factor)


def test_a_closure_is_refused() -> None:
    """It would compute the gradients after they have been scaled."""
    model = AGCConv2d(3, 4, 3)
    optimizer = sgd(model)
    GEMS(model, optimizer)
    optimizer.step(None)
    with pytest.raises(ValueError, match="step\\(\\) without a closure"):
        optimizer.step(lambda: model(torch.randn(1, 3, 8, 8)).mean().item())
