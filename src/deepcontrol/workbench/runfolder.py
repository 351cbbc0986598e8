"""The run folder: file names, atomic writes, JSONL records, the lock, and a reader.

    config.json       configuration, derived values, versions (written by train/config.py)
    metrics.jsonl     one record per epoch
    layers.jsonl      one record per epoch: statistics of each layer
    diverged.json     present if a step was not finite
    samples/          pictures of validation images, epoch-0010.png
    last/ previous/ best/    checkpoints (train/checkpoint.py)
    lock              held by the process that trains

This module does not import torch, so that `deepcontrol report` starts fast and works on any
machine. Run folders are untrusted input: the reader skips values of the wrong type with a
note, takes no path from a file's content, and neither reads nor writes through symbolic links that
lead out of the folder.
"""

import fcntl
import json
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

CONFIG = "config.json"
METRICS = "metrics.jsonl"
LAYERS = "layers.jsonl"
DIVERGED = "diverged.json"
SAMPLES = "samples"
LOCK = "lock"
LAST, PREVIOUS, BEST = "last", "previous", "best"

Row = dict[str, Any]


# Writing


def write_atomic(path: Path, text: str) -> None:
    """Replace a file: write a temporary file next to it, sync it, rename it.

    A crash at any moment leaves either the old text or the new one.
    """
    temporary = path.with_name(f".{path.name}.new")
    with _folder_lock(path.parent):
        temporary.unlink(missing_ok=True)
        _write(temporary, os.O_EXCL, text)
        temporary.replace(path)


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line and sync it to the disk."""
    _write(path, os.O_APPEND, json.dumps(record) + "\n")


def truncate_records(path: Path, epoch: int) -> None:
    """Drop the records after `epoch`. A run resumed from there writes them again."""
    if path.exists():
        write_atomic(path, "".join(line for line, of in _complete_lines(path) if of <= epoch))


def last_epoch(path: Path) -> int:
    """Return the last epoch that has a record, or -1."""
    return max((epoch for _, epoch in _complete_lines(path)), default=-1) if path.exists() else -1


def read_records(path: Path) -> list[Row]:
    """Return all records of a file that this process wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_diverged(run: Path, epoch: int, step: int | None, fault: str) -> None:
    """Record that a run diverged, in a step or, without one, after the epoch."""
    about = {"epoch": epoch, "step": step, "fault": fault}
    write_atomic(run / DIVERGED, json.dumps(about) + "\n")


def sample_path(run: Path, epoch: int) -> Path:
    """Return the path of the sample picture of an epoch."""
    return run / SAMPLES / f"epoch-{epoch:04}.png"


def _complete_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the complete lines and their epochs. A killed process leaves its last line torn."""
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        try:
            epoch = json.loads(line)["epoch"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if line.endswith("\n") and type(epoch) is int:
            yield line, epoch


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Serialize writers. Unlike a run folder, a study folder may have several."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, flags: int, text: str) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flags, 0o666)
        with open(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(handle)
    except OSError as error:
        raise OSError(
            f"cannot write {path} ({error.strerror}); it needs {len(text)} more bytes. "
            "The checkpoints are unchanged."
        ) from error


# The lock


class RunInUseError(OSError):
    """Another process is training in this run folder."""


@contextmanager
def lock(run: Path) -> Iterator[None]:
    """Hold the run folder's lock while the block runs.

    The kernel releases the lock when its process ends, however it ends, so there are no stale
    locks. The text of the lock file names the holder.

    Raises:
        RunInUseError: Another process holds the lock.
    """
    run.mkdir(parents=True, exist_ok=True)
    # Truncated only once the lock is held, because the text names the holder.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with open(os.open(run / LOCK, flags, 0o666), "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise RunInUseError(
                f"{run} is in use by {holder}; wait for it to finish or choose another --out"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        # Closing the file releases the lock. The file stays: were it removed, two processes could
        # hold locks on two different files of this name.
        yield


def is_locked(run: Path) -> bool:
    """Return whether a process is training in a run folder."""
    try:
        with (run / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


# Reading


@dataclass(frozen=True)
class Run:
    """The readable content of a run folder; `notes` lists missing and damaged parts."""

    name: str
    config: Row
    derived: Row
    about: Row  # versions, commit, machine
    metrics: list[Row]  # by epoch
    layers: list[Row]  # by epoch: {"epoch": ..., "layers": {...}}
    samples: list[tuple[int, Path]]  # epoch and picture, by epoch
    diverged: int | None = None  # epoch of the first step that was not finite
    notes: list[str] = field(default_factory=list)

    @property
    def is_classification(self) -> bool:
        """Whether the run labels images; otherwise it labels pixels."""
        return self.derived.get("task") == "classification"

    @property
    def class_errors(self) -> dict[str, float]:
        """The error of each class after the last epoch, as far as the run has it."""
        found = self.metrics[-1].get("val_class_error") if self.metrics else None
        names = self.derived.get("classes")
        if not isinstance(found, list) or not isinstance(names, list) or len(names) != len(found):
            return {}
        numbers = zip(map(str, names), map(finite_number, found), strict=True)
        return {name: number for name, number in numbers if number is not None}

    @property
    def epochs_done(self) -> int:
        return max((row["epoch"] for row in self.metrics), default=0)

    @property
    def epochs_planned(self) -> int | None:
        planned = self.config.get("epochs")
        return planned if isinstance(planned, int) else None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the epochs that have a finite value of a metric, and these values."""
        found = [
            (row["epoch"], v)
            for row in self.metrics
            if (v := finite_number(row.get(name))) is not None
        ]
        return [epoch for epoch, _ in found], [value for _, value in found]

    def missing_epochs(self, epochs: int) -> str:
        """Describe which of epochs 1 to `epochs` lack an error or a loss; "" if none."""
        complete = set(self.series("val_error")[0]).intersection(self.series("val_loss")[0])
        missing = [epoch for epoch in range(1, epochs + 1) if epoch not in complete]
        more = f" and {len(missing) - 1} more" * (len(missing) > 1)
        return f"{METRICS} has no error and loss of epoch {missing[0]}{more}" if missing else ""


def read_run(folder: Path) -> Run:
    """Read a run folder in any state: running, finished, killed or damaged.

    Raises:
        ValueError: The folder has no readable config.json.
    """
    content = read_config(folder)
    notes: list[str] = []
    metrics = _read_by_epoch(folder / METRICS, notes)
    layers = _read_by_epoch(folder / LAYERS, notes)
    if folder.joinpath(METRICS).exists() and not metrics:
        notes.append("no epoch has finished yet")
    return Run(
        name=folder.resolve().name,
        config=_as_row(content.get("config")),
        derived=_as_row(content.get("derived")),
        about={k: content.get(k) for k in ("versions", "commit", "machine")},
        metrics=metrics,
        layers=[row for row in layers if isinstance(row.get("layers"), dict)],
        samples=_find_samples(folder),
        diverged=read_diverged(folder),
        notes=notes,
    )


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs, and an error message for each folder that is not a run."""
    runs, errors = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except ValueError as error:
            errors.append(str(error))
    return _with_unique_names(runs), errors


def read_config(folder: Path) -> Row:
    """Return the content of config.json.

    The keys are "config", "derived", "versions", "commit" and "machine".

    Raises:
        ValueError: The folder has no readable config.json.
    """
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        problem = f"it has no {CONFIG}" if folder.exists() else "no such folder"
        raise ValueError(f"{folder} is not a run folder: {problem}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    row = _as_row(content)
    derived = row.get("derived")
    if isinstance(derived, dict) and "colours" in derived:  # as older versions spelled it
        derived.setdefault("colors", derived.pop("colours"))
    return row


def read_diverged(folder: Path) -> int | None:
    """Return the epoch in which a run diverged, or None."""
    try:
        return _epoch(_as_row(json.loads((folder / DIVERGED).read_text())))
    except (OSError, ValueError, RecursionError):
        return None


def parse_record(line: str) -> tuple[int, Row]:
    """Return the epoch and the record of a JSON line.

    Raises:
        ValueError: The line is not a record with an epoch.
    """
    try:
        row = _as_row(json.loads(line))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return _epoch(row), row


def finite_number(value: object) -> float | None:
    """Return a finite number as a float, and None for any other value."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _read_by_epoch(path: Path, notes: list[str]) -> list[Row]:
    """Read one record per epoch. The last one wins: a resumed run repeats epochs."""
    try:
        lines = path.read_text(errors="replace").splitlines(keepends=True)
    except OSError:
        notes.append(f"there is no {path.name}")
        return []
    rows: dict[int, Row] = {}
    for i, line in enumerate(lines):
        try:
            epoch, row = parse_record(line)
            rows[epoch] = row
        except ValueError:
            torn = i == len(lines) - 1 and not line.endswith("\n")
            problem = "is incomplete" if torn else "cannot be read"
            notes.append(f"line {i + 1} of {path.name} {problem}")
    return [rows[epoch] for epoch in sorted(rows)]


def _epoch(row: Row) -> int:
    epoch = row.get("epoch")
    if type(epoch) is not int or not 0 <= epoch < 10**7:
        raise ValueError("no epoch")
    return epoch


def _as_row(value: object) -> Row:
    return value if isinstance(value, dict) else {}


def _find_samples(folder: Path) -> list[tuple[int, Path]]:
    found = []
    home = folder.resolve()
    for path in folder.glob(f"{SAMPLES}/epoch-*.*"):  # PNG in a run, JPEG in a packed study
        epoch = re.fullmatch(r"epoch-(\d{1,7})", path.stem)
        if epoch and path.resolve().is_relative_to(home):
            found.append((int(epoch[1]), path))
    return sorted(found)


def _with_unique_names(runs: list[Run]) -> list[Run]:
    seen: dict[str, int] = {}
    named = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        count = seen[run.name]
        named.append(run if count == 1 else replace(run, name=f"{run.name} ({count})"))
    return named
