"""Layer tracks and summaries of run folders, also damaged ones."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepcontrol.workbench.folders.runfolder import read_run, read_runs
from deepcontrol.workbench.report.layers import departure, start_of, track, track_open
from deepcontrol.workbench.report.page import sections
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


def test_initial_lambda(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "x"))
    lam = track(run, "mean_scale")
    assert lam is not None
    assert start_of(lam) == 1
    for layer in run.layers[0]["layers"].values():
        layer["mean_scale"]["mean"] -= 0.5
    run.layers[0]["layers"][LAYERS[0]]["mean_scale"]["mean"] = 1.0  # a depthwise layer
    standardized = track(run, "mean_scale")
    assert standardized is not None
    assert start_of(standardized) == 0.5
    (own,) = sections([run])
    assert own.start == 0.5
    resumed = track(replace(run, layers=run.layers[1:]), "mean_scale")
    assert resumed is not None
    assert start_of(resumed) == 1


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


def test_loss_decides_between_equal_errors(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", epochs=3)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row, loss in zip(rows, (9.0, 1.0, 0.5, 0.7), strict=True):
        row |= {"val_error": 0.25, "val_loss": loss}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(run).best() == (2, 0.25)
    assert summarize([read_run(run)])[0].best_epoch == "2"


def test_learning_rate_of_a_rule_is_shown(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name) for name in ("a", "b")]
    for folder, lr in zip(folders, (0.02, 0.08), strict=True):
        content = json.loads((folder / "config.json").read_text())
        content["config"]["lr"] = None
        content.setdefault("derived", {})["lr"] = lr
        (folder / "config.json").write_text(json.dumps(content))
    runs, _ = read_runs(folders)
    assert "lr" in differing(runs)
    assert [summary.differences[-1] for summary in summarize(runs)] == ["0.02", "0.08"]


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
