"""The scripts behind LOG.md and docs/choose.md: tiny networks on noise, each row by its meaning."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from deepcontrol.bench.record import Row, read_rows
from deepcontrol.cli import main
from deepcontrol.train.records import METRICS, read
from tests.noise import make_camvid

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
TINY = ("--size", "32x32", "--width", "0.05", "--epochs", "1")  # images are 32x64


@pytest.fixture(autouse=True)
def camvid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data. What a script writes goes into the test's folder, its cache included."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("allow_tf32", "benchmark"):  # which a script may set for its process
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    return make_camvid(tmp_path / "camvid")


def trained(norm: str, camvid: Path) -> Path:
    run = Path(norm)
    data = ["--data", "camvid", "--data-root", str(camvid), "--out", str(run)]
    words = ["train", *data, "--norm", norm, "--batch-size", "1", "--device", "cpu", *TINY]
    assert main(words) == 0
    return run


def rows_of(script: str, *words: object, patch: pytest.MonkeyPatch) -> list[Row]:
    """What the script's CSV holds after a call."""
    out = Path(f"{script}.csv")
    argv = [script, *map(str, words), "--device", "cpu", "--out", str(out)]
    patch.setattr(sys, "argv", argv)
    runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    return read_rows(out)


@pytest.mark.parametrize("script", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_says_what_it_does(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    assert end.value.code == 0
    assert f"benchmarks/{script}.py" in " ".join(capsys.readouterr().out.split())


def test_crops_sees_windows_as_training_did(camvid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [trained(norm, camvid) for norm in ("agc", "bn")]
    rows = rows_of("crops", *runs, "--data-root", camvid, patch=monkeypatch)
    assert [(r["model"], r["norm"], r["split"]) for r in rows] == [
        ("segnet", norm, split) for norm in ("agc", "bn") for split in ("val", "train")
    ]
    for run, row in zip(runs, rows[::2], strict=True):
        assert row["error_by_windows"] == f"{read(run / METRICS)[-1]['val_error']:.4f}"
    assert rows[0]["error_whole"] != rows[0]["error_by_windows"]  # of AGC, whose means differ


def test_teach_on_starts_from_the_run(camvid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained("agc", camvid)
    seen = rows_of("crops", run, "--data-root", camvid, patch=monkeypatch)[0]
    words = (run, "--data-root", camvid, "--epochs", 1)
    rows = rows_of("teach_on", *words, patch=monkeypatch)
    ways = [(row["taught_on"], row["epochs_more"]) for row in rows]
    assert ways == [
        ("not at all", "0"),
        ("crops", "1"),
        ("whole images", "1"),
        ("both in turn", "1"),
    ]
    errors = [(row["error_whole"], row["error_by_windows"]) for row in rows]
    assert errors[0] == (seen["error_whole"], seen["error_by_windows"])
    assert len(set(errors)) == 4


def test_lambda_start(
    camvid: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--data-root", camvid, *TINY, "--batch", 2, "--rate", 0.04, "--starts", 0.5)
    rows = rows_of("lambda_start", *words, "--times", 0, 100000, patch=monkeypatch)
    fixed, moved = ([r for r in rows if r["rate_times"] == t] for t in ("0.0", "100000.0"))
    assert len(fixed) == len(moved) == 25  # SegNet's neurons
    assert {r[f"lambda_{k}"] for r in fixed for k in ("mean", "min", "max")} == {"0.5000"}
    assert {r["lambda_mean"] for r in moved} != {"0.5000"}
    assert "rate_times 0.0: lambda at half depth 0.50" in capsys.readouterr().out
    again = rows_of("lambda_start", *words, "--times", 0, patch=monkeypatch)
    assert again == rows  # what was measured is not measured again


def test_highest_rate(camvid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--data-root", camvid, *TINY, "--precision", "fp32", "--seeds", 0)
    treatments = ("--treatments", "as the paper", "gradient of at most 1", "BatchNorm")
    rows = rows_of("highest_rate", *words, *treatments, "--rate", 0.01, patch=monkeypatch)
    assert [row["treatment"] for row in rows] == list(treatments[1:])
    assert all("diverged_at_step" not in row and 0 < float(row["val_error"]) <= 1 for row in rows)
    rows = rows_of("highest_rate", *words, *treatments[:2], "--rate", 1e30, "--epochs", 3,
                   patch=monkeypatch)  # fmt: skip
    assert len(rows) == 4
    assert rows[-1]["diverged_at_step"] in {"2", "3"}
    assert "val_error" not in rows[-1]
