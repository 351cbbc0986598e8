"""FRN, EvoNorm-S0 and weight standardization against formulas in numpy and fp64."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deepcontrol import he_init_
from deepcontrol.workbench.models import CifarResNet
from deepcontrol.workbench.models.blocks import conv_block, sum_activation
from deepcontrol.workbench.models.norms import (
    EvoNorm2dS0,
    FilterResponseNorm2d,
    WeightStandardizedConv2d,
    WeightStandardizedConv3d,
)

CHANNELS = 12


def maps(dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw maps with a different mean and scale in every channel and sample."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, CHANNELS, 5, 7, generator=generator, dtype=torch.float64)
    scale = torch.rand(3, CHANNELS, 1, 1, generator=generator, dtype=torch.float64) + 0.5
    shift = torch.randn(3, CHANNELS, 1, 1, generator=generator, dtype=torch.float64)
    return (scale * x + shift).to(dtype)


def randomized(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def frn(layer: FilterResponseNorm2d, x: Tensor) -> np.ndarray:
    z = x.double().numpy()
    out = np.empty_like(z)
    for n, c in np.ndindex(z.shape[:2]):
        normalized = z[n, c] / np.sqrt((z[n, c] ** 2).mean() + 1e-6)
        out[n, c] = layer.weight[c].item() * normalized + layer.bias[c].item()
        if layer.threshold is not None:
            out[n, c] = np.maximum(out[n, c], layer.threshold[c].item())
    return out


def evonorm(layer: EvoNorm2dS0, x: Tensor) -> np.ndarray:
    z = x.double().numpy()
    out = np.empty_like(z)
    size = CHANNELS // layer.groups
    for n, c in np.ndindex(z.shape[:2]):
        a = z[n, c]
        if layer.v is not None:
            first = c // size * size
            spread = np.sqrt(z[n, first : first + size].var() + 1e-5)
            a = a / (1 + np.exp(-layer.v[c].item() * a)) / spread
        out[n, c] = layer.weight[c].item() * a + layer.bias[c].item()
    return out


def layers(activation: bool) -> list[nn.Module]:
    return [
        FilterResponseNorm2d(CHANNELS, activation=activation),
        *(EvoNorm2dS0(CHANNELS, groups, activation=activation) for groups in (1, 4, 12)),
    ]


def expected(layer: nn.Module, x: Tensor) -> Tensor:
    formula = frn if isinstance(layer, FilterResponseNorm2d) else evonorm
    with torch.no_grad():
        return torch.from_numpy(formula(layer, x))  # type: ignore[operator]


@pytest.mark.parametrize("activation", [True, False])
def test_norms_match_their_formulas(activation: bool) -> None:
    for layer in layers(activation):
        randomized(layer.double())
        x = maps()
        for layout in (torch.contiguous_format, torch.channels_last):
            y = layer(x.contiguous(memory_format=layout))
            torch.testing.assert_close(y, expected(layer, x))
            assert y.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("activation", [True, False])
def test_norms_compute_in_fp32_for_half_precision(activation: bool) -> None:
    """One rounding of the output: half of bf16's spacing, 2^-8 relative."""
    for layer in layers(activation):
        randomized(layer)
        x = maps(torch.bfloat16)
        y = layer(x)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), expected(layer, x), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("activation", [True, False])
def test_gradients(activation: bool) -> None:
    for layer in layers(activation):
        randomized(layer.double())
        x = maps()[:, :, :2, :3].requires_grad_()
        assert torch.autograd.gradcheck(layer, (x,), fast_mode=True)


@pytest.mark.parametrize("activation", [True, False])
def test_he_init_resets_the_parameters(activation: bool) -> None:
    for layer in layers(activation):
        start = {name: p.clone() for name, p in layer.state_dict().items()}
        assert len(start) == 2 + activation
        he_init_(randomized(layer))
        for name, parameter in layer.state_dict().items():
            assert torch.equal(parameter, start[name]), name


@pytest.mark.parametrize(
    ("kind", "dims"), [(WeightStandardizedConv2d, 2), (WeightStandardizedConv3d, 3)]
)
def test_weight_standardization_matches_its_formula(kind: type, dims: int) -> None:
    layer = kind(4, 6, 3, 2, 1, groups=2, bias=False)
    randomized(layer.double())
    x = torch.randn(2, 4, *(5,) * dims, dtype=torch.float64)
    filters = layer.weight.detach().numpy().copy()
    for i in range(6):
        filters[i] = (filters[i] - filters[i].mean()) / np.sqrt(filters[i].var() + 1e-5)
    convolve = {2: nn.functional.conv2d, 3: nn.functional.conv3d}[dims]
    y = convolve(x, torch.from_numpy(filters), stride=2, padding=1, groups=2)
    torch.testing.assert_close(layer(x), y)

    def of_weight(weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(of_weight, (layer.weight,), fast_mode=True)


def test_weight_standardization_ignores_the_scale_of_the_filters() -> None:
    layer = conv_block("ws+gn")(4, 8, 3)
    x = torch.randn(2, 4, 6, 6)
    before = layer(x)
    with torch.no_grad():
        layer[0].weight.mul_(1000).add_(3)  # type: ignore[index]
    torch.testing.assert_close(layer(x), before, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("channels", "groups", "found"), [(64, 32, 32), (16, 8, 8), (20, 8, 4), (16, 32, 16)]
)
def test_groups_divide_the_channels(channels: int, groups: int, found: int) -> None:
    for norm in ("gn", "ws+gn", "evonorm-s0"):
        block = conv_block(norm, groups=groups)(3, channels, 3)
        layer = block[1]  # type: ignore[index]
        numbers = layer.groups if isinstance(layer, EvoNorm2dS0) else layer.num_groups
        assert numbers == found
    with pytest.raises(ValueError, match="groups must divide the 10 channels, got 4 groups"):
        EvoNorm2dS0(10, 4)


def test_activation_after_an_addition() -> None:
    x = torch.randn(2, 16, 5, 5)
    assert torch.equal(sum_activation("bn", 16)(x.clone()), x.relu())
    threshold = sum_activation("frn", 16)
    assert torch.equal(threshold(x), x.relu())  # tau starts at 0
    nn.init.constant_(threshold.threshold, -0.5)
    assert torch.equal(threshold(x), x.clamp(min=-0.5))
    evonorm = sum_activation("evonorm-s0", 16, groups=8)
    torch.testing.assert_close(evonorm(x), EvoNorm2dS0(16, 8)(x))
    assert (evonorm(10 * x) - evonorm(x)).abs().max() < 2  # normalized: x * sigmoid(10 x) is close
    for model in (CifarResNet(8, norm="evonorm-s0"), CifarResNet(8, norm="frn")):
        own = [name for name, _ in model.named_parameters() if ".activation." in name]
        assert len(own) == (9 if isinstance(model.stages[0].activation, EvoNorm2dS0) else 3)
