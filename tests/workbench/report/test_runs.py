"""Layer tracks and summaries of run folders, also damaged ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from deepcontrol.workbench.folders.runfolder import read_run, read_runs
from deepcontrol.workbench.report.layers import departure, track, track_open
from deepcontrol.workbench.report.summary import differing, in_common, summarize
from tests.workbench.report.conftest import LAYERS, make_run


def test_layer_tracks(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "x"))
    lam = track(run, "mean_scale")
    assert lam is not None
    assert lam.names == list(LAYERS)
    assert lam.mean.shape == (3, 4)
    assert lam.mean[2].tolist() == pytest.approx([1, 0.9, 0.8, 0.7])
    assert departure(lam, 1.0)[2, 3] == pytest.approx(0.3 + 0.9 * 0.15)
    opened = track_open(run)
    assert opened is not None
    assert (opened.mean == 0.5).all()


def test_layer_values_that_are_not_numbers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", epochs=0)
    wrong = {"a": {"gain": 3, "open": "x"}, "b": 7, "c": {"gain": {"mean": "x"}}}
    (folder / "layers.jsonl").write_text(json.dumps({"epoch": 0, "layers": wrong}) + "\n")
    gain = track(read_run(folder), "gain")
    assert gain is not None
    assert gain.names == ["a", "c"]
    assert np.isnan(gain.mean).all()


def test_no_layer_records(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x")
    (folder / "layers.jsonl").unlink()
    assert track(read_run(folder), "gain") is None


def test_table_of_runs(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first")
    second = make_run(tmp_path / "second", epochs=1, norm="bn", batch_size=1)
    third = make_run(tmp_path / "third", epochs=1)
    (third / "metrics.jsonl").unlink()
    runs, _ = read_runs([first, second, third])
    assert differing(runs) == ["model", "norm", "batch_size"]
    assert in_common(runs) == {"size": "64x128", "epochs": "5"}
    best, other, none = summarize(runs)
    assert best.differences == ["segnet", "agc", "4"]
    assert (best.epochs, best.final_error, best.best_error) == ("3 of 5", "37.50", "25.00")
    assert (best.best_epoch, best.mean_iou, best.time) == ("2", "62.50", "2:00 min")
    assert best.images_per_s == "22"
    assert [best.is_best, other.is_best, none.is_best] == [True, False, False]
    assert (none.epochs, none.final_error, none.images_per_s) == ("0 of 5", "", "")
