"""`deepcontrol train` and `deepcontrol eval`: what they take beside a configuration, and do."""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..data import Batches, open_source, prepare
from .build import build_model
from .checkpoint import find, load
from .config import Train, load_config
from .devices import choose_autocast, choose_device
from .distributed import end_if_launched
from .evaluate import evaluate
from .loop import train
from .plan import Plan, plan
from .saving import load_weights


@dataclass(frozen=True, kw_only=True)
class TrainCommand(Train):
    __doc__ = Train.__doc__

    dry_run: bool = False
    """Say what would be done - parameters, memory, steps, folder - and do nothing."""


@dataclass(frozen=True)
class Eval:
    """Evaluate a run's checkpoint on its validation images: pixel error and IoU of each class."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    checkpoint: Literal["best", "last", "previous"] = "best"
    """Which of its checkpoints."""
    data_root: Path | None = None
    """The data set's folder, if it is not where it was in training."""
    batch_size: int | None = None
    """Images at once; as many as the run evaluated at once unless told otherwise."""
    val_limit: int | None = None
    """The first so many images alone; as in training unless told otherwise."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""


def run_train(command: TrainCommand, console: Console) -> int:
    config = Train(**{f.name: getattr(command, f.name) for f in fields(Train)})
    if command.dry_run:
        if os.environ.get("RANK", "0") == "0":  # torchrun starts several
            print_plan(config, plan(config), console)
        return 0
    code = train(config, console)
    end_if_launched(code)
    return code


def print_plan(config: Train, planned: Plan, console: Console) -> None:
    what = f"{config.model}, norm {config.norm}, width {config.width:g}"
    data = f"{config.data}: {planned.train_images} images, {planned.val_images} for validation"
    size = f"{config.size[0]}x{config.size[1]}, {planned.classes} classes"
    steps = f"{planned.steps_per_epoch} an epoch, {planned.steps:,} in {config.epochs} epochs"
    memory = (
        f"about {planned.memory_mib:,.0f} MiB: {planned.state_mib:,.0f} for parameters, gradients "
        f"and momentum, {planned.activations_mib:,.0f} for a step's maps"
    )
    table = Table(show_header=False, box=None)
    for name, value in {
        "model": what,
        "parameters": f"{planned.parameters:,}",
        "data": f"{data}, {size}",
        "batch size": f"{config.batch_size}, rate {config.rate:g}, momentum {config.momentum:g}",
        "steps": steps,
        "memory": memory,
        "device": planned.device,
        "output": f"{config.out} ({'continued' if planned.continues else 'new'})",
    }.items():
        table.add_row(name, escape(value))
    if not console.is_terminal:
        console.width = 200  # a log has no edge to fold a table at
    console.print(table)


def run_eval(command: Eval, console: Console) -> int:
    config, _ = load_config(command.run)
    for name in ("data_root", "val_limit"):
        if getattr(command, name) is not None:
            config = replace(config, **{name: getattr(command, name)})
    weights = load(find(command.run, command.checkpoint)).model
    source = open_source(config.data, "val", config.data_root, config.val_limit)
    device = choose_device(command.device)
    model = build_model(config, len(source.classes))
    load_weights(model, weights)
    model.to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    at_once = config.evaluated_at_once if command.batch_size is None else command.batch_size
    batches = Batches(prepare(source, config.size), at_once, device=device)
    autocast = choose_autocast(config.precision, device)
    matrix = evaluate(model, batches, autocast, window=config.window)
    table = Table("class", "IoU %")
    table.columns[1].justify = "right"
    for name, iou in zip(source.classes, matrix.class_iou.tolist(), strict=True):
        table.add_row(name, "-" if iou != iou else f"{100 * iou:.2f}")
    console.print(table)
    console.print(
        f"{escape(str(command.run / command.checkpoint))} on {len(source)} images: "
        f"pixel error {matrix.pixel_error:.2%}, mean IoU {matrix.mean_iou:.3f}",
        highlight=False,
        soft_wrap=True,
    )
    return 0
