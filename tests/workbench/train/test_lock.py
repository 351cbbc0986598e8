"""A run folder has one process at a time, and a dead one holds nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepcontrol.workbench.runfolder import RunInUseError, lock

HOLD = """
import sys, time
from pathlib import Path
from deepcontrol.workbench.runfolder import RunInUseError, lock
try:
    with lock(Path(sys.argv[1])):
        print("mine", flush=True)
        time.sleep(float(sys.argv[2]))
except RunInUseError as error:
    print("refused", error, flush=True)
"""


def start(run: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(run), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_of_many_starts_exactly_one_proceeds(tmp_path: Path) -> None:
    processes = [start(tmp_path / "run", 8.0) for _ in range(4)]
    first_words = sorted(process.stdout.readline().split()[0] for process in processes)  # type: ignore[union-attr]
    for process in processes:
        end(process)
    assert first_words == ["mine", "refused", "refused", "refused"]


def test_the_holder_is_named_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, 60.0)
    assert process.stdout is not None
    assert process.stdout.readline() == "mine\n"
    with (
        pytest.raises(RunInUseError, match=f"in use by process {process.pid} on"),
        lock(tmp_path),
    ):
        pass
    end(process)  # kill -9
    deadline = time.monotonic() + 10
    while True:
        try:
            with lock(tmp_path):
                break
        except RunInUseError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert f"process {os.getpid()} " in (tmp_path / "lock").read_text()


def test_it_is_let_go_after_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock(tmp_path):
        _ = 1 / 0
    with lock(tmp_path):
        pass
