"""Convolutions with a padding of their own become neurons with that padding."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from deepcontrol import AGCConv1d, AGCConv2d, calibrate, fold, to_agc
from deepcontrol.convert.replace import known_padding
from tests.convert.networks import trained


def same(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Pad as TensorFlow: the output has ceil(size / stride) positions."""
    sides: list[int] = []
    for size, k, s, d in zip(
        x.shape[2:], conv.kernel_size, conv.stride, conv.dilation, strict=True
    ):
        total = max((math.ceil(size / s) - 1) * s + (k - 1) * d + 1 - size, 0)
        sides = [total // 2, total - total // 2, *sides]
    return functional.pad(x, sides)


class Same(nn.Conv2d):
    """As timm's Conv2dSame and efficientnet_pytorch's Conv2dDynamicSamePadding."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(
            same(x, self), self.weight, self.bias, self.stride, 0, self.dilation, self.groups
        )


class Static(nn.Conv2d):
    """As efficientnet_pytorch's Conv2dStaticSamePadding."""

    def __init__(self, *args: object, sides: tuple[int, ...], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.stride = list(self.stride)
        self.static_padding = nn.ZeroPad2d(sides) if any(sides) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.static_padding(x))


class Wrapper(nn.Conv2d):
    """As detectron2's and mmcv's Conv2d, which treat empty inputs apart."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.numel() else x.new_empty(0)


class Standardized(nn.Conv2d):
    """Weight standardization: more than a padding."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv2d(same(x, self), weight, self.bias, self.stride)


class Noisy(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.randn_like(y) if self.training else y


KNOWN = [
    (Same(4, 6, 3, stride=2), "same"),
    (Same(4, 6, 5, stride=3, dilation=2, groups=2), "same"),
    (Same(4, 6, (3, 2), stride=(2, 1), bias=False), "same"),
    (Static(4, 6, 3, stride=2, sides=(0, 1, 0, 1)), ((0, 1), (0, 1))),
    (Static(4, 6, 3, padding=1, sides=(2, 0, 1, 0)), ((2, 1), (3, 1))),
    (Static(4, 6, 3, sides=(1, 1, 1, 1)), "same"),
    (Static(4, 6, 3, sides=(2, 2, 2, 2)), (2, 2)),
    (Static(4, 6, 1, sides=(0, 0, 0, 0)), (0, 0)),
    (Wrapper(4, 6, 3, padding=1), (1, 1)),
]


@pytest.mark.parametrize(("conv", "padding"), KNOWN, ids=lambda value: type(value).__name__)
def test_known_paddings_are_fused_exactly(conv: nn.Conv2d, padding: object) -> None:
    assert known_padding(conv) == padding
    model = trained(nn.Sequential(conv, nn.BatchNorm2d(6), nn.ReLU()).double()).eval()
    inputs = [torch.randn(2, 4, *size, dtype=torch.float64) for size in ((12, 13), (15, 17))]
    expected = [model(x) for x in inputs]
    _, report = to_agc(model, init="bn", example=inputs[0], report=True)
    assert (report.count("fused"), report.unverified) == (1, None)
    assert model[0].padding == padding
    folded = fold(model)
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(model(x), y)
        torch.testing.assert_close(folded(x), y)
    nn.init.ones_(model[0].mean_scale)  # with a mean to fold
    for x in inputs:
        torch.testing.assert_close(fold(model)(x), model(x))
        torch.testing.assert_close(calibrate(model, [x[:1]])(x[:1]), model(x[:1]))


@pytest.mark.parametrize(
    "conv", [Standardized(4, 6, 3), Noisy(4, 6, 3)], ids=["standardized", "noisy"]
)
def test_more_than_padding_is_not_fused(conv: nn.Conv2d) -> None:
    state = torch.get_rng_state()
    assert known_padding(conv) is None
    assert torch.equal(torch.get_rng_state(), state)
    model = nn.Sequential(conv, nn.BatchNorm2d(6), nn.ReLU())
    _, report = to_agc(model, report=True)
    assert report.changes[0].why.startswith(f"{type(conv).__name__} overrides forward")


def test_pairs_that_do_not_fit_raise() -> None:
    with pytest.raises(ValueError, match=r"pair for each of 2 dimensions, got padding=\(\(0, 1\)"):
        AGCConv2d(3, 8, 3, padding=((0, 1),))
    with pytest.raises(
        ValueError, match=r"pair for each of 2 dimensions, got padding=\(1, \(0, 1\)"
    ):
        AGCConv2d(3, 8, 3, padding=(1, (0, 1)))


def test_pairs_may_be_lists() -> None:
    x, neuron = torch.randn(1, 3, 8, 8), AGCConv2d(3, 8, 3, padding=[[0, 1], (2, 0)])
    assert neuron.padding == ((0, 1), (2, 0))
    assert neuron(x).shape == (1, 8, 7, 8)


def test_strided_same_padding_in_one_dimension() -> None:
    neuron = AGCConv1d(3, 8, 4, stride=3, padding="same")
    for size in range(4, 12):
        assert neuron(torch.randn(1, 3, size)).shape[-1] == math.ceil(size / 3)


@pytest.mark.slow
def test_strided_same_padding_exports_with_dynamic_sizes() -> None:
    model = fold(nn.Sequential(AGCConv2d(3, 8, 3, stride=2, padding="same")))
    size = torch.export.Dim.AUTO
    x = torch.randn(2, 3, 16, 18)
    exported = torch.export.export(model, (x,), dynamic_shapes=({2: size, 3: size},)).module()
    for shape in ((16, 18), (21, 30)):
        x = torch.randn(2, 3, *shape)
        torch.testing.assert_close(exported(x), model(x), rtol=1e-4, atol=1e-5)
