"""The accuracy of an export is measured with the windows that the network uses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepcontrol.convert import calibrate
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.export.check import RunImages, compare_accuracy, in_windows
from deepcontrol.workbench.train.build import build_model
from deepcontrol.workbench.train.checkpoint import Checkpoint, save_best
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.config_file import save_config
from deepcontrol.workbench.train.evaluate import evaluate
from tests.noise import make_camvid

SIZE = (32, 32)


@pytest.fixture
def config(tmp_path: Path) -> Train:
    """The configuration of a network that is trained on crops."""
    root = make_camvid(tmp_path / "camvid")
    return Train(out=tmp_path / "run", data="camvid", data_root=root, size=SIZE, width=0.1)


@pytest.mark.parametrize("whole", [False, True])
def test_pixel_errors_match_eval(config: Train, whole: bool) -> None:
    config = replace(config, eval_whole=whole)
    model, images = build_model(config, 11).eval(), RunImages(config)
    with torch.no_grad():
        runs = {
            "as trained": in_windows(lambda seen: (model(seen),), images.window),
            "none": in_windows(lambda seen: (-model(seen),), images.window),
        }
        found = compare_accuracy(runs, images.validation())
    expected = evaluate(model, images.validation(), window=None if whole else SIZE)
    assert found["as trained"].pixel_error == expected.pixel_error
    assert found["as trained"].relabeled == 0
    assert found["none"].relabeled > 0.5
    other = evaluate(model, images.validation(), window=SIZE if whole else None)
    assert other.pixel_error != expected.pixel_error


@pytest.mark.slow
@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("fixed", [False, True])
def test_network_trained_on_crops(config: Train, fixed: bool) -> None:
    """The description contains the window, unless the means are fixed."""
    run = config.out
    run.mkdir()
    derived = {"classes": [*"abcdefghijk"], "colors": [[i, 0, 0] for i in range(11)]}
    save_config(config, derived | {"image_size": [32, 64]}, {"versions": {}, "commit": None})
    model = build_model(config, 11).eval()
    save_best(run, Checkpoint(model.state_dict(), {}))
    more = ["--fixed-means"] if fixed else []
    assert main(["export", str(run), "--to", "exported", *more]) == 0
    (about,) = (json.loads(path.read_text()) for path in (run / "export").glob("*.json"))
    assert about["input"]["window"] == (None if fixed else list(SIZE))
    if not fixed:
        assert about["validation"] is None
        return
    images = RunImages(config)
    plain = calibrate(model, images.calibration())
    expected = {
        "as trained": evaluate(model, images.validation(), window=SIZE).pixel_error,
        "fixed means": evaluate(plain, images.validation()).pixel_error,
    }
    found = {name: row["pixel_error"] for name, row in about["validation"].items()}
    assert found == expected


def test_calibration_uses_windows(config: Train) -> None:
    windows = list(RunImages(config).calibration())
    whole = list(RunImages(replace(config, eval_whole=True)).calibration())
    assert [w.shape for w in windows] == [(1, 3, *SIZE)] * 4
    assert torch.equal(torch.cat(windows[:2], 3), whole[0])
    assert torch.equal(torch.cat(windows[2:], 3), whole[1])
