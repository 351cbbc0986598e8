"""The run folder: file names, a reader, and the lock of the training process.

    config.json       configuration, derived values, versions (written by train/config.py)
    metrics.jsonl     one record per epoch (storage.py)
    layers.jsonl      one record per epoch: statistics of each layer
    diverged.json     present if a step was not finite
    validation.json   the last evaluation: confusion matrix, worst images
    samples/          pictures of validation images, epoch-0010.png, and the worst, worst-0010.png
    last/ previous/ best/    checkpoints (train/checkpoint.py)
    lock              held by the process that trains

This module does not import torch, so that `deepcontrol report` starts fast and works on any
machine. Run folders are untrusted input: the reader skips values of the wrong type and lines with a
wrong checksum with a note, takes no path from a file's content, and shows no picture behind a
symbolic link that leads out of the folder.

The lock is held on the open file `lock`, not on its name. If the file is deleted or the folder is
renamed, another process can lock a new file of that name. `RunLock.check` therefore compares the
held file with the one in the folder; a run checks it at every save.
"""

import fcntl
import itertools
import math
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from .storage import ChecksumError, Row, epoch_of, read_json, scan_records, shortened, write_json

CONFIG = "config.json"
METRICS = "metrics.jsonl"
LAYERS = "layers.jsonl"
DIVERGED = "diverged.json"
VALIDATION = "validation.json"
SAMPLES = "samples"
LAST, PREVIOUS, BEST = "last", "previous", "best"

MAX_CONFUSION = 256  # classes; more would take megabytes in every epoch
WORST_LISTED = 50  # images in validation.json


def write_diverged(run: Path, epoch: int, step: int | None, fault: str) -> None:
    """Record that a run diverged, in a step or, without one, after the epoch."""
    write_json(run / DIVERGED, {"epoch": epoch, "step": step, "fault": fault}, indent=1)


def sample_path(run: Path, epoch: int) -> Path:
    """Return the path of the sample picture of an epoch."""
    return run / SAMPLES / f"epoch-{epoch:04}.png"


def worst_path(run: Path, epoch: int) -> Path:
    """Return the path of the picture of an epoch's worst validation images."""
    return run / SAMPLES / f"worst-{epoch:04}.png"


def write_validation(
    run: Path, epoch: int, confusion: list[list[int]], worst: Sequence[tuple[str, float]]
) -> None:
    """Write the last evaluation.

    Args:
        run: Run folder.
        epoch: Epoch of the evaluation.
        confusion: Pixels or images by true and by predicted class. Left out if it is large.
        worst: Names and errors of the worst images, the highest error first: the share of wrong
            pixels, or 1 - the probability of the image's class.
    """
    content = {
        "epoch": epoch,
        "confusion": confusion if len(confusion) <= MAX_CONFUSION else None,
        "worst": [list(pair) for pair in worst],
    }
    write_json(run / VALIDATION, content, indent=0)


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
    damage: list[str] = field(default_factory=list)  # the notes about damaged records
    validation: Row = field(default_factory=dict)  # the last evaluation; empty in older runs
    worst_samples: list[tuple[int, Path]] = field(default_factory=list)  # as `samples`

    @property
    def is_classification(self) -> bool:
        """Whether the run labels images; otherwise it labels pixels."""
        return self.derived.get("task") == "classification"

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration, with the learning rate that was used if none was given."""
        chosen = self.config.get("lr", 0) is None and "lr" in self.derived
        return {**self.config, "lr": self.derived["lr"]} if chosen else self.config

    @property
    def labeled_unit(self) -> str:
        """What the run labels: image, pixel, or voxel of a volume."""
        if self.is_classification:
            return "image"
        size = self.config.get("size")
        return "voxel" if isinstance(size, list) and len(size) == 3 else "pixel"

    @property
    def class_names(self) -> list[str]:
        """The names of the classes; empty if they are unknown."""
        names = self.derived.get("classes")
        return [str(name) for name in names] if isinstance(names, list) else []

    @property
    def class_colors(self) -> list[str]:
        """The color of each class in pictures as "#rrggbb"; empty if one is invalid."""
        colors = self.derived.get("colors")
        if not isinstance(colors, list) or len(colors) != len(self.class_names):
            return []
        if not all(_is_color(color) for color in colors):
            return []
        return ["#" + bytes(color).hex() for color in colors]

    @property
    def class_metric(self) -> str:
        """The metric that is recorded for each class."""
        return "val_class_error" if self.is_classification else "val_class_iou"

    def class_series(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return epochs and values of the class metric by class; older runs have none."""
        names, found = self.class_names, {}
        rows = [row for row in self.metrics if _has_length(row.get(self.class_metric), names)]
        for i, name in enumerate(names):
            values = [(row["epoch"], finite_number(row[self.class_metric][i])) for row in rows]
            known = [(epoch, value) for epoch, value in values if value is not None]
            if known:
                found[name] = [epoch for epoch, _ in known], [value for _, value in known]
        return found

    @property
    def last_by_class(self) -> dict[str, float]:
        """The class metric after the last epoch, as far as the run has it."""
        last = self.epochs_done
        return {
            name: values[-1]
            for name, (epochs, values) in self.class_series().items()
            if epochs[-1] == last
        }

    @property
    def confusion(self) -> list[list[int]]:
        """Return the last evaluation's counts by true and predicted class; empty if none."""
        names = self.class_names
        counts: Any = self.validation.get("confusion")
        if not _has_length(counts, names) or not all(_has_length(row, names) for row in counts):
            return []
        valid = all(type(n) is int and n >= 0 for row in counts for n in row)
        return [list(row) for row in counts] if valid else []

    @property
    def worst_images(self) -> list[tuple[str, float]]:
        """Names and errors of the worst images of the last evaluation, the worst first."""
        listed = self.validation.get("worst")
        found = []
        for entry in listed if isinstance(listed, list) else []:
            if isinstance(entry, list) and len(entry) == 2:
                error = finite_number(entry[1])
                if error is not None:
                    found.append((str(entry[0]), error))
        return found[:WORST_LISTED]

    @property
    def epochs_done(self) -> int:
        return max((row["epoch"] for row in self.metrics), default=0)

    @property
    def epochs_planned(self) -> int | None:
        planned = self.config.get("epochs")
        return planned if isinstance(planned, int) else None

    @property
    def is_finished(self) -> bool:
        """Whether the run has diverged or recorded all its epochs."""
        planned = self.epochs_planned
        return self.diverged is not None or (planned is not None and self.epochs_done >= planned)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the epochs that have a finite value of a metric, and these values."""
        found = [
            (row["epoch"], v)
            for row in self.metrics
            if (v := finite_number(row.get(name))) is not None
        ]
        return [epoch for epoch, _ in found], [value for _, value in found]

    def best(self) -> tuple[int, float] | None:
        """Return epoch and error of the lowest validation error; None if there is none.

        Of epochs with the same error, the one with the lowest loss counts, as in training.
        """
        losses = dict(zip(*self.series("val_loss"), strict=True))
        found = [
            (error, losses.get(epoch, math.inf), epoch)
            for epoch, error in zip(*self.series("val_error"), strict=True)
        ]
        if not found:
            return None
        error, _, epoch = min(found)
        return epoch, error

    def missing_epochs(self, epochs: int) -> str:
        """Describe which of epochs 1 to `epochs` lack an error or a loss; "" if none."""
        complete = set(self.series("val_error")[0]).intersection(self.series("val_loss")[0])
        missing = epochs - sum(1 <= epoch <= epochs for epoch in complete)
        if missing <= 0:
            return ""
        first = next(epoch for epoch in itertools.count(1) if epoch not in complete)
        more = f" and {missing - 1} more" * (missing > 1)
        return f"{METRICS} has no error and loss of epoch {first}{more}"


def read_run(folder: Path) -> Run:
    """Read a run folder in any state: running, finished, killed or damaged.

    Raises:
        ValueError: The folder has no readable config.json.
    """
    content = read_config(folder)
    notes: list[str] = []
    damage: list[str] = []
    metrics = _read_by_epoch(folder / METRICS, notes, damage)
    layers = _read_by_epoch(folder / LAYERS, notes, damage)
    if folder.joinpath(METRICS).exists() and not metrics:
        notes.append("no epoch has finished yet")
    diverged = None
    try:
        diverged = read_diverged(folder)
    except ValueError as error:
        damage.append(str(error))
        notes.append(str(error))
    validation = _read_validation(folder, notes)
    return Run(
        name=folder.resolve().name,
        config=_as_row(content.get("config")),
        derived=_as_row(content.get("derived")),
        about={k: content.get(k) for k in ("versions", "commit", "machine")},
        metrics=metrics,
        layers=[row for row in layers if isinstance(row.get("layers"), dict)],
        validation=validation,
        samples=_find_samples(folder, "epoch"),
        worst_samples=_find_samples(folder, "worst"),
        diverged=diverged,
        notes=notes,
        damage=damage,
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

    The keys are "config", "derived", "versions", "commit", "machine" and "threads".

    Raises:
        ValueError: The folder has no config.json, or a damaged one. If a checkpoint holds an intact
            copy, the message names it and the values that differ.
    """
    path = folder / CONFIG
    try:
        return parse_config(read_json(path))
    except (FileNotFoundError, NotADirectoryError):
        problem = f"it has no {CONFIG}" if folder.exists() else "no such folder"
        expected = "Expected the --out of `deepcontrol train`."
        raise ValueError(f"{folder} is not a run folder: {problem}. {expected}") from None
    except ChecksumError as error:
        found = _intact_copy(folder, parse_config(error.content))
        raise ValueError(f"{path} is damaged: {error}.{found}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}.{_intact_copy(folder, None)}") from None


def parse_config(content: object) -> Row:
    """Return the content of a configuration file, with the present version's names."""
    row = _as_row(content)
    derived = row.get("derived")
    if isinstance(derived, dict) and "colours" in derived:  # spelling of older versions
        derived.setdefault("colors", derived.pop("colours"))
    return row


def _intact_copy(folder: Path, damaged: Row | None) -> str:
    """Return a sentence about the first checkpoint with a copy of the configuration."""
    for name in (LAST, PREVIOUS, BEST):
        copy = folder / name / CONFIG
        try:
            intact = parse_config(read_json(copy))
        except (OSError, ValueError):
            continue
        changed = "" if damaged is None else ", ".join(changed_values(damaged, intact))
        differs = f" Changed since {copy}: {changed}." if changed else ""
        return f"{differs} To restore it: cp {copy} {folder / CONFIG}"
    return ""


def changed_values(now: Row, before: Row, ignored: Sequence[str] = ()) -> list[str]:
    """List the settings and derived values that differ: "seed 3 -> 2".

    Args:
        now: Content of a configuration file.
        before: Content to compare with. Derived values that it lacks are newer and left out.
        ignored: Names of settings to leave out.
    """
    found = []
    for part in ("config", "derived"):
        old, new = _as_row(before.get(part)), _as_row(now.get(part))
        names = [name for name in old if part == "derived" or name not in ignored]
        found += [
            f"{name} {shortened(repr(old[name]))} -> {shortened(repr(new.get(name)))}"
            for name in names
            if old[name] != new.get(name)
        ]
    return found


def read_diverged(folder: Path) -> int | None:
    """Return the epoch in which a run diverged, or None.

    Raises:
        ValueError: diverged.json cannot be read.
    """
    try:
        return epoch_of(read_json(folder / DIVERGED))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{DIVERGED} cannot be read ({error})") from None


def finite_number(value: object) -> float | None:
    """Return a finite number as a float, and None for any other value."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _read_by_epoch(path: Path, notes: list[str], damage: list[str]) -> list[Row]:
    try:
        found = scan_records(path)
    except OSError:
        notes.append(f"there is no {path.name}")
        return []
    damage += found.damage
    notes += [*found.damage, *([found.torn] if found.torn else [])]
    return found.by_epoch()


def _read_validation(folder: Path, notes: list[str]) -> Row:
    try:
        return _as_row(read_json(folder / VALIDATION))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{VALIDATION} cannot be read ({error})")
        return {}


def _has_length(value: object, names: Sequence[str]) -> bool:
    return isinstance(value, list) and len(value) == len(names) > 0


def _is_color(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    return all(type(part) is int and 0 <= part < 256 for part in value)


def _as_row(value: object) -> Row:
    return value if isinstance(value, dict) else {}


def _find_samples(folder: Path, kind: str) -> list[tuple[int, Path]]:
    found = []
    for path in folder.glob(f"{SAMPLES}/{kind}-*.*"):  # PNG in a run, JPEG in a packed study
        epoch = re.fullmatch(rf"{kind}-(\d{{1,7}})", path.stem)
        if epoch and path.is_file() and is_within(path, folder):
            found.append((int(epoch[1]), path))
    return sorted(found)


def is_within(path: Path, folder: Path) -> bool:
    """Return whether a path, with its links followed, is in a folder."""
    home = os.path.realpath(folder)  # unlike Path.resolve, it does not raise on a loop of links
    return Path(os.path.realpath(path)).is_relative_to(home)


def _with_unique_names(runs: list[Run]) -> list[Run]:
    seen: dict[str, int] = {}
    named = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        count = seen[run.name]
        named.append(run if count == 1 else replace(run, name=f"{run.name} ({count})"))
    return named


LOCK = "lock"


class RunInUseError(OSError):
    """Another process is training in this run folder."""


class LockLostError(OSError):
    """The lock file or the run folder was deleted, moved or replaced during a run."""


class RunLock:
    """A held lock.

    Args:
        run: Run folder.
        file: The lock file, open and locked.
        is_new: Whether this process created the file.
    """

    def __init__(self, run: Path, file: TextIO, is_new: bool) -> None:
        self.run, self.is_new, self._file = run, is_new, file

    @property
    def is_valid(self) -> bool:
        """Whether the folder's lock file is the one that is held."""
        try:
            found = os.stat(self.run / LOCK, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._file.fileno()))

    def check(self) -> None:
        """Raise LockLostError unless this process still holds the folder's lock."""
        if not self.is_valid:
            raise LockLostError(
                f"{self.run / LOCK} is no longer the file that this process has locked: the lock "
                "or the folder was deleted, moved or replaced during the run. Nothing more is "
                "written. To continue, run the same command with --out naming the folder that "
                "holds the run's checkpoints."
            )

    def remove(self) -> None:
        """Delete the lock file, if it is still the held one."""
        if self.is_valid:
            (self.run / LOCK).unlink()


@contextmanager
def lock(run: Path, prepare: Callable[[bool], None] = lambda is_new: None) -> Iterator[RunLock]:
    """Hold the run folder's lock while the block runs.

    The kernel releases the lock when its process ends, however it ends, so there are no stale
    locks. The text of the lock file names the holder.

    Args:
        run: Run folder, created if it is missing.
        prepare: Called with whether the lock file is new. For a new one it is called before the
            file is created, so that a folder with a lock is always prepared, even after a kill.

    Raises:
        RunInUseError: Another process holds the lock.
    """
    run.mkdir(parents=True, exist_ok=True)
    is_new = not os.path.lexists(run / LOCK)
    if is_new:
        prepare(is_new)
    # Closing the file releases the lock. The file stays, so that the next process locks the same.
    with _acquire(run) as file:
        held = RunLock(run, file, is_new)
        if not is_new:
            prepare(is_new)
        yield held


def _acquire(run: Path) -> TextIO:
    """Open and lock the lock file, and write this process's name into it."""
    # Truncated only once the lock is held, because the text names the holder.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            file = open(os.open(run / LOCK, flags, 0o666), "a+")  # noqa: SIM115
        except OSError as error:
            raise OSError(
                f"cannot lock {run / LOCK} ({error.strerror}); expected a regular file: remove it, "
                "or choose another --out"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(1000).strip() or "another process"
            file.close()
            raise RunInUseError(
                f"{run} is in use by {holder}; wait for it to finish or choose another --out"
            ) from None
        if RunLock(run, file, is_new=False).is_valid:  # else its holder has just deleted it
            if os.fstat(file.fileno()).st_nlink > 1:  # writing would also change the other file
                file.close()
                raise OSError(
                    f"cannot lock {run / LOCK}: it is a hard link to another file; remove it"
                )
            break
        file.close()
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def is_locked(run: Path) -> bool:
    """Return whether a process is training in a run folder."""
    try:
        with open(os.open(run / LOCK, os.O_RDONLY | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False
