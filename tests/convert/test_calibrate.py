"""calibrate: constant means, and only torch's own layers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, AGCConv2d, calibrate, reestimate_statistics
from deepcontrol.workbench.models import SegNet
from tests.convert.networks import INPUTS, converted, with_random_parameters


@pytest.mark.parametrize("make", INPUTS)
def test_calibrated_model_has_only_torch_layers(make: Callable[[], nn.Module]) -> None:
    model, _ = converted(make)
    torch.manual_seed(1)
    one = torch.randn(1, *INPUTS[make][1:])
    calibrated = calibrate(model, [(one, "a label")])
    for module in calibrated.modules():
        assert type(module).__module__.startswith(("torch.nn", "tests.convert")), type(module)
    # It is exact on the image that it was calibrated with, and differs on others. A shared layer
    # averages the means of its two calls.
    if make.__name__ != "SharedHead":
        torch.testing.assert_close(calibrated(one), model(one), rtol=1e-4, atol=1e-4)
    other = 1 + torch.randn_like(one)
    assert calibrated(other).isfinite().all()
    assert not torch.allclose(calibrated(other), model(other), rtol=1e-3, atol=1e-3)


def test_means_are_averaged_over_samples() -> None:
    neuron = with_random_parameters(AGCConv2d(3, 8, 3, activation="none"))
    x = torch.randn(5, 3, 9, 9)
    in_one, in_two = calibrate(neuron, [x]), calibrate(neuron, [x[:1], x[1:]])
    torch.testing.assert_close(in_one.bias, in_two.bias)
    z = nn.functional.conv2d(x, neuron.weight * neuron.gain.view(-1, 1, 1, 1))
    means = z.mean((0, 2, 3))
    torch.testing.assert_close(in_one.bias, neuron.bias - neuron.mean_scale * means)


class ByKeyword(nn.Module):
    """Takes keyword arguments, and calls its layer with one."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron = with_random_parameters(AGCConv2d(3, 8, 3, activation="none"))

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
        del labels
        return self.neuron(input=pixel_values)


class Own(AGC2d):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("layer", [AGC2d(3, affine=False), Own(3)])
def test_unfused_layers_become_batchnorms(layer: nn.Module) -> None:
    model = nn.Sequential(nn.ReLU(), layer).double()
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    calibrated = calibrate(model, [x])
    assert type(calibrated[1]) is nn.BatchNorm2d
    torch.testing.assert_close(calibrated(x), model(x))  # the mean is that of this sample


def test_batches_are_passed_as_the_model_takes_them() -> None:
    model, x = ByKeyword(), torch.randn(2, 3, 9, 9)
    expected = calibrate(model, [x]).neuron.bias
    as_keywords, with_label, unbatched = [{"pixel_values": x, "labels": x}], [[x, "label"]], [*x]
    for data in (as_keywords, with_label, unbatched):
        torch.testing.assert_close(calibrate(model, data).neuron.bias, expected)
    z = nn.functional.conv2d(x, model.neuron.weight * model.neuron.gain.view(-1, 1, 1, 1))
    fixed = model.neuron.bias - model.neuron.mean_scale * z.mean((0, 2, 3))
    torch.testing.assert_close(expected, fixed)


def test_model_that_takes_a_dict_gets_the_dict() -> None:
    class OfDicts(ByKeyword):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return self.neuron(batch["image"])

    model, x = OfDicts(), torch.randn(2, 3, 9, 9)
    calibrated = calibrate(model, [{"image": x}])
    torch.testing.assert_close(calibrated.neuron.bias, calibrate(model.neuron, [x]).bias)


def test_calibrated_segnet_unpools() -> None:
    model = with_random_parameters(SegNet(5, width=0.0625))
    x = torch.randn(1, 3, 48, 40)
    torch.testing.assert_close(calibrate(model, [x])(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use", [calibrate, reestimate_statistics])
def test_a_tensor_is_not_taken_for_batches(use: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(AGCConv2d(3, 8, 3), nn.BatchNorm2d(8))
    with pytest.raises(TypeError, match=r"tensor of shape \(2, 3, 9, 9\).*pass \[images\]"):
        use(model, torch.randn(2, 3, 9, 9))
