"""Images larger than the training size are evaluated in windows, each pixel once."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deepcontrol.workbench.models.classnet import ClassesAndContour
from deepcontrol.workbench.predict import load_network
from deepcontrol.workbench.train.build import build_data, build_model, open_sources
from deepcontrol.workbench.train.checkpoint import load
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.evaluate import evaluate, forward_in_windows, windows
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
