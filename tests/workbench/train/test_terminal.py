"""The command as a user has it: in a terminal, whose screen is read."""

import re
import sys
import time
from pathlib import Path
from typing import Any

import pexpect
import pytest

from deepcontrol.workbench.train import epoch, loop
from deepcontrol.workbench.train.checkpoint import load
from tests.workbench.train.runs import command, metrics, train_here


def terminal(*words: str) -> "pexpect.spawn[str]":
    arguments = ["-m", "deepcontrol", *words]
    return pexpect.spawn(
        sys.executable, arguments, encoding="utf-8", timeout=60, dimensions=(30, 150)
    )


def test_trained_stopped_and_continued_in_a_terminal(run: Path) -> None:
    child = terminal(*command(run, epochs=400))
    child.expect(r"segnet agc on 7 images of streets, 4 steps an epoch, rate 0\.04")
    child.expect(r"epoch \d+/400.* \d/4 .*loss \d\.\d+ .*images/s .*MiB .*\d:\d\d left")
    # A line that stays, of whichever epoch is next: the bar may have been seen late.
    child.expect(r"epoch \d+/400  loss \d\.\d+  val error \d+\.\d+%  mean IoU 0\.\d+")
    child.sendintr()  # Ctrl-C
    child.expect(r"SIGINT: saved at step (\d+)\. The same command goes on\.")
    step = int(child.match.group(1))
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    position = load(run / "last").state["position"]
    assert 4 * position["epoch"] + position["step"] == step

    epochs = position["epoch"] + 2
    child = terminal("train", "--out", str(run), "--epochs", str(epochs))
    child.expect(rf"continued after epoch {position['epoch']}, step {position['step']}\r")
    child.expect(rf"all {epochs} epochs are done")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert [line["epoch"] for line in metrics(run)] == list(range(epochs + 1))


def test_a_mistake_is_one_line(run: Path) -> None:
    child = terminal("train", "--out", str(run), "--data", "camvid")
    screen = child.read()
    child.close()
    assert child.exitstatus == 1
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen).strip().splitlines()
    assert lines == ["error: camvid needs the folder of the dataset: set --data-root"]


def test_the_time_left_is_that_of_the_evaluations_too(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, left = epoch.evaluate, []

    def slow(*args: Any) -> Any:
        time.sleep(0.5)
        return evaluate(*args)

    def noted(loss: float, images_per_s: float, mib: float, images_left: int) -> str:
        left.append(images_left / images_per_s)
        return ""

    monkeypatch.setattr(epoch, "evaluate", slow)
    monkeypatch.setattr(loop, "step_words", noted)
    train_here(run, epochs=1)
    assert 0.4 < left[-1] < 2  # after the last step: its evaluation alone
