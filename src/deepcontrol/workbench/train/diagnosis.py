"""Explain a failed run: the first non-finite layer, the batch size that fits.

Runs that need more memory than this machine has are refused before anything is allocated.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch

from ...nn import saved_bytes
from ...step import split_batch
from ..data import Batch, BatchStream, DatasetSplit, Source
from ..folders import runfolder
from ..hardware import total_memory
from ..terminal import format_size
from .build import build_network
from .config import Train
from .distributed import choose_autocast, peak_mib
from .evaluate import evaluating, predict
from .faults import DeviceError, FaultError, GuardStatus, find_first_nonfinite, fits_in_memory
from .run import TrainingRun, images_in_batch

REMEDY = "Try a smaller --lr or --clip-grad-norm, with a new --out."


def raise_if_not_finite(run: TrainingRun, status: GuardStatus | None = None) -> None:
    """Raise FaultError if a step was not finite.

    All processes have the same status, so they repeat the step together to find the layer.

    Args:
        run: The run.
        status: The guard's status. None waits for the device and reads it.
    """
    status = run.guard_reader.wait() if status is None else status
    if not status.bad:
        return
    epoch, index = divmod(run.first_step + status.good_steps, len(run.train))
    epoch += 1
    batch = next(iter(run.train.epoch(epoch, start=index)))
    images = images_in_batch(run.train, index)
    parts = run.config.accumulate
    targets, found = run.targets(batch, images, parts), ""
    with _autocast(run):
        for inputs, *own in split_batch((batch.images, *targets), parts):
            found = found or find_first_nonfinite(run.model, run.objective.loss, inputs, own)
    by_rank = run.group.all_gather(found)
    places = [f"{p} (process {i})" * bool(p) for i, p in enumerate(by_rank)]
    places = [p for p in (by_rank if len(by_rank) == 1 else places) if p]
    cause = "repeated, the step is finite, so some op is not deterministic"
    if places:
        cause = f"the first non-finite value is {'; '.join(places)}"
    fault = FaultError(
        f"step {index + 1} of epoch {epoch} is not finite: {cause}. "
        f"The update was skipped; {_describe_checkpoints(run)}. {REMEDY}"
    )
    _record_divergence(run, epoch, index + 1, fault)
    raise fault


def evaluation_fault(run: TrainingRun) -> FaultError:
    """Return the error for outputs that are not finite in the evaluation of an epoch."""
    epoch = run.position.epoch + 1
    remedy = REMEDY if epoch else "The network is not trained yet."
    fault = FaultError(
        f"after epoch {epoch} the network's outputs on the validation images are not finite. "
        f"The epoch was not recorded; {_describe_checkpoints(run)}. {remedy}"
    )
    if epoch > 0:  # an untrained network has not diverged
        _record_divergence(run, epoch, None, fault)
    return fault


def memory_fault(run: TrainingRun) -> FaultError:
    """Return the out-of-memory error, with the largest halved batch size that fits."""
    run.step.reset()
    run.optimizer.zero_grad(set_to_none=True)
    device, batch_size = run.group.device, run.config.batch_size
    peak = peak_mib(device)  # before the trials
    smaller = batch_size // 2
    if run.config.fsdp:  # trials are collective, and other processes may still have memory
        advice = f"--batch-size {smaller} may fit"
    else:
        while smaller and not _batch_size_fits(run, smaller):
            smaller //= 2
        advice = f"--batch-size {smaller} fits (tested)"
        if smaller and run.config.norm not in ("bn", "ws+bn"):
            advice += f", or --accumulate {-(-batch_size // smaller)} at the same batch size"
    if not smaller:
        advice = "not even batch size 1 fits; choose a smaller --size or --width"
    return FaultError(
        f"out of memory on {device} at batch size {batch_size} (peak {peak:,.0f} MiB): {advice}. "
        "Saved checkpoints are unchanged."
    )


def memory_fault_at_start(device: torch.device, size: Sequence[int], width: float) -> FaultError:
    """Return the out-of-memory error before the first step."""
    return FaultError(
        f"out of memory on {device} before the first step, with images of "
        f"{format_size(size)} and "
        f"width {width:g}; choose a smaller --size, --width or --train-limit"
    )


def device_fault(run: TrainingRun, error: Exception) -> DeviceError:
    """Return the error for a failed GPU, which this process must not use any more."""
    failure = ""
    try:
        run.writer.wait()  # its checkpoints are on the CPU already
    except OSError as problem:
        failure = f" (a later checkpoint failed: {problem})"
    # Kernels run after their launch, in a captured step long after it.
    return DeviceError(
        f"{run.group.device} failed in epoch {run.position.epoch + 1}, at step "
        f"{run.position.step} of {len(run.train)} or before: {str(error).strip().splitlines()[0]}; "
        f"{_list_checkpoints(run.config.out)}{failure}. Run the same command to "
        "resume. If it fails again, `deepcontrol doctor` tests the device."
    )


def _record_divergence(run: TrainingRun, epoch: int, step: int | None, fault: FaultError) -> None:
    # A diverged run is a result. The file distinguishes it from a run that failed.
    if run.group.is_main:
        run.check_lock()
        runfolder.write_diverged(run.config.out, epoch, step, str(fault))


def _describe_checkpoints(run: TrainingRun) -> str:
    """List the checkpoints, after those in progress are written. A collective call."""
    failure = ""
    try:
        run.writer.wait()
    except OSError as error:  # the caller raises another error, which would hide this one
        failure = f" (a later checkpoint failed: {error})"
    return run.group.broadcast(_list_checkpoints(run.config.out) + failure)


def _list_checkpoints(run: Path) -> str:
    last, best = run / runfolder.LAST, run / runfolder.BEST
    if not last.exists():
        return "there is no checkpoint yet"
    return f"the last checkpoint is {last}" + f", the best {best}" * best.exists()


def _batch_size_fits(run: TrainingRun, batch_size: int) -> bool:
    config = replace(run.config, batch_size=batch_size)
    images, evaluated = (
        -(-total // run.group.world_size) for total in (batch_size, config.val_batch_size)
    )
    return fits_in_memory(lambda: _try_step_and_evaluation(run, images, evaluated))


def _try_step_and_evaluation(run: TrainingRun, images: int, evaluated: int) -> None:
    """Compute a step without its update, then a prediction.

    Evaluations may need more memory than steps: images are larger, or batches are.
    """
    batch = _first_batch(run.train, images)
    with _autocast(run):
        loss = run.objective.loss(run.model(batch.images), *run.objective.targets(batch))
    torch.autograd.grad(loss, [p for p in run.model.parameters() if p.requires_grad])
    del batch, loss
    with evaluating(run.model, run.group.device, run.step.autocast):
        predict(run.model, _first_batch(run.val, evaluated).images, run.config.window)


def _first_batch(batches: BatchStream, images: int) -> Batch:
    """Return a batch of this many images from the same data, for this process alone."""
    smaller = copy(batches)
    smaller.batch_size, smaller.rank, smaller.world = images, 0, 1
    return next(iter(smaller.epoch(1)))


def _autocast(run: TrainingRun) -> torch.autocast:
    dtype = run.step.autocast
    return torch.autocast(run.group.device.type, dtype, enabled=dtype is not None)


# Memory that a run needs


# Smaller steps are not estimated: estimates take some tenths of a second, and these steps fit.
MIN_PIXELS = 2**21  # images x height x width x multiplier of the filters
COMPILED_SHARE = 0.5  # torch.compile saves less for the backward than the layers ask for


def check_memory(
    config: Train, source: Source | DatasetSplit, device: torch.device, processes: int = 1
) -> None:
    """Raise ValueError if a step needs more memory than the machine has.

    The estimate is a lower bound: parameters, their gradients and momentum, and the tensors saved
    for the backward. A run that passes may still run out of memory.
    """
    images = -(-min(config.batch_size, len(source)) // (processes * config.accumulate))
    if images * math.prod(config.sample_size) * config.width < MIN_PIXELS:
        return
    total = total_memory(device)
    # The images alone come first: shapes beyond 2^63 bytes cannot even be described.
    needed: float = 4 * config.in_channels * images * math.prod(config.sample_size)
    if needed <= total:
        needed = max(needed, step_bytes(config, len(source.classes), images, device, processes))
    if needed > total:
        raise ValueError(
            f"a step with {images} image{'s' * (images > 1)} of {format_size(config.sample_size)} "
            f"needs at least {needed / 2**30:,.1f} GiB, but {device} has {total / 2**30:,.1f} GiB: "
            "choose a smaller --batch-size, --size or --width"
        )


def step_bytes(
    config: Train, classes: int, images: int, device: torch.device, processes: int = 1
) -> float:
    """Estimate the memory of a training step on `images` images of one process.

    The network runs on the meta device, which has shapes only.
    """
    with torch.device("meta"):
        model = build_network(config, classes).to("meta")  # others' networks are on the CPU
    state = state_bytes(config, sum(p.numel() for p in model.parameters()), processes)
    dtype = choose_autocast(config.precision, device) or torch.float32
    shape = (images, config.in_channels, *config.sample_size)
    saved = saved_bytes(model.to(dtype), torch.empty(shape, device="meta", dtype=dtype))
    return state + saved * (COMPILED_SHARE if config.engine.startswith("compile") else 1)


def state_bytes(config: Train, parameters: int, processes: int = 1) -> float:
    """Return bytes of parameters, gradients, optimizer state and EMA in one process."""
    copies = 2 + (2 if config.optimizer == "adamw" else config.momentum > 0)
    copies += config.ema is not None
    return parameters * 4 * copies / (processes if config.fsdp else 1)
