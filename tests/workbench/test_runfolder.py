"""Run folders: records, lock, links, and a reader for folders in any state."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from deepcontrol.workbench import runfolder
from deepcontrol.workbench.runfolder import RunInUseError, lock, read_config, read_run, read_runs
from tests.workbench.report.conftest import make_run

# Records


def test_truncate_drops_later_records_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for epoch in range(5):
        runfolder.append_record(path, {"epoch": epoch})
    path.write_text(path.read_text() + '{"epoch": 5')
    runfolder.truncate_records(path, 3)
    assert [line["epoch"] for line in runfolder.read_records(path)] == [0, 1, 2, 3]


def test_truncate_drops_only_unreadable_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"epoch": epoch}) for epoch in range(4)]
    lines[1:2] = ["{torn", "5", '{"other": 1}', "[" * 100_000]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    runfolder.truncate_records(path, 3)
    assert [line["epoch"] for line in runfolder.read_records(path)] == [0, 2, 3]


def test_last_epoch(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert runfolder.last_epoch(path) == -1
    path.write_text('{"epoch": 0}\n{"epoch": 1}\n{"epoch": "7"}\n{"epoch": 2}')
    assert runfolder.last_epoch(path) == 1


def test_diverged_record(tmp_path: Path) -> None:
    assert runfolder.read_diverged(tmp_path) is None
    runfolder.write_diverged(tmp_path, 3, None, "not finite")
    assert runfolder.read_diverged(tmp_path) == 3


def write_often(path: Path, text: str, ready: Barrier) -> None:
    ready.wait()
    for _ in range(500):
        runfolder.write_atomic(path, text)


def test_two_processes_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(2)
    processes = [context.Process(target=write_often, args=(path, t * 99, ready)) for t in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert path.read_text() in ("a" * 99, "b" * 99)
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    run.mkdir()
    precious.write_text("mine\n")
    for name in ("lock", ".config.json.new", "metrics.jsonl"):
        (run / name).symlink_to(precious)
    with pytest.raises(OSError, match="lock"), lock(run):
        pass
    runfolder.write_atomic(run / "config.json", "{}")
    with pytest.raises(OSError, match="metrics"):
        runfolder.append_record(run / "metrics.jsonl", {"epoch": 1})
    assert precious.read_text() == "mine\n"
    assert (run / "config.json").read_text() == "{}"


# Lock

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


@pytest.mark.slow
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


# Reader


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
