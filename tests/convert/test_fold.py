"""Folded networks: the same function, with nothing passing over a convolution's output."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from deepcontrol import AGC2d, AGCConv2d, AGCLinear, calibrate, fold, to_agc
from deepcontrol.convert.folded import FoldedConv2d, FoldedConvPool2d, _FoldedConv
from deepcontrol.nn import AGCConvPool2d
from deepcontrol.workbench.models import SegNet
from tests.convert.networks import INPUTS, Residual, UNet, row, trained


def controlled(model: nn.Module) -> nn.Module:
    """An AGC model as if trained: every gain, bias and lambda its own."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            center = 0.0 if name.endswith("bias") else 0.8
            nn.init.normal_(parameter, center, 0.2)
    return model.eval()


def forwards(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    x = torch.randn(INPUTS[make])
    return controlled(to_agc(make(), example=x)), x


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("make", INPUTS)
def test_folding_changes_no_output(make: Callable[[], nn.Module], samples: int) -> None:
    model, x = forwards(make)
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
    """Which ops read the map that the last convolution of a batch's size made."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.ops = shape, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(a, Tensor) and tuple(a.shape) == self.shape for a in args):
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_nothing_but_the_activation_reads_the_output() -> None:
    neuron = controlled(AGCConv2d(3, 8, 3, padding=1))
    x = torch.randn(1, 3, 9, 9)
    with Readers((1, 8, 9, 9)) as folded, torch.no_grad():
        fold(neuron)(x)
    assert folded.ops == ["aten.relu_.default"]
    with Readers((1, 8, 9, 9)) as unfolded, torch.no_grad():
        neuron(x)
    assert "aten.mean.dim" in unfolded.ops


def test_a_layer_behind_a_convolution_folds_too() -> None:
    model = controlled(
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


def test_no_lambda_leaves_a_plain_convolution() -> None:
    model = trained(Residual()).eval()
    x = torch.randn(1, 3, 20, 24)
    expected = model(x)
    folded = fold(to_agc(model, init="bn"))
    assert not any(isinstance(m, _FoldedConv) for m in folded.modules())
    torch.testing.assert_close(folded(x), expected, rtol=1e-5, atol=1e-5)


def test_a_linear_neuron_becomes_a_linear_layer() -> None:
    model = controlled(nn.Sequential(AGCLinear(6, 5), AGCLinear(5, 4, activation="none")))
    folded = fold(model)
    assert type(folded[1]) is nn.Linear
    x = torch.randn(3, 6)
    torch.testing.assert_close(folded(x), model(x))


def test_computed_filters_are_folded_as_they_are() -> None:
    model = controlled(nn.Sequential(parametrizations.weight_norm(AGCConv2d(3, 8, 3))))
    x, folded = torch.randn(1, 3, 9, 9), fold(model)
    assert isinstance(folded[0], FoldedConv2d)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)


def test_norms_in_fp32_among_half_filters() -> None:
    model = row(3, 8)
    model[0].to(torch.bfloat16)
    model = controlled(to_agc(model))
    for samples in (1, 2):
        x = torch.randn(samples, 3, 9, 9).bfloat16()
        for copied in (fold(model), calibrate(model, [x[:1]])):
            y = copied(x)
            assert y.dtype == torch.bfloat16
            torch.testing.assert_close(y[:1], model(x[:1]), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu", "none"])
@pytest.mark.parametrize("samples", [1, 2])
def test_the_pooling_neuron(activation: str, samples: int) -> None:
    neuron = controlled(AGCConvPool2d(3, 8, 3, padding=1, activation=activation))
    layer = fold(neuron)
    assert isinstance(layer, FoldedConvPool2d)
    x = torch.randn(samples, 3, 11, 8)
    (pooled, index), (expected, expected_index) = layer(x), neuron(x)
    torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(index, expected_index)


def test_segnet() -> None:
    model = controlled(SegNet(5, width=0.0625))
    folded = fold(model)
    assert sum(isinstance(m, _FoldedConv) for m in folded.modules()) == 25
    for samples in (1, 2):
        x = torch.randn(samples, 3, 48, 40)
        torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)


def test_hooks_are_not_lost_in_silence() -> None:
    model = nn.Sequential(AGCConv2d(3, 8, 3))
    model[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"hooks on 0 \(AGCConv2d\)") as caught:
        fold(model)
    assert caught[0].filename == __file__


def test_channels_last_autocast_and_half() -> None:
    model, x = forwards(UNet)
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
def test_exports_with_open_sizes(make: Callable[[], nn.Module]) -> None:
    model, x = forwards(make)
    folded = fold(model)
    # The U-Net halves and doubles: its sizes are even.
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


def test_exports_wide_dilations() -> None:
    """Borders wider than the maps: nothing may demand that the maps are larger."""
    model = fold(controlled(AGCConv2d(3, 4, 3, padding=12, dilation=12)))
    sizes = {0: 1, 2: torch.export.Dim("h", min=2, max=99), 3: torch.export.Dim("w", min=2, max=99)}
    program = torch.export.export(model, (torch.randn(1, 3, 8, 9),), dynamic_shapes=(sizes,))
    for shape in ((1, 3, 5, 6), (1, 3, 40, 33)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


def test_compiles_whole() -> None:
    model = controlled(nn.Sequential(AGCConv2d(3, 8, 3, 2, 1), AGCConvPool2d(8, 8, 3)))
    compiled = torch.compile(fold(model), fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((1, 3, 20, 24), (2, 3, 18, 26)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", INPUTS)
def test_calibrated_is_plain_torch(make: Callable[[], nn.Module]) -> None:
    model, _ = forwards(make)
    torch.manual_seed(1)
    one = torch.randn(1, *INPUTS[make][1:])
    calibrated = calibrate(model, [(one, "a label")])
    for module in calibrated.modules():
        assert type(module).__module__.startswith(("torch.nn", "tests.convert")), type(module)
    # On the image that it was calibrated with it is exact, and on another it need not be. Shared
    # layers have met two means, of which they keep the average.
    if make.__name__ != "SharedHead":
        torch.testing.assert_close(calibrated(one), model(one), rtol=1e-4, atol=1e-4)
    other = 1 + torch.randn_like(one)
    assert calibrated(other).isfinite().all()
    assert not torch.allclose(calibrated(other), model(other), rtol=1e-3, atol=1e-3)


def test_calibration_averages_over_samples() -> None:
    neuron = controlled(AGCConv2d(3, 8, 3, activation="none"))
    x = torch.randn(5, 3, 9, 9)
    in_one, in_two = calibrate(neuron, [x]), calibrate(neuron, [x[:1], x[1:]])
    torch.testing.assert_close(in_one.bias, in_two.bias)
    z = nn.functional.conv2d(x, neuron.weight * neuron.gain.view(-1, 1, 1, 1))
    means = z.mean((0, 2, 3))
    torch.testing.assert_close(in_one.bias, neuron.bias - neuron.mean_scale * means)


class ByKeyword(nn.Module):
    """It is called with a dict's names, and calls its layer by name."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron = controlled(AGCConv2d(3, 8, 3, activation="none"))

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
        del labels
        return self.neuron(input=pixel_values)


def test_calibration_takes_what_the_model_takes() -> None:
    model, x = ByKeyword(), torch.randn(2, 3, 9, 9)
    expected = calibrate(model, [x]).neuron.bias
    for data in ([{"pixel_values": x, "labels": x}], [[x, "a label"]], [*x]):  # the last unbatched
        torch.testing.assert_close(calibrate(model, data).neuron.bias, expected)
    z = nn.functional.conv2d(x, model.neuron.weight * model.neuron.gain.view(-1, 1, 1, 1))
    kept = model.neuron.bias - model.neuron.mean_scale * z.mean((0, 2, 3))
    torch.testing.assert_close(expected, kept)


def test_calibration_gives_a_dict_to_a_model_that_wants_one() -> None:
    class OfDicts(ByKeyword):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return self.neuron(batch["image"])

    model, x = OfDicts(), torch.randn(2, 3, 9, 9)
    calibrated = calibrate(model, [{"image": x}])
    torch.testing.assert_close(calibrated.neuron.bias, calibrate(model.neuron, [x]).bias)


def test_calibrated_segnet_still_unpools() -> None:
    model = controlled(SegNet(5, width=0.0625))
    x = torch.randn(1, 3, 48, 40)
    torch.testing.assert_close(calibrate(model, [x])(x), model(x), rtol=1e-4, atol=1e-5)
