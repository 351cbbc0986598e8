"""A tiny run of a classifier, on generated CIFAR-10 files."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from deepcontrol.workbench.cli import main, parse
from deepcontrol.workbench.train import TrainCommand
from deepcontrol.workbench.train.config import Train

TINY = {
    "model": "resnet20",
    "data": "cifar10",
    "width": "0.1",
    "batch-size": "6",
    "eval-batch-size": "8",
    "epochs": "2",
    "lr": "0.05",
    "schedule": "cosine",
    "warmup-epochs": "0.5",
    "weight-decay": "0.001",
    "sample-epochs": "2",
    "device": "cpu",
}
TRAIN, VAL = 64, 20
STEPS = 22  # 2 epochs of 11 batches; the last batch has 4 images


def command(out: Path, root: Path, **changes: object) -> list[str]:
    """Return the arguments of `deepcontrol` for the tiny run."""
    flags = {**TINY, "out": str(out), "data-root": str(root)}
    flags |= {name.replace("_", "-"): str(value) for name, value in changes.items()}
    return ["train", *(word for name, value in flags.items() for word in (f"--{name}", value))]


def train_here(out: Path, root: Path, **changes: object) -> None:
    assert main(command(out, root, **changes)) == 0


def tiny(out: Path = Path("nowhere"), root: Path = Path("nowhere"), **changes: Any) -> Train:
    """Return the configuration of the tiny run."""
    parsed = parse(command(out, root, **changes))
    assert isinstance(parsed, TrainCommand)
    return Train(**{f.name: getattr(parsed, f.name) for f in fields(Train)})
