"""Files of runs and studies: complete or absent, never through links; JSON, checksums, records."""

import errno
import json
import multiprocessing
import os
import random
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from deepcontrol.workbench.folders import storage
from deepcontrol.workbench.folders.storage import (
    ChecksumError,
    append_text,
    make_folder,
    move_file,
    parse_json,
    read_json,
    write_atomic,
    write_json,
)


def write_often(path: Path, text: str, ready: Barrier) -> None:
    ready.wait()
    for _ in range(500):
        write_atomic(path, text)


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


def files(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in folder.iterdir() if p.is_file()}


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "write_atomic": lambda path, inside: write_atomic(path, "new", inside),
    "move_file": lambda path, inside: move_file(made(inside), path, inside),
    "open_append": lambda path, inside: storage.open_append(path, inside),
}


def made(folder: Path) -> Path:
    path = folder / "made"
    path.write_text("new")
    return path


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("target", ["precious", "missing"])
def test_link_at_the_destination(writer: str, target: str, tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    (outside / "precious").write_text("mine")
    (run / "page").symlink_to(outside / target)
    with pytest.raises(OSError, match="page is a symbolic link"):
        WRITERS[writer](run / "page", run)
    assert files(outside) == {"precious": "mine"}


@pytest.mark.parametrize("writer", WRITERS)
def test_link_to_a_folder(writer: str, tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    (run / "figures").symlink_to(outside)
    with pytest.raises(OSError, match="figures is a symbolic link"):
        WRITERS[writer](run / "figures" / "page", run)
    with pytest.raises(OSError, match="figures is a symbolic link"):
        make_folder(run / "figures" / "more", run)
    assert list(outside.iterdir()) == []


def test_folders_are_created(tmp_path: Path) -> None:
    """Links in the path that the user named are followed."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    out = tmp_path / "runs" / "a" / "b"
    write_atomic(out / "c" / "page", "new", inside=out)
    assert files(tmp_path / "disk" / "a" / "b" / "c") == {"page": "new"}


def test_a_link_at_the_temporary_name_is_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / ".page.new").symlink_to(precious)
    write_atomic(tmp_path / "page", "new")
    assert files(tmp_path) == {"precious": "mine", "page": "new"}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_destination_that_is_not_a_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "page")
    for write in (write_atomic, append_text):
        with pytest.raises(OSError, match="page is not a regular file"):
            write(tmp_path / "page", "new")


def test_path_that_leads_out(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="leads out"):
        write_atomic(tmp_path / "run" / ".." / "page", "new", inside=tmp_path / "run")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_full_disk_leaves_the_old_file(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_atomic(tmp_path / "page", "old")
    monkeypatch.setattr(storage.os, failing, full)
    with pytest.raises(OSError, match=r"cannot write .*page \(No space left on device\)"):
        write_atomic(tmp_path / "page", "new")
    assert files(tmp_path) == {"page": "old"}


def test_error_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "page", "old")
    with pytest.raises(ZeroDivisionError), storage.replacing(tmp_path / "page") as file:
        file.write(bytes(1 // 0))
    assert files(tmp_path) == {"page": "old"}


def test_remove_tree_keeps_the_target_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "last").symlink_to(tmp_path / "outside")
    storage.remove_tree(tmp_path / "last")
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]


@pytest.mark.parametrize("indent", [1, 2])
@pytest.mark.parametrize("content", [{"a": 1}, {"a": {"crc": "00000000"}}, {"a": ["}\n", "é"]}])
def test_round_trip(content: dict[str, Any], indent: int, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, content, indent)
    assert read_json(path) == content
    text = path.read_text()
    assert json.loads(text) == content | {"crc": json.loads(text)["crc"]}
    assert text.startswith(json.dumps(content, indent=indent).removesuffix("\n}"))


def test_files_without_a_checksum_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "x.json") == {"a": 1}


def test_300_of_300_flipped_bits_change_no_value(tmp_path: Path) -> None:
    path, rng = tmp_path / "x.json", random.Random(0)
    content = {"seed": 3, "momentum": 0.9, "classes": ["sky", "car"]}
    write_json(path, content, 2)
    intact, refused = path.read_bytes(), 0
    for _ in range(300):
        damaged = bytearray(intact)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            found = read_json(path)
        except ValueError:
            refused += 1
        else:  # in the white space around the checksum
            assert found == content
    assert refused > 290


def test_wrong_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"seed": 3}, 2)
    path.write_text(path.read_text().replace("3", "2", 1))
    with pytest.raises(ChecksumError, match="does not match its checksum") as caught:
        read_json(path)
    assert caught.value.content == {"seed": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1e400}', "1e400 is out of range"),
        ('{"a": -1e400}', "-1e400 is out of range"),
        ('{"a": 1.7e308}', "1.7e308 is out of range"),
        ('{"a": 9223372036854775808}', "out of range"),
        ("9" * 5000, "out of range"),
        ("[Infinity]", "Infinity is not a number"),
        ("NaN", "NaN is not a number"),
        ("[" * 65 + "]" * 65, "nested too deeply"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested too deeply"),
        ("[" * 10**5 + "]" * 10**5, "nested too deeply"),
        ("[" * 10**5, "nested too deeply"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
    ],
)
def test_limits(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_values_within_the_limits() -> None:
    text = "[" * 64 + "9223372036854775807, -9223372036854775807, 1e99" + "]" * 64
    assert json.dumps(parse_json(text)) == text.replace("1e99", "1e+99")
    assert parse_json('{"a": [NaN, -Infinity]}', null_constants=True) == {"a": [None, None]}
    with pytest.raises(UnicodeDecodeError):  # a ValueError
        parse_json(b"\xff")


def test_only_regular_files_of_a_limited_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(path)
    path.unlink()
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="has 6 bytes, expected at most 5"):
        storage.read_bytes(path, limit=5)
    with pytest.raises(OSError, match="directory"):
        read_json(tmp_path)


def written(path: Path, epochs: int) -> list[str]:
    for epoch in range(epochs):
        storage.append_record(path, {"epoch": epoch, "val_error": epoch / 8})
    return path.read_text().splitlines(keepends=True)


def test_other_readers_see_one_more_key(tmp_path: Path) -> None:
    (line,) = written(tmp_path / "metrics.jsonl", 1)
    assert list(json.loads(line)) == ["epoch", "val_error", "crc"]
    assert storage.read_records(tmp_path / "metrics.jsonl") == [{"epoch": 0, "val_error": 0}]


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "layers.jsonl"
    row = {"epoch": 1, "layers": {"a": [float("nan"), float("inf"), 1.0]}}
    storage.append_record(path, row)
    assert storage.read_records(path) == [{"epoch": 1, "layers": {"a": [None, None, 1.0]}}]


def test_300_of_300_flipped_bits_change_no_number(tmp_path: Path) -> None:
    path, rng = tmp_path / "metrics.jsonl", random.Random(0)
    content = "".join(written(path, 3)).encode()
    before = {line.epoch: line.row["val_error"] for line in storage.scan_records(path).lines}
    for _ in range(300):
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        found = storage.scan_records(path)
        for line in found.lines:
            assert before[line.epoch] == line.row["val_error"]
        assert found.damage or found.torn


def test_lines_of_older_versions_come_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 0}\n')
    storage.append_record(path, {"epoch": 1})
    assert [line["epoch"] for line in storage.read_records(path)] == [0, 1]
    path.write_text(path.read_text() + '{"epoch": 2}\n')
    assert storage.scan_records(path).damage == [
        "line 3 of metrics.jsonl cannot be read (wrong checksum)"
    ]
    with pytest.raises(ValueError, match="line 3 of metrics"):
        storage.read_records(path)


def test_truncate_drops_later_records_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for epoch in range(5):
        storage.append_record(path, {"epoch": epoch})
    path.write_text(path.read_text() + '{"epoch": 5')
    assert storage.truncate_records(path, 3) == []
    assert [line["epoch"] for line in storage.read_records(path)] == [0, 1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


def test_truncate_names_unreadable_lines_and_keeps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"epoch": epoch}) for epoch in range(4)]
    lines[1:2] = ["{torn", "5", '{"other": 1}', "[" * 100_000]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    before = path.read_bytes()
    messages = storage.truncate_records(path, 3)
    assert [line["epoch"] for line in storage.read_records(path)] == [0, 2, 3]
    kept = "; the file is kept as metrics.jsonl.damaged1"
    lines_named = [f"line {i} of metrics.jsonl cannot be read" for i in (2, 3, 4, 5, 8)]
    missing = "metrics.jsonl has no record of epoch 1"
    assert messages == [message + kept for message in [*lines_named, missing]]
    assert (tmp_path / "metrics.jsonl.damaged1").read_bytes() == before


def test_truncate_names_missing_epochs(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = written(path, 5)
    path.write_text(lines[0] + lines[3] + lines[4])
    assert storage.truncate_records(path, 3) == [
        "metrics.jsonl has no record of epoch 1 and of 1 more"
    ]
    path.unlink()
    assert storage.truncate_records(path, 3) == ["there is no metrics.jsonl"]
    assert storage.truncate_records(path, -1) == []


def test_last_epoch(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert storage.last_epoch(path) == -1
    path.write_text('{"epoch": 0}\n{"epoch": 1}\n{"epoch": "7"}\n{"epoch": 2}')
    assert storage.last_epoch(path) == 1


def test_add_checksums(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 0, "lr": 0.08}\n{"epoch": 1, "lr": 8e-05}\n')
    assert storage.add_checksums(path)
    text = path.read_text()
    assert text.startswith('{"epoch": 0, "lr": 0.08, "crc": "')
    assert '{"epoch": 1, "lr": 8e-05, "crc": "' in text
    assert not storage.add_checksums(path)
    assert path.read_text() == text
    path.write_text(text.replace("0.08", "0.09"))
    with pytest.raises(ValueError, match=r"line 1 of .*checksum"):
        storage.add_checksums(path)


def test_files_of_endless_lines_are_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of line breaks alone would fill the memory with messages."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n" * 50_000)
    found = storage.scan_records(path)
    assert len(found.damage) == storage.MAX_DAMAGE + 1
    assert found.damage[-1] == "line 101 of metrics.jsonl and those after it are not read"
    path.unlink()
    written(path, 5)
    monkeypatch.setattr(storage, "MAX_LINES", 3)
    found = storage.scan_records(path)
    assert [line.epoch for line in found.lines] == [0, 1, 2]
    assert found.damage == ["line 4 of metrics.jsonl and those after it are not read"]
