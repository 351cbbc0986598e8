"""Records: JSON Lines with one object per epoch, each with its checksum.

From the first line with a checksum on, all lines must have one. Does not import torch.
"""

import io
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .storage import (
    ChecksumError,
    add_checksum,
    append_text,
    parse_object,
    read_bytes,
    write_atomic,
)

MAX_FILE_BYTES = 2**28  # hundreds of times the records of a long run
MAX_LINES = 10**6
MAX_DAMAGE = 100  # further damaged lines are not listed
MAX_EPOCH = 10**7
Row = dict[str, Any]


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line with its checksum and sync it.

    Numbers that are not finite become null.
    """
    append_text(path, format_record(record))


def format_record(record: Mapping[str, Any]) -> str:
    """Return the line of a record, with its checksum.

    >>> print(format_record({"epoch": 1, "val_loss": math.nan}), end="")
    {"epoch": 1, "val_loss": null, "crc": "77cf7d97"}
    """
    return add_checksum(json.dumps(_without_nan(record), allow_nan=False)) + "\n"


def read_records(path: Path) -> list[Row]:
    """Return all records of a file, without their checksums.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line cannot be read.
    """
    found = scan_records(path)
    if found.damage or found.torn:
        raise ValueError(f"{path.parent}: {(found.damage or [found.torn])[0]}")
    return [line.row for line in found.lines]


@dataclass(frozen=True)
class Line:
    """A readable line."""

    epoch: int
    row: Row
    text: bytes


@dataclass(frozen=True)
class Scan:
    """The content of a file of records."""

    lines: list[Line]  # all readable lines, in their order
    damage: list[str]  # a message for each complete line that cannot be read
    torn: str = ""  # message if the last line is incomplete, as a killed process leaves it

    def by_epoch(self) -> list[Row]:
        """Return one record per epoch, sorted.

        The last wins: a resumed run repeats epochs.
        """
        rows = {line.epoch: line.row for line in self.lines}
        return [rows[epoch] for epoch in sorted(rows)]

    @property
    def last_epoch(self) -> int:
        """The last epoch that has a record, or -1."""
        return max((line.epoch for line in self.lines), default=-1)


def scan_records(path: Path) -> Scan:
    """Read a file of records in any state. A missing file raises OSError."""
    try:
        content = read_bytes(path, MAX_FILE_BYTES)
    except ValueError as error:
        return Scan([], [str(error)])
    lines: list[Line] = []
    damage: list[str] = []
    torn, needs_checksum = "", False
    for number, text in enumerate(io.BytesIO(content), start=1):
        if not text.endswith(b"\n"):
            torn = f"line {number} of {path.name} is incomplete"
            break
        if number > MAX_LINES or len(damage) == MAX_DAMAGE:
            damage.append(f"line {number} of {path.name} and those after it are not read")
            break
        text = text[:-1]
        try:
            epoch, row, has_checksum = _parse(text)
            if needs_checksum and not has_checksum:
                raise ChecksumError(row)
            needs_checksum = has_checksum
            lines.append(Line(epoch, row, text + b"\n"))
        except ChecksumError:
            damage.append(f"line {number} of {path.name} cannot be read (wrong checksum)")
            needs_checksum = True
        except ValueError:
            damage.append(f"line {number} of {path.name} cannot be read")
    return Scan(lines, damage, torn)


def last_epoch(path: Path) -> int:
    """Return the last epoch that has a record, or -1."""
    return scan_records(path).last_epoch if path.exists() else -1


def truncate_records(path: Path, epoch: int) -> list[str]:
    """Drop the records after `epoch`. A run resumed from there writes them again.

    A file with lines that cannot be read is kept under another name.

    Returns:
        A message for each damaged line and for each missing epoch.
    """
    if not path.exists():
        return [f"there is no {path.name}"] if epoch >= 0 else []
    found = scan_records(path)
    kept = [line for line in found.lines if line.epoch <= epoch]
    messages = list(found.damage)
    epochs = {line.epoch for line in kept}
    if missing := epoch + 1 - len(epochs):
        first = next(number for number in itertools.count() if number not in epochs)
        more = f" and of {missing - 1} more" * (missing > 1)
        messages.append(f"{path.name} has no record of epoch {first}{more}")
    if found.damage:
        copy = unused_name(path, "damaged")
        write_atomic(copy, read_bytes(path, MAX_FILE_BYTES))
        messages = [f"{message}; the file is kept as {copy.name}" for message in messages]
    write_atomic(path, b"".join(line.text for line in kept))
    return messages


def unused_name(path: Path, suffix: str) -> Path:
    """Return the path with the first number that is not in use: metrics.jsonl.old1."""
    number = 1
    while (found := path.with_name(f"{path.name}.{suffix}{number}")).exists():
        number += 1
    return found


def add_checksums(path: Path) -> bool:
    """Add checksums to the lines without one; return whether the file changed.

    No other byte of a line is changed. It can be repeated.

    Raises:
        ValueError: A line cannot be read. The file is left as it is.
    """
    text, changed = [], False
    for number, line in enumerate(read_bytes(path, MAX_FILE_BYTES).splitlines(), start=1):
        try:
            has_checksum = _parse(line)[2]
        except ValueError as error:
            raise ValueError(f"line {number} of {path} cannot be read: {error}") from None
        text.append(line.decode() if has_checksum else add_checksum(line.decode()))
        changed |= not has_checksum
    if changed:
        write_atomic(path, "".join(f"{line}\n" for line in text))
    return changed


def _parse(line: bytes) -> tuple[int, Row, bool]:
    row, has_checksum = parse_object(line, null_constants=True)
    return epoch_of(row), row, has_checksum


def epoch_of(row: object) -> int:
    """Return the epoch of a record; raise ValueError if it has none."""
    epoch = row.get("epoch") if isinstance(row, dict) else None
    if type(epoch) is not int or not 0 <= epoch < MAX_EPOCH:
        raise ValueError("no epoch")
    return epoch


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
