"""Run folders read as they are: finished or not, with a line torn where a process was killed.

Nothing here trusts a run folder, which may come from somebody else: values of the wrong type are
left out, with a note, and no path is taken from a file's content.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG, METRICS, LAYERS, SAMPLES = "config.json", "metrics.jsonl", "layers.jsonl", "samples"
DIVERGED = "diverged.json"

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run folder says; `notes` are lines about what it doesn't."""

    name: str
    config: Row
    derived: Row
    about: Row  # versions, commit, machine
    metrics: list[Row]  # a row an epoch, in order
    layers: list[Row]  # the same, {"epoch": ..., "layers": {...}}
    samples: list[tuple[int, Path]]  # epoch and picture, in order
    diverged: int | None = None  # the epoch in which a step was not finite
    notes: list[str] = field(default_factory=list)

    @property
    def epochs_done(self) -> int:
        return max((row["epoch"] for row in self.metrics), default=0)

    @property
    def epochs_planned(self) -> int | None:
        planned = self.config.get("epochs")
        return planned if isinstance(planned, int) else None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Epochs, and the values of one metric; those that are not there are left out."""
        found = [
            (row["epoch"], v) for row in self.metrics if (v := number(row.get(name))) is not None
        ]
        return [epoch for epoch, _ in found], [value for _, value in found]

    def gap(self, epochs: int) -> str:
        """Which errors or losses of epochs 1, 2, ... are not there, in words; none if all are."""
        there = set(self.series("val_error")[0]).intersection(self.series("val_loss")[0])
        gone = [epoch for epoch in range(1, epochs + 1) if epoch not in there]
        more = f" and of {len(gone) - 1} more" * (len(gone) > 1)
        return f"{METRICS} has no error and loss of epoch {gone[0]}{more}" if gone else ""


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs, and a line for each folder that is none."""
    runs, refused = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except ValueError as error:
            refused.append(str(error))
    return _with_different_names(runs), refused


def read_run(folder: Path) -> Run:
    """One run; ValueError if the folder is none."""
    content = _read_config(folder)
    notes: list[str] = []
    metrics = _read_lines(folder / METRICS, notes)
    layers = _read_lines(folder / LAYERS, notes)
    if folder.joinpath(METRICS).exists() and not metrics:
        notes.append("no epoch is finished yet")
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


def number(value: object) -> float | None:
    """A finite number, or None for whatever else stands in its place."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def read_diverged(folder: Path) -> int | None:
    """The epoch in which a run met a step that was not finite, if it did."""
    try:
        return _epoch(_as_row(json.loads((folder / DIVERGED).read_text())))
    except (OSError, ValueError, RecursionError):
        return None


def _read_config(folder: Path) -> Row:
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is no run folder: it has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return _as_row(content)


def _read_lines(path: Path, notes: list[str]) -> list[Row]:
    """The rows of a file of JSON lines, one for each epoch; the last one wins, as in a resume."""
    try:
        lines = path.read_text(errors="replace").splitlines(keepends=True)
    except OSError:
        notes.append(f"there is no {path.name}")
        return []
    rows: dict[int, Row] = {}
    for i, line in enumerate(lines):
        try:
            epoch, row = read_line(line)
            rows[epoch] = row
        except ValueError:
            torn = i == len(lines) - 1 and not line.endswith("\n")
            what = "is not whole yet" if torn else "cannot be read"
            notes.append(f"line {i + 1} of {path.name} {what}")
    return [rows[epoch] for epoch in sorted(rows)]


def read_line(line: str) -> tuple[int, Row]:
    """The epoch and all else that a line says; ValueError if it says none."""
    try:
        row = _as_row(json.loads(line))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return _epoch(row), row


def _epoch(row: Row) -> int:
    epoch = row.get("epoch")
    if type(epoch) is not int or not 0 <= epoch < 10**7:
        raise ValueError("no epoch")
    return epoch


def _as_row(value: object) -> Row:
    return value if isinstance(value, dict) else {}


def _find_samples(folder: Path) -> list[tuple[int, Path]]:
    """Pictures by their epoch; none that a link fetches from elsewhere."""
    found = []
    home = folder.resolve()
    for path in folder.glob(f"{SAMPLES}/epoch-*.*"):  # PNG as made, JPEG as packed
        epoch = re.fullmatch(r"epoch-(\d{1,7})", path.stem)
        if epoch and path.resolve().is_relative_to(home):
            found.append((int(epoch[1]), path))
    return sorted(found)


def _with_different_names(runs: list[Run]) -> list[Run]:
    """Runs of the same name get a number, so that a page can tell them apart."""
    seen: dict[str, int] = {}
    named = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        count = seen[run.name]
        name = run.name if count == 1 else f"{run.name} ({count})"
        named.append(Run(**{**vars(run), "name": name}))
    return named
