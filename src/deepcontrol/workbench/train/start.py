"""Start a run: lock its folder, build it from settings, restore its checkpoint."""

import math
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ... import __version__
from ...nn import GEMS, param_groups
from ...step import TrainingStep
from ..data import BatchStream, DatasetSplit, Source
from ..data.folder import FolderSource
from ..data.volumes import VolumeSplit
from ..folders import runfolder, storage
from ..folders.runfolder import BEST, CONFIG, LAST, PREVIOUS, RunLock, lock
from ..folders.storage import read_bytes
from ..optim import adamw, scale_lr, sgd
from .build import add_noise_, build_model, lambdas, move_, scale_to_images_
from .checkpoint import CheckpointError, CheckpointWriter, check_config, is_intact, load_last
from .config import Train
from .config_file import check_unchanged, load_config, save_config, spelled_as
from .data import (
    Data,
    Fingerprints,
    Sources,
    build_data,
    check_same_data,
    fingerprints,
    open_sources,
)
from .diagnosis import check_memory
from .distributed import Group, choose_autocast, describe_machine, shard_
from .evaluate import LayerStats, MovingAverage, evaluated_model
from .faults import Guard, GuardReader
from .objective import build_objective
from .progress import Display, Events
from .run import Interrupts, Stopped, TrainingRun, has_schedule
from .snapshot import Position, restore


@contextmanager
def claim_folder(config: Train) -> Iterator[RunLock]:
    """Lock a run folder, and write config.json first if the folder holds no run.

    So a run that is killed while it decodes its data can be resumed without flags. If this process
    fails before the run is set up, it removes both files, and the folder if it created it, so that
    the next start may have other settings.

    Raises:
        RunInUseError: Another process trains in the folder.
        CheckpointError: The folder has a lock or a checkpoint without config.json.
    """
    path, is_ours = config.out / CONFIG, False
    missing = [folder for folder in (config.out, *config.out.parents) if not folder.exists()]

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

    try:
        with lock(config.out, prepare) as held:
            try:
                yield held
            except Exception as error:
                if is_ours and held.is_valid and not isinstance(error, Stopped):
                    _withdraw(config.out, held)
                raise
    except Exception:
        with suppress(OSError):  # another run, or a file that stays
            for folder in missing:
                folder.rmdir()
        raise


def _withdraw(run: Path, held: RunLock) -> None:
    """Remove configuration and lock of a run that was not set up yet."""
    with suppress(OSError, ValueError):
        if not load_config(run)[1]:  # without derived values
            (run / CONFIG).unlink()
            held.remove()


@contextmanager
def open_run(
    config: Train,
    group: Group,
    display: Display,
    interrupts: Interrupts,
    held: RunLock | None = None,
    sources: Sources | None = None,
    model: nn.Module | None = None,
) -> Iterator[TrainingRun]:
    """Build a run and restore its checkpoint, if the run folder has one.

    Args:
        config: Configuration of the run.
        group: The processes that train.
        display: Display for messages.
        interrupts: Signals that stop the decoding of images.
        held: The folder's lock, in the main process. It is checked at every save.
        sources: The data. By default those that the configuration names.
        model: The network, which is trained in place. By default that of the configuration.

    Raises:
        ConfigChangedError: The folder holds a run with other settings or other data.
        CheckpointError: No checkpoint can be read, or it does not match the run.
    """
    before, derived_before = load_started_config(config)
    if before is not None:
        config = spelled_as(before, config)
    sources = open_sources(config) if sources is None else sources
    if model is None:
        check_memory(config, sources.train, group.device, group.world_size)
    train, val = _load_data(config, sources, group, display, interrupts)
    data = group.broadcast(fingerprints(train, val) if group.is_main else {})
    check_same_data(config.out, data, derived_before)

    if model is None:
        model = build_model(config, len(sources.train.classes))
    scale_to_images_(model, config, train)
    move_(model, group.device)
    remove_noise = add_noise_(model, config.noise, config.dropout, config.seed, group.rank)
    wrapped = _wrap(model, config, group)
    optimizer = build_optimizer(config, model, group)
    gems = build_gems(config, model, optimizer)
    average = None if config.ema is None else MovingAverage(model, optimizer, config.ema)
    position = _resume(config, model, optimizer, group, display, train, average)
    guard = Guard(optimizer, group)
    objective = build_objective(config, train.dataset, group.device)
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
        if position is not None and (note := keep_classes(derived, load_config(config.out)[1])):
            display.log(note)
        save_config(config, derived | derived_from_source(sources.train), about(machine))
        kept = (config.out / CONFIG).read_bytes()
        events = _continue_records(config.out, -1 if position is None else position.epoch, display)
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
        remove_noise()  # a network of the user's may be trained again
        if gems is not None:
            gems.remove()
        writer.close()
        if events is not None:
            events.close()


def _continue_records(run: Path, epoch: int, display: Display) -> Events:
    """Drop the records after an epoch, and open the TensorBoard events behind it."""
    for name in (runfolder.METRICS, runfolder.LAYERS):
        for message in storage.truncate_records(run / name, epoch):
            display.log(message)
    (run / runfolder.DIVERGED).unlink(missing_ok=True)  # the run is retried
    return Events(run, epoch + 1, display.log)


def build_optimizer(config: Train, model: nn.Module, group: Group) -> torch.optim.Optimizer:
    """Return the optimizer of a run."""
    parameters: Any = model.parameters()
    if config.weight_decay:
        parameters = param_groups(model, config.weight_decay)
    lr: float | Tensor = config.learning_rate
    if has_schedule(config) and group.device.type == "cuda" and not config.fsdp:
        lr = torch.tensor(lr, device=group.device)  # a captured step reads it at every replay
    if config.lambda_lr != 1:
        groups = parameters if config.weight_decay else [{"params": list(parameters)}]
        parameters = scale_lr(groups, lr, lambdas(model), config.lambda_lr)
    if config.optimizer == "adamw":
        return adamw(parameters, lr, on_gpu=group.device.type == "cuda")
    return sgd(parameters, lr, config.momentum, sharded=config.fsdp)


def build_gems(config: Train, model: nn.Module, optimizer: torch.optim.Optimizer) -> GEMS | None:
    """Add the hooks of --gems to the model and its optimizer."""
    if config.gems == "off":
        return None
    return GEMS(model, optimizer, cap=config.gems_cap, control=config.gems == "control")


def load_started_config(config: Train) -> tuple[Train | None, dict[str, Any]]:
    """Return configuration and derived values of the run in the folder, if any."""
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
        if not batches.dataset.histogram.any():
            raise ValueError(
                f"{batches.dataset.name}: no {labeled} has a label, so there is {lacks}"
                + (
                    ""
                    if config.data_root is None
                    else f". See `deepcontrol data check {config.data_root}`."
                )
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
    train: BatchStream,
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
    if position.step > len(train):  # equal if the run stopped before its evaluation
        raise CheckpointError(
            f"the checkpoint is at step {position.step}, but an epoch has {len(train)} steps"
        )
    seen = min(position.step * train.batch_size, len(train.dataset))
    if position.images != seen:
        raise CheckpointError(
            f"the checkpoint has seen {position.images} images in {position.step} steps, expected "
            f"{seen}"
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
        position.best_error = position.best_loss = math.inf
        position.best_epoch = -1
    return position


def changed_threads(run: Path, device: torch.device) -> str:
    """Return a note if a CPU run resumes with another number of threads, else "".

    Sums are split over the threads, so that their last bits depend on the number.
    """
    before = runfolder.read_config(run).get("threads")  # older runs have no such key
    now = torch.get_num_threads()
    if device.type != "cpu" or not isinstance(before, int) or before == now:
        return ""
    return (
        f"this run used {before} threads before, and {now} now: its results may differ in the "
        f"last bits from those of an uninterrupted run. For the same bits, set OMP_NUM_THREADS="
        f"{before}."
    )


def is_finished(run: Path, epochs: int) -> bool:
    """Return whether a run has diverged or recorded all its epochs."""
    metrics = run / runfolder.METRICS
    diverged = (run / runfolder.DIVERGED).exists() and metrics.exists()
    return diverged or storage.last_epoch(metrics) >= epochs


def archive_records(run: Path) -> str:
    """Rename the records of a finished run without a checkpoint; return a log line."""
    kept = storage.unused_name(run / runfolder.METRICS, "old")
    for name in (runfolder.LAYERS, runfolder.DIVERGED, runfolder.METRICS):
        if (run / name).exists():
            (run / name).replace(run / f"{name}{kept.suffix}")
    return (
        "Run is finished but has no checkpoint; restarting it. "
        f"Its records are kept as {kept.name} etc."
    )


def derived_values(
    config: Train, model: nn.Module, train: BatchStream, val: BatchStream, data: Fingerprints
) -> dict[str, Any]:
    """Return the values that config.json holds in addition to the configuration."""
    return {
        "task": config.task,
        "lr": config.learning_rate,
        "parameters": sum(p.numel() for p in model.parameters()),
        "classes": list(train.dataset.classes),
        "colors": [list(color) for color in train.dataset.palette],
        "steps_per_epoch": len(train),
        "train_images": len(train.dataset),
        "image_size": list(train.dataset.size),  # before cropping to the training size
        "val_images": len(val.dataset),
        "fingerprints": data,
    }


def keep_classes(derived: dict[str, Any], before: Mapping[str, Any]) -> str:
    """Keep the names and colors of a resumed run's classes; return a note.

    Its checkpoints have them too. The labels are the same: `check_same_data` compares them.
    """
    renamed = [
        key for key in ("classes", "colors") if before.get(key, derived[key]) != derived[key]
    ]
    derived |= {key: before[key] for key in renamed}
    if not renamed:
        return ""
    return (
        f"the data have other {' and '.join(renamed)} now; this run keeps its own. For new ones, "
        "train with a new --out"
    )


def derived_from_source(source: Source | DatasetSplit) -> dict[str, Any]:
    """Return the values for `deepcontrol predict` to read images as the source does."""
    if isinstance(source, VolumeSplit):
        data = source.dataset
        spacing = {} if data.spacing is None else {"voxel_size": list(data.spacing)}
        return {"intensities": {str(k): list(v) for k, v in data.intensities.items()}, **spacing}
    if not isinstance(source, FolderSource) or source.class_file.value_range is None:
        return {}
    return {"value_range": list(source.class_file.value_range)}


def about(machine: str) -> Mapping[str, Any]:
    """Return the versions, the commit, the machine and the threads of this process."""
    versions = {
        "deepcontrol": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    threads = torch.get_num_threads()
    return {"versions": versions, "commit": _commit(), "machine": machine, "threads": threads}


def _commit() -> str | None:
    """Return the commit of this code, if a git repository tracks it.

    A virtual environment may lie in the repository of another project.
    """
    source = Path(__file__)
    try:
        tracked = _git(source, "ls-files", source.name)
        return (tracked and _git(source, "rev-parse", "HEAD")) or None
    except OSError:  # git is not installed
        return None


def _git(file: Path, *command: str) -> str:
    """Run git in the folder of a file and return its output."""
    done = subprocess.run(["git", *command], cwd=file.parent, capture_output=True, text=True)
    return done.stdout.strip()
