"""What a run writes as it goes: a line of JSON an epoch, on the disk before the run goes on."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METRICS, LAYERS = "metrics.jsonl", "layers.jsonl"
DIVERGED = "diverged.json"  # there if a step was not finite: which one


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line, and wait until the disk has it."""
    _write(path, os.O_APPEND, json.dumps(record) + "\n")


def truncate(path: Path, epoch: int) -> None:
    """Keep the lines up to an epoch: what came after the checkpoint will be written again."""
    if path.exists():
        write_whole(path, "".join(line for line, of in _lines(path) if of <= epoch))


def last_epoch(path: Path) -> int:
    """The last that has a line; -1 if none has."""
    return max((epoch for _, epoch in _lines(path)), default=-1) if path.exists() else -1


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """The whole lines of a file and their epochs; one is torn where a process was killed."""
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        try:
            epoch = json.loads(line)["epoch"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if line.endswith("\n") and type(epoch) is int:
            yield line, epoch


def read(path: Path) -> list[dict[str, Any]]:
    """All lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place, sync and rename it: the old text or the new one is there."""
    fresh = path.with_name(f".{path.name}.new")
    with _alone_in(path.parent):
        fresh.unlink(missing_ok=True)
        _write(fresh, os.O_EXCL, text)
        fresh.replace(path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two processes may write one file: a study's folder is nobody's alone, as a run's is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, flags: int, text: str) -> None:
    """Until the disk has it. A link is not followed: a run folder may come from elsewhere."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flags, 0o666)
        with open(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(handle)
    except OSError as error:
        raise OSError(
            f"{path} could not be written ({error.strerror}). It needs {len(text)} bytes more. "
            "The checkpoints are as they were."
        ) from error
