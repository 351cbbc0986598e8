"""A tiny run that tests start, kill, resume and compare."""

import itertools
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepcontrol.step import TrainingStep
from deepcontrol.workbench.cli import main, parse
from deepcontrol.workbench.folders import runfolder, storage
from deepcontrol.workbench.train import TrainCommand
from deepcontrol.workbench.train.checkpoint import load
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.data import build_data, open_sources
from deepcontrol.workbench.train.distributed import Group

CLOCK = ("seconds", "images_per_s", "peak_mib")
TINY = {
    "width": "0.02",
    "size": "32x64",
    "batch-size": "2",
    "train-limit": "7",
    "val-limit": "3",
    "epochs": "3",
    "sample-epochs": "2",
    "device": "cpu",
}
STEPS = 12  # 3 epochs of 4 batches; the last batch has one image


def command(out: Path, **changes: object) -> list[str]:
    """Return the arguments of `deepcontrol` for the tiny run; save_steps=3 is --save-steps 3."""
    flags = {**TINY, "out": str(out)}
    flags |= {name.replace("_", "-"): str(value) for name, value in changes.items()}
    words = (word for name, value in flags.items() for word in (f"--{name}", value))
    return ["train", *(word for word in words if word)]


def train_here(out: Path, **changes: object) -> None:
    assert main(command(out, **changes)) == 0


def start(out: Path, **changes: object) -> subprocess.Popen[str]:
    """Start the tiny run in another process."""
    words = [sys.executable, "-m", "deepcontrol", *command(out, **changes)]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True)


def signal_at_step(step: int, signum: int, patch: pytest.MonkeyPatch) -> None:
    """Send a signal to this process during a step of a run."""
    steps, call = itertools.count(1), TrainingStep.__call__

    def counted(self: TrainingStep, *batch: Tensor) -> Tensor:
        if next(steps) == step:
            os.kill(os.getpid(), signum)
        return call(self, *batch)

    patch.setattr(TrainingStep, "__call__", counted)


def tiny(out: Path = Path("nowhere"), **changes: Any) -> Train:
    """Return the configuration of the tiny run."""
    parsed = parse(command(out, **changes))
    assert isinstance(parsed, TrainCommand)
    return Train(**{f.name: getattr(parsed, f.name) for f in fields(Train)})


def prepare_data() -> None:
    config = tiny()
    build_data(config, open_sources(config), Group(torch.device("cpu")), lambda *_: None)


def metrics(out: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without timings and memory."""
    lines = storage.read_records(out / runfolder.METRICS)
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]


def differences(a: Path, b: Path) -> list[str]:
    """List the parts of two finished runs that are not bit-identical."""
    found = []
    if metrics(a) != metrics(b):
        found.append("metrics")
    if (a / runfolder.LAYERS).read_bytes() != (b / runfolder.LAYERS).read_bytes():
        found.append("layers")
    for name in ("last", "best"):
        mine, theirs = load(a / name), load(b / name)
        if not same(mine.model, theirs.model):
            found.append(f"{name}: weights")
        if not same(without_clock(mine.state), without_clock(theirs.state)):
            found.append(f"{name}: state")
    return found


def without_clock(state: dict[str, Any]) -> dict[str, Any]:
    position = {k: v for k, v in state["position"].items() if k != "seconds"}
    return {**state, "position": position}


def same(a: Any, b: Any) -> bool:
    """Compare nested dicts and lists of tensors bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b
