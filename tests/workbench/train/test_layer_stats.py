"""Layer statistics match the parameters and the active positions."""

from typing import get_args

import pytest
import torch

from deepcontrol.nn import AGCConvPool2d, Quantile
from deepcontrol.ops import max_pool2x2
from deepcontrol.workbench.models import Norm, SegNet, is_agc
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.layer_stats import LayerStats, unpooled

SINGLE = Group(torch.device("cpu"))


def test_layers_of_an_agc_network() -> None:
    model = SegNet(5, width=0.05).eval()
    first = model.encoder[0].convolutions[0]
    with torch.no_grad():
        first.mean_scale.copy_(torch.linspace(0, 2, len(first.mean_scale)))
        layers = LayerStats(model).compute(torch.randn(2, 3, 32, 64), SINGLE)
    assert len(layers) == 25
    assert next(iter(layers)) == "encoder.0.convolutions.0"
    assert list(layers)[-1] == "decoder.4.convolutions.0"
    about = layers["encoder.0.convolutions.0"]
    assert about["mean_scale"]["min"] == 0
    assert about["mean_scale"]["max"] == 2
    assert about["mean_scale"]["q25"] == pytest.approx(0.5)
    assert about["gain"]["mean"] == 1
    assert about["bias"]["q95"] == 0
    assert all(0 < layer["open"] < 1 for layer in layers.values())


@pytest.mark.parametrize("norm", get_args(Norm))
def test_all_norms_have_the_same_layers(norm: Norm) -> None:
    model = SegNet(5, width=0.05, norm=norm).eval()
    with torch.no_grad():
        layers = LayerStats(model).compute(torch.randn(2, 3, 32, 64), SINGLE)
    assert list(layers)[:2] == ["encoder.0.convolutions.0", "encoder.0.convolutions.1"]
    assert len(layers) == 25
    keys = {"none": {"bias", "open"}}.get(norm, {"gain", "bias", "open"})
    keys |= {"mean_scale"} if is_agc(norm) else set()
    assert all(set(layer) == keys for layer in layers.values())
    assert all(0 < layer["open"] < 1 for layer in layers.values())


def test_unpooled_matches_a_pooling_neuron_before_its_pooling() -> None:
    neuron = SegNet(5, width=0.05).encoder[0].convolutions[-1]
    x = torch.randn(2, neuron.in_channels, 10, 12)
    with torch.no_grad():
        pooled, indices = neuron(x)
        expected, expected_indices = max_pool2x2(unpooled(neuron, x))
    assert torch.equal(pooled, expected)
    assert torch.equal(indices, expected_indices)


def test_unpooled_has_the_background_of_its_neuron() -> None:
    neuron = AGCConvPool2d(3, 8, 3, padding=1, background=Quantile(0.2))
    torch.nn.init.normal_(neuron.gain)
    x = torch.randn(2, 3, 10, 12)
    with torch.no_grad():
        torch.testing.assert_close(max_pool2x2(unpooled(neuron, x))[0], neuron(x)[0])
