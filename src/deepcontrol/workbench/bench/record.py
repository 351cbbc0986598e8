"""What every benchmark writes down: its rows, and where and when they were measured."""

import csv
import datetime
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..hardware import hardware

Row = dict[str, str]

# The columns that come last, in this order.
ABOUT = ("hardware", "cores", "python", "torch", "cuda", "cudnn", "triton", "source", "run", "date")


def versions(device: str) -> Row:
    """Of everything that a time depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
        try:
            found["triton"] = importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            found["triton"] = "none"
    return found


def about(device: str) -> Row:
    """Where and when: hardware, cores, versions and the date."""
    return {
        "hardware": hardware(device),
        "cores": str(os.cpu_count()),
        **versions(device),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def source_hash() -> str:
    """A short name of the code that is measured: it changes when a file of it does."""
    package = Path(__file__).parents[2]
    files = sorted(
        path
        for part in ("ops", "nn", "workbench/models")
        for path in (package / part).rglob("*.py")
    )
    files.append(package / "step.py")
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:10]


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV, without the columns that they leave empty; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def has_row(path: Path, key: Mapping[str, object]) -> bool:
    """Is there a row with all of this? What was measured once need not be again."""
    return any(all(row.get(k) == str(v) for k, v in key.items()) for row in read_rows(path))


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """The rows as CSV, in one go: whoever stops the program finds the old file or the new one."""
    found = dict.fromkeys(key for row in rows for key in row)
    columns = [c for c in found if c not in ABOUT] + [c for c in ABOUT if c in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)


def write(path: Path, rows: Sequence[Mapping[str, object]], device: str, add: bool = False) -> None:
    """The rows as CSV, each with what `about` says; with `add`, behind those that are there."""
    here, before = about(device), read_rows(path) if add else []
    write_rows(path, [*before, *({**row, **here} for row in rows)])
    print(f"Written to {path}")
