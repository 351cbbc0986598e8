"""Run folders are read as they are: unfinished, torn, damaged, or hostile."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from deepcontrol.workbench.report.layers import departure, track, track_open
from deepcontrol.workbench.report.summary import differing, in_common, summarize
from deepcontrol.workbench.runfolder import read_run, read_runs
from tests.workbench.report.conftest import LAYERS, make_run


def test_a_whole_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "x"))
    assert run.name == "x"
    assert run.notes == []
    assert run.series("val_error") == ([0, 1, 2, 3], [0.9, 0.5, 0.25, 0.375])
    assert run.series("train_loss") == ([1, 2, 3], [1, 1 / 2, 1 / 3])
    assert [epoch for epoch, _ in run.samples] == [1, 2, 3]
    lam = track(run, "mean_scale")
    assert lam is not None
    assert lam.names == list(LAYERS)
    assert lam.mean.shape == (3, 4)
    assert lam.mean[2].tolist() == pytest.approx([1, 0.9, 0.8, 0.7])
    assert departure(lam, 1.0)[2, 3] == pytest.approx(0.3 + 0.9 * 0.15)
    opened = track_open(run)
    assert opened is not None
    assert (opened.mean == 0.5).all()


def test_a_torn_last_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "val_er')
    run = read_run(folder)
    assert run.notes == ["line 5 of metrics.jsonl is not whole yet"]
    assert run.epochs_done == 3


@pytest.mark.parametrize(
    "line", ["nonsense", "[1]", '{"epoch": "1"}', '{"epoch": -1}', '{"epoch": true}', "[" * 10**5]
)
def test_a_broken_line(tmp_path: Path, line: str) -> None:
    folder = make_run(tmp_path / "x")
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
    run = read_run(folder)
    assert run.notes == ["line 2 of metrics.jsonl cannot be read"]
    assert run.series("val_error")[0] == [0, 2, 3]


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", epochs=0)
    rows = [{"epoch": 1, "val_error": v} for v in (float("nan"), "0.5", None, [1])]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({**row, "epoch": i}) + "\n" for i, row in enumerate(rows))
    )
    wrong = {"a": {"gain": 3, "open": "x"}, "b": 7, "c": {"gain": {"mean": "x"}}}
    (folder / "layers.jsonl").write_text(json.dumps({"epoch": 0, "layers": wrong}) + "\n")
    run = read_run(folder)
    assert run.series("val_error") == ([], [])
    gain = track(run, "gain")
    assert gain is not None
    assert gain.names == ["a", "c"]
    assert np.isnan(gain.mean).all()


def test_a_resumed_epoch_counts_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": 3, "val_error": 0.125}) + "\n")
    assert read_run(folder).series("val_error") == ([0, 1, 2, 3], [0.9, 0.5, 0.25, 0.125])


def test_missing_files(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x")
    (folder / "metrics.jsonl").write_text("")
    (folder / "layers.jsonl").unlink()
    run = read_run(folder)
    assert run.notes == ["there is no layers.jsonl", "no epoch is finished yet"]
    assert track(run, "gain") is None


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    good = make_run(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    broken = make_run(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    names = ("good", "empty", "file", "gone", "broken")
    runs, refused = read_runs([tmp_path / name for name in names])
    assert [run.name for run in runs] == [good.name]
    for text, name in zip(refused, names[1:], strict=True):
        assert name in text
        assert "no config.json" in text or "config.json cannot be read" in text


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs, _ = read_runs([make_run(tmp_path / parent / "x") for parent in ("a", "b")])
    assert [run.name for run in runs] == ["x", "x (2)"]


def test_no_picture_from_elsewhere(tmp_path: Path) -> None:
    """A run folder from somebody else must not make us put our files into a page."""
    folder, own = make_run(tmp_path / "x"), make_run(tmp_path / "own")
    os.symlink(own / "samples" / "epoch-0001.png", folder / "samples" / "epoch-0009.png")
    (folder / "samples" / "epoch-x.png").touch()
    assert [epoch for epoch, _ in read_run(folder).samples] == [1, 2, 3]


def test_summaries(tmp_path: Path) -> None:
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
