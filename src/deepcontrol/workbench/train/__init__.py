"""`deepcontrol train` (--dry-run, --find-lr), `deepcontrol eval`, and `Trainer`."""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import torch

try:
    import tyro
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed; deepcontrol.workbench.train needs the workbench extra. "
        'In a clone of the repository, run: pip install ".[workbench]"',
        name=error.name,
    ) from error
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...nn import saved_bytes
from ..data import DataName
from ..folders.runfolder import CONFIG
from ..terminal import format_size
from .build import build_model, build_network
from .config import Train
from .config_file import check_code, check_unchanged, load_config
from .data import open_samples, open_sources, with_channels
from .diagnosis import state_bytes
from .distributed import choose_autocast, choose_device, exit_if_distributed
from .find_lr import run_find_lr
from .loop import train
from .trainer import Trainer, evaluate_checkpoint

__all__ = ["Eval", "Train", "TrainCommand", "Trainer", "run_eval", "run_train"]


MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class TrainCommand(Train):
    __doc__ = Train.__doc__

    data: DataName = "streets"  # without the names of torch Datasets
    dry_run: bool = False
    """Print parameters, memory, steps and run folder, and exit."""
    find_lr: bool = False
    """Try learning rates from 1/32 to 32 times --lr (or its default) in short trainings, print a
    table with a suggestion, write find-lr.png to the run folder, and exit. An existing run is not
    changed."""
    find_lr_steps: int = 200
    """Steps at each learning rate of --find-lr."""


@dataclass(frozen=True)
class Eval:
    """Evaluate a checkpoint on the validation images.

    Prints the error, then the IoU (segmentation) or error (classification) of each class.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run folder."""
    checkpoint: Literal["best", "last", "previous"] = "best"
    """Checkpoint to evaluate."""
    data_root: Path | None = None
    """Dataset folder. None: the folder used in training."""
    batch_size: int | None = None
    """Images per batch. None: the evaluation batch size of the run."""
    val_limit: int | None = None
    """Use only the first N validation images. None: the limit of the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device. auto uses a GPU if there is one."""
    model: Annotated[str | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Needed only if the run's network is a function of your own (module:function): its name, which
    allows its code to run."""


# train


def run_train(command: TrainCommand, console: Console) -> int:
    """Train, print a dry run's plan, or find a learning rate; return the exit code."""
    config = with_channels(Train(**{f.name: getattr(command, f.name) for f in fields(Train)}))
    if command.dry_run:
        if os.environ.get("RANK", "0") == "0":  # torchrun starts several processes
            _print_plan(config, plan(config), console)
        return 0
    if command.find_lr:
        return run_find_lr(config, command.find_lr_steps, console)
    code = train(config, console)
    exit_if_distributed(code)
    return code


@dataclass(frozen=True)
class Plan:
    """The figures of a planned run. Memory is an estimate per process."""

    parameters: int
    train_images: int
    val_images: int
    classes: int
    steps_per_epoch: int
    steps: int
    device: str
    state_mib: float  # parameters, gradients, momentum
    activations_mib: float  # saved for backward
    resumes: bool

    @property
    def memory_mib(self) -> float:
        return self.state_mib + self.activations_mib


def plan(config: Train) -> Plan:
    """Compute the plan of a run without decoding images, training or writing."""
    resumes = (config.out / CONFIG).exists()
    if resumes:
        check_unchanged(config, load_config(config.out)[0])
    sources = open_sources(config)
    device = choose_device(config.device)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    with torch.device("meta"):  # shapes only
        model = build_network(config, len(sources.train.classes)).to("meta")
    parameters = sum(p.numel() for p in model.parameters())
    state = state_bytes(config, parameters, processes)
    dtype = choose_autocast(config.precision, device) or torch.float32
    images = -(-config.batch_size // (processes * config.accumulate))
    shape = (images, config.in_channels, *config.sample_size)
    inputs = torch.empty(shape, device="meta", dtype=dtype)
    steps = -(-len(sources.train) // config.batch_size)
    return Plan(
        parameters=parameters,
        train_images=len(sources.train),
        val_images=len(sources.val),
        classes=len(sources.train.classes),
        steps_per_epoch=steps,
        steps=steps * config.epochs,
        device=device.type,
        state_mib=state / MIB,
        activations_mib=saved_bytes(model.to(dtype), inputs) / MIB,
        resumes=resumes,
    )


def _print_plan(config: Train, plan: Plan, console: Console) -> None:
    rows = {
        "model": f"{config.model}, norm {config.norm}, width {config.width:g}",
        "parameters": f"{plan.parameters:,}",
        "data": f"{config.data}: {plan.train_images} training images, {plan.val_images} validation "
        f"images, {format_size(config.sample_size)}, {plan.classes} classes",
        "batch size": f"{config.batch_size}",
        "optimizer": _optimizer_text(config),
        "steps": f"{plan.steps_per_epoch} per epoch, {plan.steps:,} in {config.epochs} epochs",
        "memory": f"about {plan.memory_mib:,.0f} MiB: {plan.state_mib:,.0f} for parameters, "
        f"gradients and momentum, {plan.activations_mib:,.0f} for activations",
        "device": plan.device,
        "run folder": f"{config.out} ({'resumed' if plan.resumes else 'new'})",
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, escape(value))
    if not console.is_terminal:
        console.width = 200  # do not wrap lines in a log
    console.print(table)


def _optimizer_text(config: Train) -> str:
    """Return "SGD, lr 0.08 (cosine), momentum 0.9"."""
    lr = f"lr {config.learning_rate:g}{_schedule_text(config)}"
    return (
        f"AdamW, {lr}"
        if config.optimizer == "adamw"
        else (f"SGD, {lr}, momentum {config.momentum:g}")
    )


def _schedule_text(config: Train) -> str:
    """Return what follows the learning rate: " (cosine, 5 epochs of warm-up)"."""
    parts: list[str] = [] if config.schedule == "constant" else [config.schedule]
    if config.warmup_epochs:
        parts.append(f"{config.warmup_epochs:g} epochs of warm-up")
    return f" ({', '.join(parts)})" if parts else ""


# eval


def run_eval(command: Eval, console: Console) -> int:
    """Evaluate a checkpoint and print its errors. Return the exit code."""
    config = check_code(load_config(command.run)[0], command.run, command.model)
    for name in ("data_root", "val_limit"):
        if getattr(command, name) is not None:
            config = replace(config, **{name: getattr(command, name)})
    source = open_samples(config, "val", config.val_limit)
    matrix = evaluate_checkpoint(
        config,
        build_model(config, len(source.classes)),
        source,
        command.checkpoint,
        choose_device(command.device),
        console,
        command.batch_size,
    )
    samples = "crops" if len(config.sample_size) == 3 else "images"
    heading, values = "IoU %", matrix.class_iou
    result = f"pixel error {matrix.pixel_error:.2%}, mean IoU {matrix.mean_iou:.3f}"
    if config.task == "classification":
        heading, values = "error %", matrix.class_error
        result = f"error {matrix.pixel_error:.2%}"
    table = Table("class", heading)
    table.columns[1].justify = "right"
    for name, value in zip(source.classes, values.tolist(), strict=True):
        table.add_row(escape(name), "-" if value != value else f"{100 * value:.2f}")
    console.print(table)
    console.print(
        f"{escape(str(command.run / command.checkpoint))} on {len(source)} {samples}: {result}",
        highlight=False,
        soft_wrap=True,
    )
    return 0
