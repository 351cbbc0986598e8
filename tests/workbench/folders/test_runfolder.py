"""Run folders: a reader for folders in any state, and the lock."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepcontrol.workbench.folders import runfolder
from deepcontrol.workbench.folders.runfolder import (
    LockLostError,
    RunInUseError,
    is_locked,
    lock,
    read_config,
    read_run,
    read_runs,
)
from deepcontrol.workbench.folders.storage import append_record
from tests.workbench.report.conftest import make_run


def test_diverged_record(tmp_path: Path) -> None:
    assert runfolder.read_diverged(tmp_path) is None
    runfolder.write_diverged(tmp_path, 3, None, "not finite")
    assert runfolder.read_diverged(tmp_path) == 3
    path = tmp_path / "diverged.json"
    path.write_text(path.read_text().replace("3", "2"))
    with pytest.raises(ValueError, match=r"diverged\.json cannot be read"):
        runfolder.read_diverged(tmp_path)


def test_read_a_complete_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "x"))
    assert run.name == "x"
    assert run.notes == []
    assert run.series("val_error") == ([0, 1, 2, 3], [0.9, 0.5, 0.25, 0.375])
    assert run.series("train_loss") == ([1, 2, 3], [1, 1 / 2, 1 / 3])
    assert [epoch for epoch, _ in run.samples] == [1, 2, 3]


def test_torn_last_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "val_er')
    run = read_run(folder)
    assert run.notes == ["line 5 of metrics.jsonl is incomplete"]
    assert run.epochs_done == 3


@pytest.mark.parametrize(
    "line", ["nonsense", "[1]", '{"epoch": "1"}', '{"epoch": -1}', '{"epoch": true}', "[" * 10**5]
)
def test_invalid_line(tmp_path: Path, line: str) -> None:
    folder = make_run(tmp_path / "x")
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
    run = read_run(folder)
    assert run.notes == ["line 2 of metrics.jsonl cannot be read"]
    assert run.series("val_error")[0] == [0, 2, 3]


def test_values_that_are_not_numbers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", epochs=0)
    rows = [{"epoch": 1, "val_error": v} for v in (float("nan"), "0.5", None, [1])]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({**row, "epoch": i}) + "\n" for i, row in enumerate(rows))
    )
    assert read_run(folder).series("val_error") == ([], [])


def test_last_record_of_an_epoch_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": 3, "val_error": 0.125}) + "\n")
    assert read_run(folder).series("val_error") == ([0, 1, 2, 3], [0.9, 0.5, 0.25, 0.125])


def test_missing_files_are_noted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x")
    (folder / "metrics.jsonl").write_text("")
    (folder / "layers.jsonl").unlink()
    run = read_run(folder)
    assert run.notes == ["there is no layers.jsonl", "no epoch has finished yet"]


def test_folders_that_are_not_runs(tmp_path: Path) -> None:
    good = make_run(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    broken = make_run(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    names = ("good", "empty", "file", "gone", "broken")
    runs, errors = read_runs([tmp_path / name for name in names])
    assert [run.name for run in runs] == [good.name]
    reasons = ("no config.json", "no config.json", "no such folder", "cannot read")
    for text, name, reason in zip(errors, names[1:], reasons, strict=True):
        assert name in text
        assert reason in text


def test_runs_with_the_same_name_are_numbered(tmp_path: Path) -> None:
    runs, _ = read_runs([make_run(tmp_path / parent / "x") for parent in ("a", "b")])
    assert [run.name for run in runs] == ["x", "x (2)"]


def test_pictures_behind_links_are_ignored(tmp_path: Path) -> None:
    """A run folder from another machine must not put our own files into a report."""
    folder, own = make_run(tmp_path / "x"), make_run(tmp_path / "own")
    os.symlink(own / "samples" / "epoch-0001.png", folder / "samples" / "epoch-0009.png")
    (folder / "samples" / "epoch-x.png").touch()
    assert [epoch for epoch, _ in read_run(folder).samples] == [1, 2, 3]


def test_old_key_names_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"derived": {"colours": [[1, 2, 3]]}}')
    assert read_config(tmp_path)["derived"] == {"colors": [[1, 2, 3]]}


def test_damaged_line(tmp_path: Path) -> None:
    """A changed digit is noticed, wherever it is."""
    folder = make_run(tmp_path / "x", epochs=0)
    (folder / "metrics.jsonl").unlink()
    for epoch in range(3):
        append_record(folder / "metrics.jsonl", {"epoch": epoch, "val_error": 0.125})
    assert read_run(folder).damage == []
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1].replace("0.125", "0.115") + lines[2])
    run = read_run(folder)
    assert run.notes == run.damage == ["line 2 of metrics.jsonl cannot be read (wrong checksum)"]
    assert run.series("val_error") == ([0, 2], [0.125, 0.125])


def test_damaged_configuration(tmp_path: Path) -> None:
    """The message names the changed value and an intact copy."""
    folder = tmp_path / "run"
    (folder / "last").mkdir(parents=True)
    content = {"config": {"seed": 3, "epochs": 150}, "derived": {"classes": ["sky"]}}
    for path in (folder / "config.json", folder / "last" / "config.json"):
        runfolder.write_json(path, content, indent=2)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"seed": 3', '"seed": 2'))
    with pytest.raises(
        ValueError, match=r"is damaged: .* checksum\..*seed 3 -> 2.*cp .*last/config"
    ):
        read_config(folder)
    path.write_text(path.read_text()[:40])
    with pytest.raises(ValueError, match=r"cannot read .*config.json.*cp .*last/config"):
        read_config(folder)


@pytest.mark.parametrize("content", ['{"config": {"epochs": %s}}', '{"epoch": 1, "val_loss": %s}'])
@pytest.mark.parametrize("number", ["1e400", "-1e999", "9" * 30, "9" * 5000, "Infinity", "[" * 70])
def test_numbers_out_of_range(tmp_path: Path, content: str, number: str) -> None:
    """They would become infinite, or too large for any float."""
    folder = make_run(tmp_path / "x")
    name = "config.json" if "config" in content else "metrics.jsonl"
    (folder / name).write_text(content % (number + "]" * number.count("[")) + "\n")
    runs, errors = read_runs([folder])
    if name == "config.json":
        assert "cannot read" in errors[0]
    elif number != "Infinity":  # older versions wrote it into records
        assert "line 1 of metrics.jsonl cannot be read" in runs[0].notes
    for run in runs:
        assert run.series("val_loss") == ([], [])


def test_missing_epochs_of_a_boundless_plan(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "x"))
    assert run.missing_epochs(2**60) == (
        f"metrics.jsonl has no error and loss of epoch 1 and {2**60 - 1} more"
    )


def test_a_loop_of_links_is_ignored(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x")
    (folder / "samples" / "epoch-0009.png").symlink_to("epoch-0009.png")
    assert [epoch for epoch, _ in read_run(folder).samples] == [1, 2, 3]


HOLD = """
import sys, time
from pathlib import Path
from deepcontrol.workbench.folders.runfolder import RunInUseError, lock
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
