"""SIGTERM and SIGINT finish the step and save; a second SIGINT exits at once."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepcontrol.workbench.train.checkpoint import load
from tests.processes import DEADLOCK
from tests.workbench.train.runs import command, start

SLOW = """
import sys, time
from deepcontrol.workbench.cli import main
from deepcontrol.step import TrainingStep
call, steps = TrainingStep.__call__, iter(range(100))

def slow(self, *batch):
    if next(steps) == 5:
        print("in a long step", flush=True)
        time.sleep(1800)  # longer than the test waits
    return call(self, *batch)

TrainingStep.__call__ = slow
sys.exit(main(sys.argv[1:]))
"""


def test_sigterm_saves_and_exits_with_143(run: Path) -> None:
    """test_progress.py tests SIGINT with Ctrl-C."""
    process = start(run, epochs=1000)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 1/1000"):
            break
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate(timeout=DEADLOCK)
    assert process.returncode == 143, errors
    last = load(run / "last").state["position"]
    step = 4 * last["epoch"] + last["step"]
    assert f"SIGTERM: saved at step {step}. Run the same command to resume." in printed
    assert errors == ""


@pytest.mark.slow
def test_second_sigint_exits_at_once(run: Path) -> None:
    words = [sys.executable, "-c", SLOW, *command(run)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "in a long step\n":
                break
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None  # the step is not finished
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=DEADLOCK) == 130
    assert load(run / "last").state["position"]["epoch"] == 1  # saved at the end of the epoch
