"""Deep noise: its level, its absence in evaluation, seeds, resuming, checkpointing and capture."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepcontrol import (
    AGC1d,
    AGC2d,
    AGC3d,
    AGCConv1d,
    AGCConv2d,
    AGCConv3d,
    AGCLinear,
    DeepNoise,
    TrainingStep,
    WindowMean,
    set_noise_,
)
from deepcontrol.nn import AGCConvPool2d
from deepcontrol.nn.noise import deep_noise

LAYERS = [
    (AGCConv1d(3, 4, 3), (2, 3, 9)),
    (AGCConv2d(3, 4, 3), (2, 3, 9, 9)),
    (AGCConv2d(3, 4, 3, background=WindowMean(3)), (2, 3, 9, 9)),
    (AGCConv2d(3, 4, 3, activation="silu"), (2, 3, 9, 9)),
    (AGCConv3d(3, 4, 3), (2, 3, 5, 5, 5)),
    (AGC1d(3), (2, 3, 9)),
    (AGC2d(3), (2, 3, 9, 9)),
    (AGC3d(3), (2, 3, 4, 4, 4)),
    (AGCLinear(5, 4), (2, 5)),
    (AGCLinear(5, 4), (2, 6, 5)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=str)
def test_training_adds_noise_and_evaluation_none(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer, x = copy.deepcopy(layer), torch.randn(shape)
    clean = layer(x)
    noisy = set_noise_(copy.deepcopy(layer), 0.2)
    assert "noise=0.2" in repr(noisy)
    assert noisy.state_dict().keys() == layer.state_dict().keys()
    first, second = noisy(x), noisy(x)
    assert not torch.equal(first, clean)
    assert not torch.equal(first, second)
    assert torch.equal(noisy.eval()(x), clean)
    assert torch.equal(set_noise_(noisy.train(), 0)(x), clean)


def test_the_level_is_that_of_each_map() -> None:
    """Maps of different level and offset get noise in proportion to their standard deviation."""
    level = torch.tensor([0.1, 1.0, 10.0, 0.0]).reshape(2, 2, 1, 1)
    u = level * torch.randn(2, 2, 128, 128) + 5
    noise = deep_noise(u, 0.3) - u
    torch.testing.assert_close(noise.std((2, 3)), 0.3 * level[..., 0, 0], rtol=0.05, atol=1e-6)
    assert (noise.mean((2, 3)).abs() <= 0.02 * level[..., 0, 0] + 1e-6).all()


def test_the_noise_is_before_the_activation_and_its_level_is_detached() -> None:
    layer = AGCConv2d(3, 4, 3, noise=0.5)
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    torch.manual_seed(3)
    y = layer(x)
    plain = copy.deepcopy(layer)
    plain.activation, plain.noise = "none", 0.0
    u = plain(x)
    torch.manual_seed(3)
    e = torch.randn_like(u)
    noise = (0.5 * u.std((2, 3), correction=0, keepdim=True) * e).detach()
    torch.testing.assert_close(y, torch.relu(u + noise))
    g = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(out, x, g)[0] for out in (y, torch.relu(u + noise)))
    torch.testing.assert_close(found, wanted)


def test_nothing_more_is_saved_for_the_noise() -> None:
    from deepcontrol.nn import saved_bytes

    x = torch.randn(1, 3, 16, 16)
    assert saved_bytes(AGCConv2d(3, 8, 3, noise=0.1), x) == saved_bytes(AGCConv2d(3, 8, 3), x)


def test_seed_and_generator_state_repeat_it() -> None:
    layer, x = AGCConv2d(3, 4, 3, noise=0.1), torch.randn(1, 3, 9, 9)
    torch.manual_seed(5)
    layer(x)
    state = torch.get_rng_state()  # as a checkpoint stores it
    second = layer(x)
    torch.set_rng_state(state)
    assert torch.equal(layer(x), second)


def test_activation_checkpointing_repeats_it() -> None:
    gradients = []
    for again in (False, True):
        torch.manual_seed(7)
        layer, x = AGCConv2d(3, 4, 3, noise=0.3), torch.randn(1, 3, 9, 9, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        y.square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_after_another_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), DeepNoise(0.1), nn.ReLU())
    x = torch.randn(2, 3, 9, 9)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    assert set_noise_(model, 0.5)[2].relative == 0.5  # type: ignore[index]
    assert repr(model[2]) == "DeepNoise(0.5)"


def test_pooling_and_1x1_maps() -> None:
    pool = AGCConvPool2d(3, 4, 3, padding=1, noise=0.1)
    pooled, index = pool(torch.randn(1, 3, 8, 8))
    assert pooled.shape == index.shape == (1, 4, 4, 4)
    u = torch.randn(2, 4, 1, 1)
    assert torch.equal(deep_noise(u, 1.0), u)  # no spread, no noise


def test_errors() -> None:
    for value in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="at least 0"):
            AGCConv2d(3, 4, 3, noise=value)
    with pytest.raises(ValueError, match="no layer of Conv2d adds noise"):
        set_noise_(nn.Conv2d(3, 4, 3), 0.1)


@pytest.mark.gpu
def test_a_captured_step_draws_new_noise_in_every_replay() -> None:
    """Replays repeat under a seed and equal eager steps from the same state of the generator."""
    x, labels = torch.randn(2, 3, 16, 16, device="cuda"), torch.randint(4, (2, 16, 16)).cuda()
    runs = []
    for engine in ("eager", "graph", "graph"):
        torch.manual_seed(0)
        model = nn.Sequential(AGCConv2d(3, 8, 3, padding=1, noise=0.3), nn.Conv2d(8, 4, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = TrainingStep(model, nn.functional.cross_entropy, optimizer, engine)  # type: ignore[arg-type]
        torch.cuda.manual_seed(1)
        runs.append([float(step(x, labels)) for _ in range(8)])
        assert (step.why_eager is None) == (engine == "graph")
    assert len(set(runs[0])) == len(set(runs[1])) == 8  # the weights do not change
    assert runs[1] == runs[2]
    torch.testing.assert_close(torch.tensor(runs[1]), torch.tensor(runs[0]))
