"""Prepare a run: build everything from its configuration, and resume from its checkpoint."""

import math
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ... import __version__
from ...nn import param_groups
from ...step import TrainingStep
from ..data import Batch, Batches, Source
from ..data.folder import FolderSource
from ..folders import records, runfolder
from ..folders.json_files import read_bytes
from ..folders.runfolder import BEST, CONFIG, LAST, PREVIOUS
from ..folders.runlock import RunLock, lock
from ..optim import adamw, scheduled_lr, set_lr, sgd
from .build import (
    Data,
    Fingerprints,
    Objective,
    Sources,
    build_data,
    build_model,
    build_objective,
    check_same_data,
    fingerprints,
    open_sources,
    scale_to_images_,
)
from .checkpoint import CheckpointError, CheckpointWriter, check_config, is_intact, load_last
from .config import Train, check_unchanged, load_config, save_config, spelled_as
from .distributed import Group, choose_autocast, describe_machine, shard_
from .ema import MovingAverage, evaluated_model
from .faults import Guard, GuardReader
from .interrupts import Interrupts, Stopped
from .layer_stats import LayerStats
from .memory import check_memory
from .progress import Display, Events
from .sheets import sample_name
from .snapshot import Position, restore

# Steps between two checks of loss, signals and other processes. A check after every step would
# make Python wait for a GPU.
CHECK_EVERY = {"cpu": 1, "cuda": 16}


@dataclass
class TrainingRun:
    """Everything the training loop works with, and its position."""

    config: Train
    group: Group
    display: Display
    interrupts: Interrupts
    model: nn.Module  # without DDP's wrapper
    optimizer: torch.optim.Optimizer
    step: TrainingStep
    objective: Objective
    guard_reader: GuardReader
    train: Batches
    val: Batches
    position: Position
    writer: CheckpointWriter
    layer_stats: LayerStats
    events: Events | None  # only in the main process
    lock: RunLock | None = None  # only in the main process
    average: MovingAverage | None = None  # of the weights
    val_source: Source | None = None

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.first_step = self.steps_done  # steps done before this process started
        self.lr: float | None = None  # set by a schedule
        self.eval_seconds = 0.0  # duration of the last evaluation, with records and pictures
        self.loss_sum = torch.tensor(
            self.position.loss_sum, dtype=torch.float64, device=self.group.device
        )

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated and saved: the moving average, if there is one."""
        return evaluated_model(self.model, self.average)

    @property
    def steps_done(self) -> int:
        """Steps since the start of the run, over all resumptions."""
        return max(self.position.epoch, 0) * len(self.train) + self.position.step

    @property
    def is_check_step(self) -> bool:
        """Whether to check loss, signals and other processes after this step."""
        step = self.position.step
        return step % CHECK_EVERY[self.group.device.type] == 0 or step == len(self.train)

    def images_left(self, images_per_s: float) -> int:
        """Return the images until the end; evaluations count by their duration."""
        epochs = self.config.epochs - self.position.epoch
        images = epochs * len(self.train.cache) - self.position.images
        return images + round(epochs * self.eval_seconds * images_per_s)

    def saves_after(self, epoch: int) -> bool:
        """Return whether an epoch ends with a checkpoint."""
        return epoch % self.config.save_epochs == 0 or epoch == self.config.epochs

    def draws_after(self, epoch: int) -> bool:
        """Return whether pictures are drawn after an epoch. The last one is drawn with others."""
        drawn = self.config.sample_epochs
        return epoch in drawn or (bool(drawn) and epoch == self.config.epochs)

    def sample_name(self, index: int) -> str:
        """Return the file name of a validation image, or its number."""
        return f"image {index}" if self.val_source is None else sample_name(self.val_source, index)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step of the run, a function of the configuration."""
        config, per_epoch = self.config, len(self.train)
        return scheduled_lr(
            config.learning_rate,
            step,
            config.epochs * per_epoch,
            round(config.warmup_epochs * per_epoch),
            config.schedule,
        )

    def set_lr(self) -> None:
        """Set the learning rate of the next step, if a schedule changes it."""
        if has_schedule(self.config):
            lr = self.lr_at(self.steps_done)
            if lr != self.lr:
                set_lr(self.optimizer, lr)
                self.lr = lr

    def describe(self) -> str:
        """Return the line printed when training starts or resumes."""
        config, device = self.config, self.group.device
        precision = "fp32" if self.step.autocast is None else "bf16"
        processes = f", {self.group.world_size} processes" if self.group.world_size > 1 else ""
        start = "starting"
        if self.position.epoch >= 0:
            start = f"resuming after epoch {self.position.epoch}, step {self.position.step}"
        return (
            f"{config.out}: {config.model} {config.norm} on {len(self.train.cache)} images of "
            f"{config.data}, {len(self.train)} steps per epoch, lr {config.learning_rate:g}, "
            f"{device.type} {precision}{processes}; {start}"
        )

    def targets(self, batch: Batch, images: int, parts: int = 1) -> tuple[Tensor, ...]:
        """Return the loss's arguments after the outputs.

        Args:
            batch: This process's part of the batch.
            images: Number of images in the batch over all processes.
            parts: Parts into which a training step splits it.
        """
        targets = self.objective.targets(batch)
        parts = min(parts, len(batch.labels))
        if self.group.world_size == 1 and parts == 1:
            return targets
        ignored = self.objective.ignored_label
        return (*targets, self.group.loss_scales(batch.labels, images, ignored, parts))

    def reason_to_stop(self, epoch_seconds: float) -> str | None:
        """Return why the run stops before the next epoch, or None. A collective call.

        Args:
            epoch_seconds: Duration of the last epoch with its evaluation; 0 before the first one of
                this process, which is always trained.
        """
        config, position = self.config, self.position
        since = position.epoch - max(position.best_epoch, 0)
        if config.patience is not None and position.epoch and since >= config.patience:
            return (
                f"the lowest error is {since} epochs old (--patience {config.patience}, epoch "
                f"{max(position.best_epoch, 0)})"
            )
        if config.minutes is not None:
            elapsed = time.monotonic() - self.started
            late = epoch_seconds > 0 and elapsed + epoch_seconds > 60 * config.minutes
            if self.group.max(int(late)):
                return f"another epoch would not end within --minutes {config.minutes:g}"
        return None

    def check_lock(self) -> None:
        """Raise LockLostError if the run folder was moved or its lock deleted."""
        if self.lock is not None:
            self.lock.check()

    def stop_if_asked(self) -> None:
        """Raise Stopped in all processes if one of them received a signal."""
        signum = self.group.max(self.interrupts.signum)
        if signum:
            raise Stopped(signum)

    def advance_epoch(self, error: float) -> None:
        """Move to the next epoch, after the current one was recorded with this error."""
        position = self.position
        position.epoch += 1
        position.step = position.images = 0
        position.seconds = position.loss_sum = 0.0
        self.loss_sum.zero_()
        if position.epoch < 1 or not self.saves_after(position.epoch):
            return
        if error < position.best_error:
            position.best_error, position.best_epoch = error, position.epoch


def images_in_batch(batches: Batches, index: int) -> int:
    """Return the images in a batch over all processes. The last batch may be smaller."""
    return min(batches.batch_size, len(batches.cache) - index * batches.batch_size)


@contextmanager
def claim_folder(config: Train) -> Iterator[RunLock]:
    """Lock a run folder, and write config.json first if the folder holds no run.

    A run that is killed while it decodes its data can so be resumed without flags. If this process
    fails before the run is set up, it removes both files: the next start may have other settings.

    Raises:
        RunInUseError: Another process trains in the folder.
        CheckpointError: The folder has a lock or a checkpoint without config.json.
    """
    path, is_ours = config.out / CONFIG, False

    def prepare(is_new: bool) -> None:
        nonlocal is_ours
        if path.exists():
            return
        found = [name for name in (LAST, PREVIOUS) if (config.out / name).exists()]
        if found or not is_new:
            thing = "checkpoint" if found else "lock file"
            raise CheckpointError(
                f"{config.out} has a {thing} but no {CONFIG}, so the settings of its run are "
                "unknown; restore the file, remove the folder, or choose another --out"
            )
        save_config(config, {}, {})
        is_ours = True

    with lock(config.out, prepare) as held:
        try:
            yield held
        except Exception as error:
            if is_ours and held.is_valid and not isinstance(error, Stopped):
                with suppress(OSError, ValueError):
                    if not load_config(config.out)[1]:  # without derived values
                        path.unlink()
                        held.remove()
            raise


@contextmanager
def open_run(
    config: Train,
    group: Group,
    display: Display,
    interrupts: Interrupts,
    held: RunLock | None = None,
) -> Iterator[TrainingRun]:
    """Build a run and restore its checkpoint, if the run folder has one.

    Args:
        config: Configuration of the run.
        group: The processes that train.
        display: For messages.
        interrupts: Signals that stop the decoding of images.
        held: The folder's lock, in the main process. It is checked at every save.

    Raises:
        ConfigChangedError: The folder holds a run with other settings or other data.
        CheckpointError: No checkpoint can be read, or it does not match the run.
    """
    before, derived_before = load_started_config(config)
    if before is not None:
        config = spelled_as(before, config)
    sources = open_sources(config)
    check_memory(config, sources.train, group.device, group.world_size)
    train, val = _load_data(config, sources, group, display, interrupts)
    data = group.broadcast(fingerprints(train, val) if group.is_main else {})
    check_same_data(config.out, data, derived_before)

    model = build_model(config, len(sources.train.classes))
    scale_to_images_(model, config, train.cache)
    model.to(group.device)
    if group.device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wrapped = _wrap(model, config, group)
    optimizer = build_optimizer(config, model, group)
    average = None if config.ema is None else MovingAverage(model, optimizer, config.ema)
    position = _resume(config, model, optimizer, group, display, len(train), average)
    guard = Guard(optimizer, group)
    objective = build_objective(config, train.cache, group.device)
    autocast = choose_autocast(config.precision, group.device)
    # Steps with collective operations are neither captured nor compiled.
    engine = "eager" if group.world_size > 1 or config.fsdp else config.engine

    def before_update(loss: Tensor) -> Tensor:
        loss = guard(loss)
        if config.clip_grad_norm is not None:
            # Finite gradients with a norm that overflows are clipped to zero.
            clip_grad_norm_(model.parameters(), config.clip_grad_norm)
        return loss

    step = TrainingStep(
        wrapped, objective.loss, optimizer, engine, autocast, before_update, config.accumulate
    )
    events, kept = None, b""
    if group.is_main:
        if position is None and is_finished(config.out, (before or config).epochs):
            display.log(archive_records(config.out))  # before config.json changes
        machine = describe_machine(group.device, autocast)
        if position is not None and (note := changed_threads(config.out, group.device)):
            display.log(note)
        derived = derived_values(config, model, train, val, data)
        save_config(config, derived | derived_from_source(sources.train), about(machine))
        epoch = -1 if position is None else position.epoch
        for name in (runfolder.METRICS, runfolder.LAYERS):
            for message in records.truncate_records(config.out / name, epoch):
                display.log(message)
        (config.out / runfolder.DIVERGED).unlink(missing_ok=True)  # the run is retried
        events = Events(config.out, epoch + 1, display.log)
        kept = (config.out / CONFIG).read_bytes()
    check = held.check if held is not None else lambda: None
    writer = CheckpointWriter(config.out, kept, check)
    try:
        yield TrainingRun(
            config=config,
            group=group,
            display=display,
            interrupts=interrupts,
            model=model,
            optimizer=optimizer,
            step=step,
            objective=objective,
            guard_reader=GuardReader(guard),
            train=train,
            val=val,
            position=Position() if position is None else position,
            writer=writer,
            layer_stats=LayerStats(evaluated_model(model, average)),
            events=events,
            lock=held,
            average=average,
            val_source=sources.val,
        )
    finally:
        writer.close()
        if events is not None:
            events.close()


def has_schedule(config: Train) -> bool:
    """Return whether the learning rate changes in the course of a run."""
    return config.schedule != "constant" or config.warmup_epochs > 0


def build_optimizer(config: Train, model: nn.Module, group: Group) -> torch.optim.Optimizer:
    """Return the optimizer of a run."""
    parameters: Any = model.parameters()
    if config.weight_decay:
        parameters = param_groups(model, config.weight_decay)
    lr: float | Tensor = config.learning_rate
    if has_schedule(config) and group.device.type == "cuda" and not config.fsdp:
        lr = torch.tensor(lr, device=group.device)  # a captured step reads it at every replay
    if config.optimizer == "adamw":
        return adamw(parameters, lr, on_gpu=group.device.type == "cuda")
    return sgd(parameters, lr, config.momentum, sharded=config.fsdp)


def load_started_config(config: Train) -> tuple[Train | None, dict[str, Any]]:
    """Return the configuration and derived values of the run in the folder, if there is one."""
    if (config.out / CONFIG).exists():
        before, derived = load_config(config.out)
        check_unchanged(config, before)
        kept = next((n for n in (LAST, PREVIOUS) if (config.out / n / CONFIG).is_file()), None)
        if kept is not None:  # before the data are decoded; `_resume` checks what it loads
            check_config(config.out, kept, read_bytes(config.out / kept / CONFIG))
        return before, derived
    return None, {}


def _load_data(
    config: Train, sources: Sources, group: Group, display: Display, interrupts: Interrupts
) -> Data:
    def progress(name: str, done: int, total: int) -> None:
        display.decoding(name, done, total)
        interrupts.raise_if_any()  # decoding can take minutes

    data = build_data(config, sources, group, progress)
    labeled = "image" if config.task == "classification" else "pixel"
    for batches, lacks in ((data.train, "nothing to learn"), (data.val, "no error")):
        if not batches.cache.histogram.any():
            raise ValueError(
                f"{batches.cache.name}: no {labeled} has a label, so there is {lacks}. See "
                f"`deepcontrol data check {config.data_root}`."
            )
    return data


def _wrap(model: nn.Module, config: Train, group: Group) -> nn.Module:
    """Wrap the model in DDP or shard it with FSDP, if several processes train."""
    if config.fsdp and not torch.distributed.is_initialized():
        raise ValueError("--fsdp needs several processes; start them with torchrun")
    if config.engine.startswith("compile") and group.world_size > 1:
        raise ValueError(f"--engine {config.engine} needs a single process; use eager or graph")
    if config.fsdp:
        return shard_(model, group)
    return DistributedDataParallel(model) if group.world_size > 1 else model


def _resume(
    config: Train,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    display: Display,
    steps_per_epoch: int,
    average: MovingAverage | None,
) -> Position | None:
    """Restore the last checkpoint and return its position, or None if there is none."""
    # Only the main process reads it: network file systems may show other machines an older one.
    checkpoint = None
    if group.is_main and (found := load_last(config.out, display.log)) is not None:
        name, checkpoint = found
        check_config(config.out, name, checkpoint.config)
    checkpoint = group.broadcast(checkpoint)
    if checkpoint is None:
        return None
    position = restore(checkpoint, evaluated_model(model, average), optimizer, group)
    if average is not None:
        average.restore(checkpoint.state.get("average"))
    if position.step > steps_per_epoch:  # equal if the run stopped before its evaluation
        raise CheckpointError(
            f"the checkpoint is at step {position.step}, but an epoch has {steps_per_epoch} steps"
        )
    if position.epoch > config.epochs:
        raise ValueError(
            f"{config.out} has done {position.epoch} epochs, more than --epochs {config.epochs}"
        )
    has_best = group.broadcast(is_intact(config.out / BEST) if group.is_main else None)
    if position.best_epoch > 0 and not has_best:
        outlook = "no epoch is left to replace it"
        if position.epoch < config.epochs:
            outlook = "the best of the remaining epochs will replace it"
        display.log(f"checkpoint {BEST} is missing or damaged; {outlook}")
        position.best_error, position.best_epoch = math.inf, -1
    return position


def changed_threads(run: Path, device: torch.device) -> str:
    """Return a note if a run on a CPU resumes with another number of threads, else "".

    Sums are split over the threads, so that their last bits depend on the number.
    """
    before = re.search(r", (\d+) threads, ", str(runfolder.read_config(run).get("machine")))
    now = torch.get_num_threads()
    if device.type != "cpu" or before is None or int(before[1]) == now:
        return ""
    return (
        f"this run used {before[1]} threads before, and {now} now: its results may differ in the "
        f"last bits from those of an uninterrupted run. For the same bits, set OMP_NUM_THREADS="
        f"{before[1]}."
    )


def is_finished(run: Path, epochs: int) -> bool:
    """Return whether a run has diverged or recorded all its epochs."""
    metrics = run / runfolder.METRICS
    diverged = (run / runfolder.DIVERGED).exists() and metrics.exists()
    return diverged or records.last_epoch(metrics) >= epochs


def archive_records(run: Path) -> str:
    """Rename the records of a finished run without a checkpoint; return a log line."""
    kept = records.unused_name(run / runfolder.METRICS, "old")
    for name in (runfolder.LAYERS, runfolder.DIVERGED, runfolder.METRICS):
        if (run / name).exists():
            (run / name).replace(run / f"{name}{kept.suffix}")
    return (
        "Run is finished but has no checkpoint; restarting it. "
        f"Its records are kept as {kept.name} etc."
    )


def derived_values(
    config: Train, model: nn.Module, train: Batches, val: Batches, data: Fingerprints
) -> dict[str, Any]:
    """Return the values that config.json holds in addition to the configuration."""
    return {
        "task": config.task,
        "lr": config.learning_rate,
        "parameters": sum(p.numel() for p in model.parameters()),
        "classes": list(train.cache.classes),
        "colors": [list(color) for color in train.cache.palette],
        "steps_per_epoch": len(train),
        "train_images": len(train.cache),
        "image_size": list(train.cache.size),  # before cropping to the training size
        "val_images": len(val.cache),
        "fingerprints": data,
    }


def derived_from_source(source: Source) -> dict[str, Any]:
    """Return the values that `deepcontrol predict` needs to read images as the source does."""
    if not isinstance(source, FolderSource) or source.class_file.value_range is None:
        return {}
    return {"value_range": list(source.class_file.value_range)}


def about(machine: str) -> Mapping[str, Any]:
    """Return the versions, the commit and the machine of this process."""
    versions = {
        "deepcontrol": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return {"versions": versions, "commit": _commit(), "machine": machine}


def _commit() -> str | None:
    """Return the commit of this code, if it is in a git repository."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    return found.stdout.strip() or None
