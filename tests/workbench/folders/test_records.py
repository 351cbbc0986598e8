"""Records of epochs: resuming, damage, checksums of their own."""

import json
import random
from pathlib import Path

import pytest

from deepcontrol.workbench.folders import records


def written(path: Path, epochs: int) -> list[str]:
    for epoch in range(epochs):
        records.append_record(path, {"epoch": epoch, "val_error": epoch / 8})
    return path.read_text().splitlines(keepends=True)


def test_other_readers_see_one_more_key(tmp_path: Path) -> None:
    (line,) = written(tmp_path / "metrics.jsonl", 1)
    assert list(json.loads(line)) == ["epoch", "val_error", "crc"]
    assert records.read_records(tmp_path / "metrics.jsonl") == [{"epoch": 0, "val_error": 0}]


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "layers.jsonl"
    row = {"epoch": 1, "layers": {"a": [float("nan"), float("inf"), 1.0]}}
    records.append_record(path, row)
    assert records.read_records(path) == [{"epoch": 1, "layers": {"a": [None, None, 1.0]}}]


def test_300_of_300_flipped_bits_change_no_number(tmp_path: Path) -> None:
    path, rng = tmp_path / "metrics.jsonl", random.Random(0)
    content = "".join(written(path, 3)).encode()
    before = {line.epoch: line.row["val_error"] for line in records.scan_records(path).lines}
    for _ in range(300):
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        found = records.scan_records(path)
        for line in found.lines:
            assert before[line.epoch] == line.row["val_error"]
        assert found.damage or found.torn


def test_lines_of_older_versions_come_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 0}\n')
    records.append_record(path, {"epoch": 1})
    assert [line["epoch"] for line in records.read_records(path)] == [0, 1]
    path.write_text(path.read_text() + '{"epoch": 2}\n')
    assert records.scan_records(path).damage == [
        "line 3 of metrics.jsonl cannot be read (wrong checksum)"
    ]
    with pytest.raises(ValueError, match="line 3 of metrics"):
        records.read_records(path)


def test_truncate_drops_later_records_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for epoch in range(5):
        records.append_record(path, {"epoch": epoch})
    path.write_text(path.read_text() + '{"epoch": 5')
    assert records.truncate_records(path, 3) == []
    assert [line["epoch"] for line in records.read_records(path)] == [0, 1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


def test_truncate_names_unreadable_lines_and_keeps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"epoch": epoch}) for epoch in range(4)]
    lines[1:2] = ["{torn", "5", '{"other": 1}', "[" * 100_000]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    before = path.read_bytes()
    messages = records.truncate_records(path, 3)
    assert [line["epoch"] for line in records.read_records(path)] == [0, 2, 3]
    kept = "; the file is kept as metrics.jsonl.damaged1"
    lines_named = [f"line {i} of metrics.jsonl cannot be read" for i in (2, 3, 4, 5, 8)]
    missing = "metrics.jsonl has no record of epoch 1"
    assert messages == [message + kept for message in [*lines_named, missing]]
    assert (tmp_path / "metrics.jsonl.damaged1").read_bytes() == before


def test_truncate_names_missing_epochs(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = written(path, 5)
    path.write_text(lines[0] + lines[3] + lines[4])
    assert records.truncate_records(path, 3) == [
        "metrics.jsonl has no record of epoch 1 and of 1 more"
    ]
    path.unlink()
    assert records.truncate_records(path, 3) == ["there is no metrics.jsonl"]
    assert records.truncate_records(path, -1) == []


def test_last_epoch(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert records.last_epoch(path) == -1
    path.write_text('{"epoch": 0}\n{"epoch": 1}\n{"epoch": "7"}\n{"epoch": 2}')
    assert records.last_epoch(path) == 1


def test_add_checksums(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 0, "lr": 0.08}\n{"epoch": 1, "lr": 8e-05}\n')
    assert records.add_checksums(path)
    text = path.read_text()
    assert text.startswith('{"epoch": 0, "lr": 0.08, "crc": "')
    assert '{"epoch": 1, "lr": 8e-05, "crc": "' in text
    assert not records.add_checksums(path)
    assert path.read_text() == text
    path.write_text(text.replace("0.08", "0.09"))
    with pytest.raises(ValueError, match=r"line 1 of .*checksum"):
        records.add_checksums(path)


def test_files_of_endless_lines_are_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of line breaks alone would fill the memory with messages."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n" * 50_000)
    found = records.scan_records(path)
    assert len(found.damage) == records.MAX_DAMAGE + 1
    assert found.damage[-1] == "line 101 of metrics.jsonl and those after it are not read"
    path.unlink()
    written(path, 5)
    monkeypatch.setattr(records, "MAX_LINES", 3)
    found = records.scan_records(path)
    assert [line.epoch for line in found.lines] == [0, 1, 2]
    assert found.damage == ["line 4 of metrics.jsonl and those after it are not read"]
