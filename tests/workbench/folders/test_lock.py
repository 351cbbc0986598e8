"""The lock of a run folder, with several processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepcontrol.workbench.folders.lock import LockLostError, RunInUseError, is_locked, lock

HOLD = """
import sys, time
from pathlib import Path
from deepcontrol.workbench.folders.lock import RunInUseError, lock
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


def test_only_one_of_many_processes_gets_the_lock(tmp_path: Path) -> None:
    processes = [start(tmp_path / "run", 8.0) for _ in range(4)]
    first_words = sorted(process.stdout.readline().split()[0] for process in processes)  # type: ignore[union-attr]
    for process in processes:
        end(process)
    assert first_words == ["mine", "refused", "refused", "refused"]


def test_lock_names_its_holder_and_a_killed_process_releases_it(tmp_path: Path) -> None:
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


def test_lock_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock(tmp_path):
        _ = 1 / 0
    with lock(tmp_path):
        pass


def test_lock_deleted_or_folder_moved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with lock(run) as held:
        held.check()
        (run / "lock").unlink()
        with pytest.raises(LockLostError, match="deleted, moved or replaced"):
            held.check()
        with lock(run) as other:  # another process would get it, too
            other.check()
            with pytest.raises(LockLostError):
                held.check()
    with lock(run) as held:
        run.rename(tmp_path / "moved")
        with pytest.raises(LockLostError):
            held.check()
        held.remove()
    assert not is_locked(tmp_path / "moved")
    assert (tmp_path / "moved" / "lock").exists()


def test_removed_lock(tmp_path: Path) -> None:
    with lock(tmp_path) as held:
        assert held.is_new
        assert is_locked(tmp_path)
        held.remove()
        assert list(tmp_path.iterdir()) == []
    with lock(tmp_path) as held:
        assert held.is_new
    with lock(tmp_path) as held:
        assert not held.is_new


def test_folder_is_prepared_before_the_lock_exists(tmp_path: Path) -> None:
    """A kill between the two leaves no lock."""
    found = []

    def prepare(is_new: bool) -> None:
        found.append((is_new, (tmp_path / "lock").exists()))

    for _ in range(2):
        with lock(tmp_path, prepare):
            pass
    assert found == [(True, False), (False, True)]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_lock_that_is_not_a_file(kind: str, tmp_path: Path) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    run.mkdir()
    precious.write_text("mine")
    path = run / "lock"
    make = {"link": lambda: path.symlink_to(precious), "fifo": lambda: os.mkfifo(path)}
    make.get(kind, path.mkdir)()
    with pytest.raises(OSError, match="lock"), lock(run):
        pass
    assert precious.read_text() == "mine"


def test_hard_link_is_not_written_to(tmp_path: Path) -> None:
    """The name of the holder would replace the content of the other file."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run").mkdir()
    os.link(precious, tmp_path / "run" / "lock")
    with pytest.raises(OSError, match="hard link"), lock(tmp_path / "run"):
        pytest.fail("locked")
    assert precious.read_text() == "mine"
