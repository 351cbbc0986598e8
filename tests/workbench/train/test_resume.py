"""A killed run resumes and ends bit-identical to an uninterrupted one."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.folders import runfolder, storage
from deepcontrol.workbench.metrics import ConfusionMatrix
from deepcontrol.workbench.train import start as start_module
from deepcontrol.workbench.train.checkpoint import load
from deepcontrol.workbench.train.config_file import load_config
from tests.processes import DEADLOCK
from tests.workbench.train.runs import (
    STEPS,
    command,
    differences,
    metrics,
    signal_at_step,
    start,
    train_here,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_20_of_20_kills_at_random_moments_end_alike(workers: int, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "tests.workbench.train.killing",
        str(tmp_path),
        str(workers),
        "20",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=DEADLOCK)
    assert done.stdout.splitlines() == [f"{i}: the same" for i in range(20)], done.stderr[-2000:]


@pytest.mark.slow
def test_run_continues_when_stdout_is_closed(run: Path, whole: Path) -> None:
    with start(run) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()  # like `| head -1`
        assert process.wait(timeout=DEADLOCK) == 0
    assert differences(run, whole) == []


def test_contents_of_the_run_folder(whole: Path) -> None:
    run, lines = whole, metrics(whole)
    assert [line["epoch"] for line in lines] == [0, 1, 2, 3]
    assert [line["step"] for line in lines] == [0, 4, 8, STEPS]
    assert [line["epoch"] for line in storage.read_records(run / runfolder.LAYERS)] == [
        0,
        1,
        2,
        3,
    ]
    assert lines[0]["train_loss"] is None
    assert lines[3]["train_loss"] < lines[1]["train_loss"]
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert names == {
        "config", "metrics", "layers", "validation", "events", "last", "previous", "best",
        "samples", "lock",
    }  # fmt: skip
    drawn = sorted(path.name for path in (run / "samples").iterdir())
    assert drawn == ["epoch-0002.png", "epoch-0003.png", "worst-0002.png", "worst-0003.png"]
    best = min(lines[1:], key=lambda line: (line["val_error"], line["val_loss"]))
    assert load(run / "best").state["position"]["best_epoch"] == best["epoch"]


def test_resume_with_more_epochs(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(tmp_path / "two", epochs=2)
    assert main(["train", "--out", str(tmp_path / "two"), "--epochs", "3", "--workers", "1"]) == 0
    assert "resuming after epoch 2" in capsys.readouterr().out
    assert differences(tmp_path / "two", whole) == []
    assert main(["train", "--out", str(tmp_path / "two")]) == 0  # all epochs are done
    assert differences(tmp_path / "two", whole) == []


def test_finished_run_without_checkpoints_keeps_its_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study deletes checkpoints. Training again must not overwrite the records."""
    run = tmp_path / "run"
    train_here(run, epochs=2)
    for number in (1, 2):
        before = {name: (run / name).read_text() for name in ("metrics.jsonl", "layers.jsonl")}
        for name in ("last", "previous", "best"):
            shutil.rmtree(run / name, ignore_errors=True)
        assert main(["train", "--out", str(run), "--epochs", "1"]) == 0
        assert "Run is finished but has no checkpoint; restarting it." in capsys.readouterr().out
        for name, text in before.items():
            assert (run / f"{name}.old{number}").read_text() == text
        assert [line["epoch"] for line in metrics(run)] == [0, 1]


def test_diverged_run_without_checkpoints_keeps_its_records(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(run, epochs=2)
    (run / "diverged.json").write_text('{"epoch": 3, "step": 1}')
    before = {name: (run / name).read_text() for name in ("metrics.jsonl", "diverged.json")}
    for name in ("last", "previous", "best"):
        shutil.rmtree(run / name)
    train_here(run, epochs=3)
    for name, text in before.items():
        assert (run / f"{name}.old1").read_text() == text
    assert not (run / "diverged.json").exists()


def test_records_are_archived_before_the_configuration_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill in between, the next start still recognizes a finished run."""
    run = tmp_path / "run"
    train_here(run, epochs=1)
    before = (run / "metrics.jsonl").read_text()
    for name in ("last", "previous", "best"):
        shutil.rmtree(run / name, ignore_errors=True)
    with monkeypatch.context() as patch:
        patch.setattr(start_module, "save_config", lambda *_: 1 / 0)
        assert main(["train", "--out", str(run), "--epochs", "2"]) == 1
    assert main(["train", "--out", str(run), "--epochs", "2"]) == 0
    assert (run / "metrics.jsonl.old1").read_text() == before


def test_best_is_found_under_its_temporary_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kill between the two renames leaves it there."""
    run = tmp_path / "run"
    train_here(run, epochs=2)
    (run / "best").rename(run / ".best.old")
    capsys.readouterr()
    assert main(["train", "--out", str(run), "--epochs", "3"]) == 0
    assert "best is missing" not in capsys.readouterr().out


def test_missing_or_damaged_best_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for damage in (shutil.rmtree, lambda best: (best / "model.safetensors").write_bytes(b"")):
        run = tmp_path / str(damage)
        train_here(run, epochs=2)
        damage(run / "best")
        capsys.readouterr()
        assert main(["train", "--out", str(run), "--epochs", "3"]) == 0
        assert "checkpoint best is missing or damaged" in capsys.readouterr().out
        assert load(run / "best").state["position"]["best_epoch"] == 3
    shutil.rmtree(run / "best")
    assert main(["train", "--out", str(run)]) == 0
    assert "no epoch is left to replace it" in capsys.readouterr().out


def test_damaged_checkpoint_is_skipped(
    whole: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(run, epochs=2)
    path = run / "last" / "state.pt"
    path.write_bytes(path.read_bytes()[:-100])
    train_here(run)
    output = capsys.readouterr().out
    assert "skipping a damaged checkpoint" in output
    assert "resuming after epoch 1" in output
    assert differences(run, whole) == []


@pytest.mark.parametrize(
    "flags",
    [
        {"norm": "bn"},
        {"norm": "agc", "init": "identity", "momentum": "0"},
        {"model": "classnet", "norm": "none", "epochs": "2"},
    ],
    ids=["buffers", "no momentum", "classnet"],
)
def test_other_models_resume_within_an_epoch(
    flags: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_here(tmp_path / "whole", **flags)
    with monkeypatch.context() as patch:
        signal_at_step(6, signal.SIGTERM, patch)
        assert main(command(tmp_path / "stopped", **flags)) == 128 + signal.SIGTERM
    position = load(tmp_path / "stopped" / "last").state["position"]
    assert (position["epoch"], position["step"]) == (1, 2)
    train_here(tmp_path / "stopped", **flags)
    assert differences(tmp_path / "stopped", tmp_path / "whole") == []


def test_resume_within_an_evaluation(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch's steps are saved, and its evaluation is repeated."""
    original, calls = ConfusionMatrix.update, []

    def update(self: ConfusionMatrix, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:  # the first of two batches after epoch 1
            os.kill(os.getpid(), signal.SIGINT)
        original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ConfusionMatrix, "update", update)
        assert main(command(tmp_path / "stopped")) == 130
    position = load(tmp_path / "stopped" / "last").state["position"]
    assert (position["epoch"], position["step"]) == (0, 4)
    train_here(tmp_path / "stopped")
    assert differences(tmp_path / "stopped", whole) == []


@pytest.mark.gpu
def test_deterministic_on_a_gpu(tmp_path: Path) -> None:
    """In separate processes, because determinism is a process-wide setting."""
    flags = {"device": "cuda", "deterministic": ""}
    for out, epochs in (("whole", {}), ("half", {"epochs": "2"}), ("half", {})):
        process = start(tmp_path / out, **flags | epochs)
        _, errors = process.communicate(timeout=DEADLOCK)
        assert process.returncode == 0, errors
    assert differences(tmp_path / "half", tmp_path / "whole") == []


def test_fewer_epochs_than_done_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train_here(run, epochs=2)
    assert main(["train", "--out", str(run), "--epochs", "1"]) == 1
    assert "has done 2 epochs, more than --epochs 1" in capsys.readouterr().err
    assert main(["train", "--out", str(run)]) == 0  # the configuration is unchanged
    assert len(metrics(run)) == 3


def test_checkpoint_without_a_configuration_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train_here(run, epochs=1)
    (run / "config.json").unlink()
    assert main(command(run)) == 1
    assert "has a checkpoint but no config.json" in capsys.readouterr().err


def test_another_number_of_threads_is_reported(
    whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, run)
    train_here(run, epochs=4)
    assert "threads before" not in capsys.readouterr().out  # as many as before
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    train_here(run, epochs=5)
    assert "used 1 threads before, and 7 now: its results may differ" in capsys.readouterr().out


def test_default_that_is_spelled_out_leaves_the_configuration(whole: Path, run: Path) -> None:
    """The checkpoints hold a copy of config.json, and would not match another spelling."""
    shutil.copytree(whole, run)
    train_here(run, epochs=4, lr=0.04, augment="flip")
    assert main(["eval", str(run), "--checkpoint", "best"]) == 0
    assert load_config(run)[0].lr is None
