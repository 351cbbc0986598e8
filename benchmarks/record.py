"""What every benchmark writes down: its rows, and where and when they were measured."""

import csv
import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import torch


def hardware(device: str) -> str:
    """The GPU's name, or the CPU's with its number of threads."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {torch.get_num_threads()} threads"


def write(path: Path, rows: Sequence[dict[str, object]], device: str) -> None:
    """The rows as CSV, each with hardware, cores, torch's version and the date."""
    about = {
        "hardware": hardware(device),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    columns = dict.fromkeys(key for row in rows for key in row)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *about], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
    print(f"Written to {path}")
