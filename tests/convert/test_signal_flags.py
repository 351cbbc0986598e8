"""Flags of signal_report: each fires on a minimal case and is silent on a healthy one."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from deepcontrol import AGC2d, AGCConv2d, AGCLinear, he_init_, signal_report, to_agc, unit_init_
from deepcontrol.convert import SignalFlag, signal_flags
from deepcontrol.workbench.models import SegNet
from tests.convert.networks import Block, Residual


def flags(model: nn.Module, *shape: int, scale: float = 1.0) -> dict[str, SignalFlag]:
    shape = shape or (2, 3, 16, 16)
    return {flag.kind: flag for flag in signal_report(model, scale * torch.randn(shape)).flags}


def deep_residual(blocks: int) -> nn.Sequential:
    """A residual network with BatchNorm, as in torchvision."""
    body = [Block(8, 8) for _ in range(blocks)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), *body, *head)


def chain(depth: int, gain: float) -> nn.Sequential:
    """Linear 1x1 convolutions that scale the variance by gain^2 each."""
    model = nn.Sequential(*(nn.Conv2d(3, 3, 1, bias=False) for _ in range(depth)))
    for layer in model:
        nn.init.orthogonal_(layer.weight, gain)
    return model


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "make", [Residual, lambda: deep_residual(27), lambda: SegNet(5, 0.1, "bn")]
)
def test_batchnorm_at_initialization_has_no_flags(
    make: Callable[[], nn.Module], batch: int
) -> None:
    assert not flags(make(), batch, 3, 64, 64)


def test_batchnorm_with_branches_that_start_at_zero_has_no_flags() -> None:
    model = deep_residual(4)
    for block in model:
        if isinstance(block, Block):
            nn.init.zeros_(block.bn2.weight)
    assert not flags(model)
    assert not flags(to_agc(model))


def test_unnormalized_inputs_are_no_fault() -> None:
    assert not flags(deep_residual(4), scale=255.0)
    assert not flags(deep_residual(4), scale=1e-3)
    assert not flags(chain(3, 1.0), scale=255.0)
    assert not flags(chain(3, 1.0), scale=1e-3)


def test_plain_gains_explode_and_small_ones_do_not() -> None:
    model = to_agc(he_init_(deep_residual(50)), init="paper")
    found = flags(model)
    assert {"explosion", "gradient explosion"} == set(found)
    assert "1/sqrt(50) = 0.14" in found["explosion"].message
    for block in model:
        if isinstance(block, Block):
            nn.init.constant_(block.conv2.gain, 1 / math.sqrt(50))
    assert not flags(model)


def test_explosion_without_branches() -> None:
    found = flags(chain(8, 3.0))["explosion"]
    report = signal_report(chain(8, 3.0), torch.randn(2, 3, 16, 16))
    assert "unit_init_" in found.message
    # 9 times per layer: 9^4 is the first power above the threshold of 1e3.
    first = next(i for i, layer in enumerate(report) if "explosion" in layer.flags)
    assert first == found.layers[0] == 4
    assert "explosion" not in flags(chain(8, 1.2))


def test_vanishing() -> None:
    # 1/9 per layer: 9^-5 is the first power below the threshold of 1e-4.
    assert flags(chain(8, 1 / 3))["vanishing"].layers[0] == 5
    assert "vanishing" not in flags(chain(8, 0.8))


def test_segnet_starts_with_a_small_signal_and_unit_init_keeps_it() -> None:
    model, x = SegNet(5, 0.1), torch.randn(2, 3, 64, 64)
    (found,) = flags(model, *x.shape).values()
    assert found.kind == "vanishing"
    assert "unit_init_" in found.message
    assert not flags(unit_init_(model, x), *x.shape)


def test_gradient_explosion_and_vanishing() -> None:
    """Norms hold the forward variance at 1; the weights after each norm scale the gradient."""

    def normed(gain: float) -> nn.Sequential:
        layers = [(nn.InstanceNorm2d(3, affine=True), *chain(1, gain)) for _ in range(8)]
        return nn.Sequential(*(layer for pair in layers for layer in pair))

    assert not flags(normed(1.0))
    small = nn.Sequential(*chain(1, 1.0), *(_Scaled(1e-2) for _ in range(4)), *chain(1, 1.0))
    assert set(flags(small)) == {"gradient vanishing"}
    large = nn.Sequential(*chain(1, 1.0), *(_Scaled(1e2) for _ in range(4)), *chain(1, 1.0))
    assert set(flags(large)) == {"gradient explosion"}


class _Scaled(nn.Module):
    """The identity, with a scaled gradient and a parameter, so that it is reported."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.bias = scale, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * x
        return y + (x - y).detach() + self.bias


@pytest.mark.parametrize("functional_relu", [True, False])
def test_dead_layer(functional_relu: bool) -> None:
    class Relu(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(x)

    model = nn.Sequential(nn.Conv2d(3, 8, 1), Relu() if functional_relu else nn.ReLU())
    assert not flags(model)
    nn.init.constant_(model[0].bias, -100.0)
    found = flags(model)
    assert {"dead", "constant filters"} <= set(found)
    assert found["dead"].layers == (0, 1)  # no gradient reaches the convolution


def test_closed_leaky_relu_is_not_dead() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.LeakyReLU())
    nn.init.constant_(model[0].bias, -100.0)
    report = signal_report(model, torch.randn(2, 3, 8, 8))
    assert report[1].open_share == 0
    assert "dead" not in {flag.kind for flag in report.flags}


def test_classifier_that_starts_at_zero_has_no_flags() -> None:
    model = Residual()
    nn.init.zeros_(model.classify.weight)
    assert not flags(model)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_output(value: float) -> None:
    model = chain(3, 1.0)
    with torch.no_grad():
        model[1].weight[0, 0] = value
    found = flags(model)["non-finite"]
    assert "in the output of '1'" in found.message
    assert "non-finite" not in flags(chain(3, 1.0))


def test_non_finite_gradient() -> None:
    model, x = chain(3, 1.0), torch.randn(2, 3, 4, 4)
    report = signal_report(model, x, loss=lambda y: (y - y.detach()).sqrt().sum())
    (found,) = report.flags
    assert found.kind == "non-finite"
    assert "in the gradient at '2' and 2 more" in found.message


def test_constant_filters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1))
    with torch.no_grad():
        model[0].weight[:1] = 0.0
    assert not flags(model)  # one dead filter of eight
    with torch.no_grad():
        model[0].weight[:3] = 0.0
    found = flags(model)["constant filters"]
    assert "38% of the filters of '0'" in found.message


def test_few_values_are_not_called_constant() -> None:
    model = nn.Sequential(nn.Linear(3, 8))
    (layer,) = signal_report(model, torch.randn(1, 3))
    assert layer.constant_share is None
    (layer,) = signal_report(model, torch.randn(16, 3))
    assert layer.constant_share == 0


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: AGCConv2d(3, 8, 1), (2, 3, 1, 1)),
        (lambda: AGC2d(3), (2, 3, 1, 1)),
        (lambda: AGCLinear(3, 1), (2, 3)),
    ],
)
def test_one_position(layer: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    agc = layer()
    (found,) = flags(nn.Sequential(nn.Identity(), agc), *shape).values()
    assert found.kind == "one position"
    assert "zeros_(layer.mean_scale)" in found.message
    assert found.layers == (0,)
    nn.init.zeros_(agc.mean_scale)
    assert "one position" not in flags(agc, *shape)


def test_two_positions_are_enough() -> None:
    assert "one position" not in flags(AGCConv2d(3, 8, 1), 2, 3, 1, 2)
    assert "one position" not in flags(AGCLinear(3, 2), 2, 3)


class Pooled(nn.Module):
    """AGC and global average pooling, in one of its spellings."""

    def __init__(self, pool: Callable[[Tensor], Tensor], activation: str = "none") -> None:
        super().__init__()
        self.agc, self.pool = AGCConv2d(3, 8, 3, activation=activation), pool
        self.identity, self.classify = nn.Identity(), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.pool(self.identity(self.agc(x))).flatten(1))


POOLS = {
    "module": nn.AdaptiveAvgPool2d(1),
    "functional": lambda x: functional.adaptive_avg_pool2d(x, (1, 1)),
    "mean": lambda x: x.mean((2, 3)),
    "torch.mean": lambda x: torch.mean(x, dim=[-2, -1], keepdim=True),
    "avg_pool": lambda x: functional.avg_pool2d(x, x.shape[-1]),
}


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_agc_before_global_pooling(pool: Callable[[Tensor], Tensor]) -> None:
    model = Pooled(pool)
    x = torch.randn(4, 3, 8, 8)
    features = pool(model.agc(x)).flatten(1)
    assert features.var(0).max() < 1e-12, "the pooled features do not depend on the sample"
    assert "pooled mean" in {flag.kind for flag in signal_report(model, x).flags}
    nn.init.zeros_(model.agc.mean_scale)
    assert not signal_report(model, x).flags


def test_other_pooling_and_activations_are_no_fault() -> None:
    for model in (
        Pooled(nn.AdaptiveAvgPool2d(1), "relu"),
        Pooled(lambda x: functional.adaptive_avg_pool2d(functional.avg_pool2d(x, 2).relu(), 1)),
        Pooled(lambda x: functional.adaptive_avg_pool2d(x.exp_(), 1)),  # changed in place
    ):
        assert "pooled mean" not in flags(model)


def test_thresholds_are_ordered() -> None:
    assert signal_flags.VANISHING < 1 < signal_flags.EXPLOSION
    assert signal_flags.GRADIENT_VANISHING < 1 < signal_flags.GRADIENT_EXPLOSION
