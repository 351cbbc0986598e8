"""A run made ready: everything that a configuration names, built, and put back where it was."""

import itertools
import math
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ... import __version__
from ...step import TrainingStep
from .. import runfolder
from ..data import Batch, Batches
from ..optim import sgd
from ..runfolder import BEST, LAST, PREVIOUS
from .build import build_data, build_model, build_objective, fit_to_images_, open_sources
from .checkpoint import CheckpointError, is_whole, load_last
from .config import CONFIG, Train, check_unchanged, load_config, save_config
from .devices import choose_autocast, machine
from .distributed import Group, shard_
from .events import Events
from .fingerprint import Fingerprints, check_same_data, fingerprints
from .guard import Gauge, Guard
from .interrupts import Interrupts, Stopped
from .objective import Objective
from .progress import Show
from .saving import Position, Saver, restore
from .watch import Watch

# Steps between two looks at the loss, the signals and the other processes. On a GPU they are not
# each looked at, so that Python never waits for it.
LOOK_EVERY = {"cpu": 1, "cuda": 16}


@dataclass
class Run:
    """All that the loop works with, and where it stands."""

    config: Train
    group: Group
    show: Show
    interrupts: Interrupts
    model: nn.Module  # not wrapped: what is saved and evaluated
    optimizer: torch.optim.Optimizer
    step: TrainingStep
    objective: Objective
    gauge: Gauge
    train: Batches
    val: Batches
    position: Position
    saver: Saver
    watch: Watch
    events: Events | None  # of the process that leads

    def __post_init__(self) -> None:
        self.first_step = self.steps_done  # of this process's steps
        self.closing_seconds = 0.0  # taken by the last epoch's evaluation and what follows it
        self.loss_sum = torch.tensor(
            self.position.loss_sum, dtype=torch.float64, device=self.group.device
        )

    @property
    def steps_done(self) -> int:
        """In the whole run."""
        return max(self.position.epoch, 0) * len(self.train) + self.position.step

    @property
    def images_left(self) -> int:
        """To be seen until the end of the run."""
        epochs = self.config.epochs - self.position.epoch
        return epochs * len(self.train.cache) - self.position.images

    def work_left(self, images_per_s: float) -> int:
        """In images: with the evaluations, as what would be trained on in their time."""
        evaluations = self.config.epochs - self.position.epoch
        return self.images_left + round(evaluations * self.closing_seconds * images_per_s)

    @property
    def looks(self) -> bool:
        """Whether it is time to look at what happened."""
        step = self.position.step
        return step % LOOK_EVERY[self.group.device.type] == 0 or step == len(self.train)

    def saves_after(self, epoch: int) -> bool:
        """Whether an epoch ends in a checkpoint."""
        return epoch % self.config.save_epochs == 0 or epoch == self.config.epochs

    def where(self) -> str:
        """What is trained, and from where on."""
        config, device = self.config, self.group.device
        numbers = "fp32" if self.step.autocast is None else "bf16"
        processes = f", {self.group.world} processes" if self.group.world > 1 else ""
        at = "from the start"
        if self.position.epoch >= 0:
            at = f"continued after epoch {self.position.epoch}, step {self.position.step}"
        return (
            f"{config.out}: {config.model} {config.norm} on {len(self.train.cache)} images of "
            f"{config.data}, {len(self.train)} steps an epoch, rate {config.rate:g}, "
            f"{device.type} {numbers}{processes}; {at}"
        )

    def targets(self, batch: Batch, images: int) -> tuple[Tensor, ...]:
        """What the loss takes beside the outputs, for a batch of so many images over all."""
        targets = self.objective.targets(batch)
        if self.group.world == 1:
            return targets
        return (*targets, self.group.shares(batch.labels, images))

    def stop_if_asked(self) -> None:
        """Stopped, in all processes at once, if one of them got a signal."""
        signum = self.group.highest(self.interrupts.signum)
        if signum:
            raise Stopped(signum)

    def enter_next_epoch(self, error: float) -> None:
        """The epoch at hand is written down, with this error."""
        position = self.position
        position.epoch += 1
        position.step = position.images = 0
        position.seconds = position.loss_sum = 0.0
        self.loss_sum.zero_()
        if position.epoch < 1 or not self.saves_after(position.epoch):
            return
        if error < position.best_error:
            position.best_error, position.best_epoch = error, position.epoch


def keep_records(run: Path) -> str:
    """Put aside what a run has written that was over and has no checkpoint; says so in a line."""
    count = next(
        n for n in itertools.count(1) if not (run / f"{runfolder.METRICS}.old{n}").exists()
    )
    for name in (runfolder.LAYERS, runfolder.DIVERGED, runfolder.METRICS):
        if (run / name).exists():
            (run / name).replace(run / f"{name}.old{count}")
    return (
        f"it was over and has no checkpoint: it begins anew, and what it had written is in "
        f"{runfolder.METRICS}.old{count} and beside it"
    )


def images_in(batches: Batches, number: int) -> int:
    """Images in batch `number` of an epoch, over all processes: the last may have fewer."""
    return min(batches.batch_size, len(batches.cache) - number * batches.batch_size)


@contextmanager
def open_run(config: Train, group: Group, show: Show, noted: Interrupts) -> Iterator[Run]:
    """Build what the configuration names and go to where the run folder's checkpoint is."""
    before: dict[str, Any] = {}
    epochs_before = config.epochs
    if (config.out / CONFIG).exists():
        started, before = load_config(config.out)
        check_unchanged(config, started)
        epochs_before = started.epochs
    elif any((config.out / name).exists() for name in (LAST, PREVIOUS)):
        raise CheckpointError(
            f"{config.out} has a checkpoint and no {CONFIG}, which would say of what run it is: "
            "put it back, or choose another --out"
        )
    sources = open_sources(config)

    def decoding(name: str, done: int, total: int) -> None:
        show.decoding(name, done, total)
        noted.raise_if_any()  # it can take minutes

    train, val = build_data(config, sources, group, decoding)
    if not val.cache.histogram.any():
        raise ValueError(f"{val.cache.name}: no pixel has a label, so nothing could be evaluated")
    data = group.from_first(fingerprints(train, val) if group.leads else {})
    check_same_data(config.out, data, before)
    model = build_model(config, len(sources.train.classes))
    fit_to_images_(model, config, train.cache)
    model.to(group.device)
    if group.device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wrapped = wrap(model, config, group)
    optimizer = sgd(model.parameters(), config.rate, config.momentum, sharded=config.fsdp)
    # One process reads it for all: on other machines the folder may look older than it is.
    checkpoint = group.from_first(load_last(config.out, show.say) if group.leads else None)
    position = Position()
    if checkpoint is not None:
        position = restore(checkpoint, model, optimizer, group)
        if position.step > len(train):  # all steps may be done, and the evaluation not yet
            raise CheckpointError(f"no step {position.step} in an epoch of {len(train)}")
        if position.epoch > config.epochs:
            raise ValueError(
                f"{config.out} has done {position.epoch} epochs, more than --epochs {config.epochs}"
            )
        best_is_there = group.from_first(is_whole(config.out / BEST) if group.leads else None)
        if position.best_epoch > 0 and not best_is_there:
            to_come = "the best of the epochs to come takes its place"
            none = "and no epoch is left to take its place"
            show.say(
                f"{BEST} is gone or damaged: {to_come if position.epoch < config.epochs else none}"
            )
            position.best_error, position.best_epoch = math.inf, -1
    guard = Guard(optimizer, group)
    objective = build_objective(config, train.cache, group.device)
    autocast = choose_autocast(config.precision, group.device)
    # What several processes do together is neither captured nor compiled.
    engine = "eager" if group.world > 1 or config.fsdp else config.engine

    def before_update(loss: Tensor) -> Tensor:
        loss = guard(loss)
        if config.clip_grad_norm is not None:  # a norm that overflows leaves nothing of it
            clip_grad_norm_(model.parameters(), config.clip_grad_norm)
        return loss

    step = TrainingStep(wrapped, objective.loss, optimizer, engine, autocast, before_update)
    events = None
    if group.leads:
        of_run = derived(config, model, train, val, data)
        written = config.out / runfolder.METRICS
        was_over = (config.out / runfolder.DIVERGED).exists() and written.exists()
        if checkpoint is None and (was_over or runfolder.last_epoch(written) >= epochs_before):
            show.say(keep_records(config.out))  # before config.json says something else of it
        save_config(config, of_run, about(machine(group.device, autocast)))
        for name in (runfolder.METRICS, runfolder.LAYERS):
            runfolder.truncate_records(config.out / name, position.epoch)
        (config.out / runfolder.DIVERGED).unlink(missing_ok=True)  # it is tried again
        events = Events(config.out, position.epoch + 1, show.say)
    saver = Saver(config.out)
    try:
        yield Run(
            config=config,
            group=group,
            show=show,
            interrupts=noted,
            model=model,
            optimizer=optimizer,
            step=step,
            objective=objective,
            gauge=Gauge(guard),
            train=train,
            val=val,
            position=position,
            saver=saver,
            watch=Watch(model),
            events=events,
        )
    finally:
        saver.close()
        if events is not None:
            events.close()


def wrap(model: nn.Module, config: Train, group: Group) -> nn.Module:
    """The model as several processes train it: replicated, or sharded."""
    if config.fsdp and not torch.distributed.is_initialized():
        raise ValueError("--fsdp shards over processes: start them with torchrun")
    if config.engine.startswith("compile") and group.world > 1:
        raise ValueError(f"--engine {config.engine} is for one process: choose eager or graph")
    if config.fsdp:
        return shard_(model, group)
    return DistributedDataParallel(model) if group.world > 1 else model


def derived(
    config: Train, model: nn.Module, train: Batches, val: Batches, data: Fingerprints
) -> Mapping[str, Any]:
    """What follows from the configuration and the data, for those who read the run folder."""
    return {
        "lr": config.rate,
        "parameters": sum(p.numel() for p in model.parameters()),
        "classes": list(train.cache.classes),
        "colours": [list(color) for color in train.cache.palette],
        "steps_per_epoch": len(train),
        "train_images": len(train.cache),
        "image_size": list(train.cache.size),  # of which training sees crops of config's size
        "val_images": len(val.cache),
        "fingerprints": data,
    }


def about(made_on: str) -> Mapping[str, Any]:
    """By which code a run is made, and on what."""
    versions = {
        "deepcontrol": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return {"versions": versions, "commit": commit(), "machine": made_on}


def commit() -> str | None:
    """The commit that this code lies at, if it lies in a repository of its own."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # there is no git
        return None
    return found.stdout.strip() or None
