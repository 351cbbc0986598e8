"""fold: the same function, without a pass over the output of the convolutions."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._python_dispatch import TorchDispatchMode

from deepcontrol import AGC2d, AGCConv2d, AGCLinear, calibrate, fold, to_agc
from deepcontrol.convert.fold import FoldedConv2d, FoldedConvPool2d, _FoldedConv
from deepcontrol.nn import AGCConvPool2d
from deepcontrol.workbench.models import SegNet
from tests.convert.networks import (
    INPUTS,
    Residual,
    UNet,
    converted,
    row,
    trained,
    with_random_parameters,
)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("make", INPUTS)
def test_folding_preserves_the_outputs(make: Callable[[], nn.Module], samples: int) -> None:
    model, x = converted(make)
    before = copy.deepcopy(model.state_dict())
    folded = fold(model)
    torch.testing.assert_close(folded(x[:samples]), model(x[:samples]), rtol=1e-5, atol=1e-5)
    assert not folded.training
    assert not any(p.requires_grad for p in folded.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(isinstance(m, _FoldedConv) for m in model.modules())
    neurons = [m for m in model.modules() if type(m) is AGCConv2d]
    folds = [m for m in folded.modules() if isinstance(m, FoldedConv2d)]
    assert len(folds) >= len(neurons)


class Readers(TorchDispatchMode):
    """Record the ops that read a tensor of the given shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.ops = shape, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(a, Tensor) and tuple(a.shape) == self.shape for a in args):
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_only_the_activation_reads_the_output() -> None:
    neuron = with_random_parameters(AGCConv2d(3, 8, 3, padding=1))
    x = torch.randn(1, 3, 9, 9)
    with Readers((1, 8, 9, 9)) as folded, torch.no_grad():
        fold(neuron)(x)
    assert folded.ops == ["aten.relu_.default"]
    with Readers((1, 8, 9, 9)) as unfolded, torch.no_grad():
        neuron(x)
    assert "aten.mean.dim" in unfolded.ops


def test_agc_layer_after_a_convolution_is_folded() -> None:
    model = with_random_parameters(
        nn.Sequential(nn.Conv2d(3, 8, 3), AGC2d(8), nn.ReLU(), AGC2d(8), nn.Conv2d(8, 4, 1))
    )
    folded = fold(model)
    assert [type(m).__name__ for m in folded] == [
        "FoldedConv2d", "Identity", "Identity", "AGC2d", "Conv2d",
    ]  # fmt: skip
    x = torch.randn(3, 3, 9, 9)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)

    bare = nn.Sequential(nn.Conv2d(3, 8, 3), AGC2d(8, affine=False))
    assert isinstance(fold(bare)[0], FoldedConv2d)
    torch.testing.assert_close(fold(bare)(x), bare(x), rtol=1e-5, atol=1e-5)
    elsewhere = copy.deepcopy(bare).to("meta")  # the missing parameters are on its device too
    assert fold(elsewhere)(x.to("meta")).shape == (3, 8, 7, 7)


class Doubled(AGC2d):
    """Overrides forward, so that Eq. 1 does not describe it."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


def test_agc_layers_of_other_classes() -> None:
    x = torch.randn(2, 3, 9, 9)
    doubled = with_random_parameters(nn.Sequential(nn.Conv2d(3, 8, 3), Doubled(8), nn.ReLU()))
    torch.testing.assert_close(fold(doubled)(x), doubled(x), rtol=1e-5, atol=1e-5)
    assert isinstance(calibrate(doubled, [x])[1], Doubled)

    computed = with_random_parameters(nn.Sequential(nn.Conv2d(3, 8, 3), AGC2d(8)))
    parametrize.register_parametrization(computed[1], "weight", Square())
    assert isinstance(fold(computed)[0], FoldedConv2d)
    torch.testing.assert_close(fold(computed)(x), computed(x), rtol=1e-5, atol=1e-5)


def test_lambda_0_folds_to_a_plain_convolution() -> None:
    model = trained(Residual()).eval()
    x = torch.randn(1, 3, 20, 24)
    expected = model(x)
    folded = fold(to_agc(model, init="bn"))
    assert not any(isinstance(m, _FoldedConv) for m in folded.modules())
    torch.testing.assert_close(folded(x), expected, rtol=1e-5, atol=1e-5)


def test_agc_linear_folds_to_a_linear_layer() -> None:
    model = with_random_parameters(
        nn.Sequential(AGCLinear(6, 5), AGCLinear(5, 4, activation="none"))
    )
    folded = fold(model)
    assert type(folded[1]) is nn.Linear
    x = torch.randn(3, 6)
    torch.testing.assert_close(folded(x), model(x))


def test_parametrized_filters_are_folded() -> None:
    model = with_random_parameters(nn.Sequential(parametrizations.weight_norm(AGCConv2d(3, 8, 3))))
    x, folded = torch.randn(1, 3, 9, 9), fold(model)
    assert isinstance(folded[0], FoldedConv2d)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)


def test_norms_in_fp32_among_half_filters() -> None:
    model = row(3, 8)
    model[0].to(torch.bfloat16)
    model = with_random_parameters(to_agc(model))
    for samples in (1, 2):
        x = torch.randn(samples, 3, 9, 9).bfloat16()
        for copied in (fold(model), calibrate(model, [x[:1]])):
            y = copied(x)
            assert y.dtype == torch.bfloat16
            torch.testing.assert_close(y[:1], model(x[:1]), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu", "none"])
@pytest.mark.parametrize("samples", [1, 2])
def test_agc_conv_pool(activation: str, samples: int) -> None:
    neuron = with_random_parameters(AGCConvPool2d(3, 8, 3, padding=1, activation=activation))
    layer = fold(neuron)
    assert isinstance(layer, FoldedConvPool2d)
    x = torch.randn(samples, 3, 11, 8)
    (pooled, index), (expected, expected_index) = layer(x), neuron(x)
    torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(index, expected_index)


def test_batchnorm_fuser_is_right_or_raises() -> None:
    norm = trained(nn.BatchNorm2d(8)).eval()
    x = torch.randn(2, 3, 9, 9)
    folded = fold(with_random_parameters(AGCConv2d(3, 8, 3, activation="none")))
    fused = fuse_conv_bn_eval(folded, norm)
    torch.testing.assert_close(fused(x), norm(folded(x)), rtol=1e-4, atol=1e-5)
    for neuron in (AGCConv2d(3, 8, 3), AGCConvPool2d(3, 8, 3, activation="none")):
        with pytest.raises(NotImplementedError, match="cannot fuse a BatchNorm into Folded"):
            fuse_conv_bn_eval(fold(with_random_parameters(neuron)), norm)


def test_segnet() -> None:
    model = with_random_parameters(SegNet(5, width=0.0625))
    folded = fold(model)
    assert sum(isinstance(m, _FoldedConv) for m in folded.modules()) == 25
    for samples in (1, 2):
        x = torch.randn(samples, 3, 48, 40)
        torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)


def test_hooks_move_to_the_folded_layer() -> None:
    model, seen = nn.Sequential(AGCConv2d(3, 8, 3)), []
    model[0].register_forward_hook(lambda m, args, out: seen.append(out))
    y = fold(model)(torch.randn(1, 3, 9, 9))
    assert len(seen) == 1
    assert seen[0] is y


def test_channels_last_autocast_and_half() -> None:
    model, x = converted(UNet)
    expected, folded = model(x), fold(model)
    last = folded.to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        last(x.to(memory_format=torch.channels_last)), expected, rtol=1e-5, atol=1e-5
    )
    for samples in (1, 2):
        with torch.autocast("cpu", torch.bfloat16):
            y = folded(x[:samples])
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), expected[:samples], rtol=0.1, atol=0.1)
        half = copy.deepcopy(folded).bfloat16()(x[:samples].bfloat16())
        torch.testing.assert_close(half.float(), expected[:samples], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("make", [Residual, UNet])
def test_export_with_dynamic_shapes(make: Callable[[], nn.Module]) -> None:
    model, x = converted(make)
    folded = fold(model)
    # The U-Net needs even sizes.
    step = 2 if make is UNet else 1
    sizes = {
        0: torch.export.Dim("n", min=2, max=64),
        2: step * torch.export.Dim("h", min=5, max=512),
        3: step * torch.export.Dim("w", min=5, max=512),
    }
    program = torch.export.export(folded, (x,), dynamic_shapes=(sizes,)).module()
    for shape in ((2, 3, 20, 24), (3, 3, 34, 18), (5, 3, 16, 40)):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)


def test_export_with_wide_dilations() -> None:
    """Maps may be smaller than the border of the kernel."""
    model = fold(with_random_parameters(AGCConv2d(3, 4, 3, padding=12, dilation=12)))
    sizes = {0: 1, 2: torch.export.Dim("h", min=2, max=99), 3: torch.export.Dim("w", min=2, max=99)}
    program = torch.export.export(model, (torch.randn(1, 3, 8, 9),), dynamic_shapes=(sizes,))
    for shape in ((1, 3, 5, 6), (1, 3, 40, 33)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiles_without_graph_breaks() -> None:
    model = with_random_parameters(nn.Sequential(AGCConv2d(3, 8, 3, 2, 1), AGCConvPool2d(8, 8, 3)))
    compiled = torch.compile(fold(model), fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((1, 3, 20, 24), (2, 3, 18, 26)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
