"""Evaluation in windows, each pixel once; statistics of the layers."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from deepcontrol.ops import max_pool2x2
from deepcontrol.workbench.models import Norm, SegNet, is_agc
from deepcontrol.workbench.models.segmentation import ClassesAndContour
from deepcontrol.workbench.predict import load_network
from deepcontrol.workbench.train.build import build_model
from deepcontrol.workbench.train.checkpoint import load
from deepcontrol.workbench.train.data import build_data, open_sources
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.evaluate import (
    LayerStats,
    evaluate,
    forward_in_windows,
    unpooled,
    windows,
)
from deepcontrol.workbench.train.snapshot import load_weights
from tests.workbench.train.runs import metrics, tiny, train_here


class ImageAndMean(nn.Module):
    """Return the image itself and a map of its mean."""

    def forward(self, x: Tensor) -> ClassesAndContour:
        return ClassesAndContour(x, x.mean((2, 3), keepdim=True).expand_as(x))


@pytest.mark.parametrize("size", [(4, 6), (8, 6), (4, 12), (5, 7), (3, 3), (8, 12), (16, 16)])
def test_each_pixel_comes_from_one_window(size: tuple[int, int]) -> None:
    images = torch.randn(2, 3, 8, 12)
    found = forward_in_windows(ImageAndMean(), images, size)
    assert torch.equal(found.classes, images)
    for top, rows in windows(8, size[0]):
        for left, columns in windows(12, size[1]):
            crop = images[:, :, top : top + size[0], left : left + size[1]]
            mean = crop.mean((2, 3), keepdim=True)
            part = found.contour[:, :, rows, columns]
            torch.testing.assert_close(part, mean.expand_as(part))


@pytest.mark.parametrize("length", range(1, 40))
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_windows_cover_a_side_and_stay_inside(length: int, size: int) -> None:
    found = windows(length, size)
    assert [i for _, part in found for i in range(length)[part]] == list(range(length))
    for start, part in found:
        assert 0 <= start <= part.start
        assert part.stop <= min(length, start + size)


def test_without_a_size_images_are_evaluated_whole() -> None:
    images = torch.randn(1, 3, 8, 12)
    found = forward_in_windows(ImageAndMean(), images, None)
    torch.testing.assert_close(found.contour, ImageAndMean()(images).contour)


def test_run_on_crops_is_evaluated_in_windows(camvid: Path, run: Path) -> None:
    flags = {"data": "camvid", "data_root": camvid, "size": "32x32", "width": 0.1}
    flags |= {"train_limit": 2, "val_limit": 2}
    train_here(run, epochs=1, **flags)
    config = tiny(run, **flags)
    data = build_data(config, open_sources(config), Group(torch.device("cpu")), lambda *_: None)
    assert data.val.size == (32, 64)
    model = build_model(config, 11)
    load_weights(model, load(run / "last").model)
    in_windows = evaluate(model, data.val, window=(32, 32)).pixel_error
    whole = evaluate(model, data.val).pixel_error
    assert in_windows != whole
    assert metrics(run)[-1]["val_error"] == in_windows
    assert load_network(run, "last", torch.device("cpu")).window == (32, 32)  # for `predict`
    other = run.with_name("other")
    train_here(other, epochs=1, eval_whole="", **flags)
    assert metrics(other)[-1]["val_error"] == whole
    assert load_network(other, "last", torch.device("cpu")).window is None


# Statistics of each layer


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
