"""What an export costs is measured on images as the network is to see them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepcontrol.export.accuracy import compare
from deepcontrol.export.images import RunImages
from deepcontrol.train.build import build_model
from deepcontrol.train.config import Train
from deepcontrol.train.evaluate import evaluate
from tests.noise import make_camvid

SIZE = (32, 32)


@pytest.fixture
def config(tmp_path: Path) -> Train:
    """Of a network that learns from crops."""
    root = make_camvid(tmp_path / "camvid")
    return Train(out=tmp_path / "run", data="camvid", data_root=root, size=SIZE, width=0.1)


@pytest.mark.parametrize("whole", [False, True])
def test_errors_are_those_of_eval(config: Train, whole: bool) -> None:
    config = replace(config, eval_whole=whole)
    model, images = build_model(config, 11).eval(), RunImages(config)
    with torch.no_grad():
        runs = {"as trained": lambda seen: (model(seen),), "none": lambda seen: (-model(seen),)}
        found = compare(runs, images.validation(), images.window)
    expected = evaluate(model, images.validation(), window=None if whole else SIZE)
    assert found["as trained"].pixel_error == expected.pixel_error
    assert found["as trained"].relabelled == 0
    assert found["none"].relabelled > 0.5
    other = evaluate(model, images.validation(), window=SIZE if whole else None)
    assert other.pixel_error != expected.pixel_error


def test_means_and_ranges_come_from_windows(config: Train) -> None:
    windows = list(RunImages(config).calibration())
    whole = list(RunImages(replace(config, eval_whole=True)).calibration())
    assert [w.shape for w in windows] == [(1, 3, *SIZE)] * 4
    assert torch.equal(torch.cat(windows[:2], 3), whole[0])
    assert torch.equal(torch.cat(windows[2:], 3), whole[1])
