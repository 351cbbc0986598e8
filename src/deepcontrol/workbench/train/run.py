"""A training run in progress: all that the loop uses, its position, and signals."""

import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...step import TrainingStep
from ..data import Batch, BatchStream, DatasetSplit, Source
from ..folders.runfolder import RunLock
from ..optim import scheduled_lr, set_lr
from .checkpoint import CheckpointWriter
from .config import Train
from .distributed import Group
from .evaluate import LayerStats, MovingAverage, evaluated_model
from .faults import GuardReader
from .objective import Objective
from .progress import Display, Events, sample_name
from .snapshot import Position

# Signals


SHOW_CURSOR = "\x1b[?25h"  # progress bars hide it


class Stopped(Exception):  # noqa: N818 (not an error)
    """A signal asked the run to stop, and the current step is finished."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The shell's convention: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signum


class Interrupts:
    """Record the first signal; `signum` is 0 until one arrives."""

    def __init__(self) -> None:
        self.signum = 0

    def raise_if_any(self) -> None:
        """Raise Stopped if a signal has arrived."""
        if self.signum:
            raise Stopped(self.signum)

    def handle(self, signum: int, frame: types.FrameType | None) -> None:
        del frame
        if signum == signal.SIGINT and self.signum:
            if sys.stdout.isatty():
                sys.stdout.write(SHOW_CURSOR + "\n")
                sys.stdout.flush()
            # No cleanup and no waiting for a checkpoint in progress: the previous one is intact.
            os._exit(128 + signum)
        self.signum = self.signum or signum


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Handle both signals while the block runs. Only a main thread receives signals."""
    received = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {s: signal.signal(s, received.handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# The run


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
    train: BatchStream
    val: BatchStream
    position: Position
    writer: CheckpointWriter
    layer_stats: LayerStats
    events: Events | None  # only in the main process
    lock: RunLock | None = None  # only in the main process
    average: MovingAverage | None = None  # moving average of the weights
    val_source: Source | DatasetSplit | None = None

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
        images = epochs * len(self.train.dataset) - self.position.images
        return images + round(epochs * self.eval_seconds * images_per_s)

    def saves_after(self, epoch: int) -> bool:
        """Return whether an epoch ends with a checkpoint."""
        return epoch % self.config.save_epochs == 0 or epoch == self.config.epochs

    def draws_after(self, epoch: int) -> bool:
        """Return whether pictures are drawn after an epoch.

        With any --sample-epochs, also after the last epoch.
        """
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
        steps = f"{len(self.train)} step{'s' * (len(self.train) != 1)} per epoch"
        return (
            f"{config.out}: {config.model} {config.norm} on {len(self.train.dataset)} images of "
            f"{config.data}, {steps}, lr {config.learning_rate:g}, "
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
        # Of equal errors the first one counts: a network that predicts one class has a constant
        # error, while its loss may still fall. Older checkpoints have no lowest_epoch.
        lowest = max(position.lowest_epoch, 0) or max(position.best_epoch, 0)
        since = position.epoch - lowest
        if config.patience is not None and position.epoch and since >= config.patience:
            return (
                f"the lowest error is {since} epochs old (--patience {config.patience}, epoch "
                f"{lowest})"
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

    def advance_epoch(self, error: float, loss: float) -> None:
        """Move to the next epoch, after the current one was recorded.

        `error` and `loss` are its validation metrics. Of epochs with the same error, the one with
        the lowest loss is the best: with few validation images many epochs have the same error.
        """
        position = self.position
        position.epoch += 1
        position.step = position.images = 0
        position.seconds = position.loss_sum = 0.0
        self.loss_sum.zero_()
        if position.epoch < 1 or not self.saves_after(position.epoch):
            return
        if error < position.best_error:
            position.lowest_epoch = position.epoch
        if (error, loss) < (position.best_error, position.best_loss):
            position.best_error, position.best_loss = error, loss
            position.best_epoch = position.epoch


def images_in_batch(batches: BatchStream, index: int) -> int:
    """Return the images in a batch over all processes. The last batch may be smaller."""
    return min(batches.batch_size, len(batches.dataset) - index * batches.batch_size)


def has_schedule(config: Train) -> bool:
    """Return whether the learning rate changes in the course of a run."""
    return config.schedule != "constant" or config.warmup_epochs > 0
