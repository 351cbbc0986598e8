"""Lines that were torn cost no others; two processes may write one file."""

import json
import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

from deepcontrol.workbench import runfolder


def test_what_came_after_the_checkpoint_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for epoch in range(5):
        runfolder.append_record(path, {"epoch": epoch})
    path.write_text(path.read_text() + '{"epoch": 5')
    runfolder.truncate_records(path, 3)
    assert [line["epoch"] for line in runfolder.read_records(path)] == [0, 1, 2, 3]


def test_a_line_that_cannot_be_read_goes_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"epoch": epoch}) for epoch in range(4)]
    lines[1:2] = ["{torn", "5", '{"other": 1}', "[" * 100_000]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    runfolder.truncate_records(path, 3)
    assert [line["epoch"] for line in runfolder.read_records(path)] == [0, 2, 3]


def test_the_last_epoch(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert runfolder.last_epoch(path) == -1
    path.write_text('{"epoch": 0}\n{"epoch": 1}\n{"epoch": "7"}\n{"epoch": 2}')
    assert runfolder.last_epoch(path) == 1


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
