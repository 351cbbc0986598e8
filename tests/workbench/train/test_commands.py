"""The commands `deepcontrol train` and `deepcontrol eval`, and their errors."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deepcontrol.nn import saved_bytes
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.train import plan
from deepcontrol.workbench.train.build import build_model
from tests.processes import DEADLOCK
from tests.workbench.train.runs import command, metrics, start, tiny


def test_dry_run_prints_the_plan_and_writes_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(run), "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for text in (
        "segnet, norm agc, width 0.02",
        "7 training images, 3 validation images",
        "steps 4 per epoch, 12 in 3 epochs",
        "lr 0.04",
        f"run folder {run} (new)",
    ):
        assert text in printed
    assert not run.exists()


def test_figures_of_the_plan(run: Path) -> None:
    config = tiny(run, width=0.1)
    planned, model = plan(config), build_model(config, 19)
    assert planned.parameters == sum(p.numel() for p in model.parameters())
    assert planned.state_mib == pytest.approx(3 * 4 * planned.parameters / 2**20)
    activations = saved_bytes(model, torch.randn(2, 3, 32, 64)) / 2**20
    assert planned.activations_mib == pytest.approx(activations, rel=0.01)


def test_eval_reproduces_the_error_of_training(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(whole), "--checkpoint", "last"]) == 0
    printed = capsys.readouterr().out
    error = metrics(whole)[-1]["val_error"]
    assert f"on 3 images: pixel error {error:.2%}" in printed
    assert "vegetation" in printed
    assert main(["eval", str(whole)]) == 0
    best = min(line["val_error"] for line in metrics(whole)[1:])
    assert f"pixel error {best:.2%}" in capsys.readouterr().out


def test_eval_without_a_checkpoint(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    assert main(["eval", str(tmp_path)]) == 1
    advice = f"Resume the run with `deepcontrol train --out {tmp_path}`"
    error = " ".join(capsys.readouterr().err.split())
    assert (
        f"has no checkpoint 'best': none was saved yet, or its study deleted it. {advice}" in error
    )


def test_errors_are_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["eval", str(run)], "is not a run folder: no such folder. Expected the --out of"),
        (command(run, fsdp=""), "torchrun"),
    ):
        assert main(words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_invalid_flag_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value, message in (
        ("--size", "16x64", "at least 32x32"),
        ("--size", "big", "HEIGHTxWIDTH"),
        ("--momentum", "1", "from 0 to 0.999"),
        ("--lr", "-1", "positive"),
        ("--seed", "99999999999999999999", "--seed must be at most 9223372036854775807"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["train", "--out", str(run), flag, value])
        assert message in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.slow
def test_only_one_of_two_concurrent_starts_proceeds(run: Path) -> None:
    processes = [start(run, epochs=1000) for _ in range(2)]
    refused: list[Any] = []
    while len(refused) < len(processes) - 1:
        refused = [p for p in processes if p.poll() is not None]
        time.sleep(0.1)
    (running,) = [p for p in processes if p not in refused]
    for process in refused:
        _, message = process.communicate()
        assert process.returncode == 1
        assert f"{run} is in use by process {running.pid} on" in message
    assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=DEADLOCK)
    assert running.returncode == 143
