"""Larger images are evaluated as they were trained on: in windows, each pixel once."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deepcontrol.workbench.models.classnet import ClassesAndContour
from deepcontrol.workbench.predict.network import load_network
from deepcontrol.workbench.train.build import build_data, build_model, open_sources
from deepcontrol.workbench.train.checkpoint import load
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.evaluate import evaluate
from deepcontrol.workbench.train.saving import load_weights
from deepcontrol.workbench.train.windows import forward_in_windows, windows
from tests.workbench.train.runs import metrics, tiny, train_here


class Two(nn.Module):
    """Two maps, of which one is the image and the other has its mean everywhere."""

    def forward(self, x: Tensor) -> ClassesAndContour:
        return ClassesAndContour(x, x.mean((2, 3), keepdim=True).expand_as(x))


@pytest.mark.parametrize("size", [(4, 6), (8, 6), (4, 12), (5, 7), (3, 3), (8, 12), (16, 16)])
def test_every_pixel_is_of_one_window(size: tuple[int, int]) -> None:
    images = torch.randn(2, 3, 8, 12)
    found = forward_in_windows(Two(), images, size)
    assert torch.equal(found.classes, images)
    for top, rows in windows(8, size[0]):
        for left, columns in windows(12, size[1]):
            seen = images[:, :, top : top + size[0], left : left + size[1]]
            mean = seen.mean((2, 3), keepdim=True)
            part = found.contour[:, :, rows, columns]
            torch.testing.assert_close(part, mean.expand_as(part))


@pytest.mark.parametrize("whole", range(1, 40))
@pytest.mark.parametrize("own", [1, 2, 3, 7, 10])
def test_windows_cover_a_side_and_lie_inside(whole: int, own: int) -> None:
    shares = windows(whole, own)
    assert [i for _, share in shares for i in range(whole)[share]] == list(range(whole))
    for start, share in shares:
        assert 0 <= start <= share.start
        assert share.stop <= min(whole, start + own)


def test_without_a_size_images_are_seen_whole() -> None:
    images = torch.randn(1, 3, 8, 12)
    found = forward_in_windows(Two(), images, None)
    torch.testing.assert_close(found.contour, Two()(images).contour)


def test_a_run_on_crops_is_evaluated_in_windows(camvid: Path, run: Path) -> None:
    kind = {"data": "camvid", "data_root": camvid, "size": "32x32", "width": 0.1}
    kind |= {"train_limit": 2, "val_limit": 2}
    train_here(run, epochs=1, **kind)
    config = tiny(run, **kind)
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
    train_here(other, epochs=1, eval_whole="", **kind)
    assert metrics(other)[-1]["val_error"] == whole
    assert load_network(other, "last", torch.device("cpu")).window is None
