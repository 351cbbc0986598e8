"""A run in trouble: what is looked at, once something is known to be wrong."""

import json
from copy import copy

import torch

from .. import runfolder
from ..data import Batch, Batches
from .evaluate import evaluating, predict
from .faults import (
    FaultError,
    diverged,
    find_culprit,
    fits_in_memory,
    not_finite,
    out_of_memory,
    what_is_kept,
)
from .guard import Reading
from .run import Run, images_in


def raise_if_not_finite(run: Run, seen: Reading | None = None) -> None:
    """FaultError if a step was not finite, by what was seen, or by a look that waits for it.

    Every process finds the same, so all of them can compute the step again together.
    """
    reading = run.gauge.read_now() if seen is None else seen
    if not reading.bad:
        return
    epochs_before, number = divmod(run.first_step + reading.good_steps, len(run.train))
    batch = next(iter(run.train.epoch(epochs_before + 1, start=number)))
    images = images_in(run.train, number)
    with _autocast(run):
        culprit = find_culprit(
            run.model, run.objective.loss, batch.images, run.targets(batch, images)
        )
    culprits = run.group.gathered(culprit)
    fault = not_finite(epochs_before + 1, number + 1, culprits, kept(run))
    note_divergence(run, epochs_before + 1, number + 1, fault)
    raise fault


def evaluation_fault(run: Run) -> FaultError:
    """What to say when the epoch at hand cannot be evaluated."""
    epoch = run.position.epoch + 1
    fault = diverged(epoch, kept(run))
    if epoch > 0:  # a network that was never trained has not diverged: it is no result
        note_divergence(run, epoch, None, fault)
    return fault


def note_divergence(run: Run, epoch: int, step: int | None, fault: FaultError) -> None:
    """That a run diverged is a result, and others must be able to tell it from a failure."""
    if run.group.leads:
        about = {"epoch": epoch, "step": step, "fault": str(fault)}
        runfolder.write_atomic(run.config.out / runfolder.DIVERGED, json.dumps(about) + "\n")


def kept(run: Run) -> str:
    """What there is on the disk, once all that is being written is there; all have to ask."""
    lost = ""
    try:
        run.saver.wait()
    except OSError as error:  # which nobody would hear of behind the fault that stops the run
        lost = f" (a later one was lost: {error})"
    return run.group.from_first(what_is_kept(run.config.out) + lost)


def memory_fault(run: Run) -> FaultError:
    """What to say after memory ran out, with smaller batches tried."""
    run.step.reset()
    run.optimizer.zero_grad(set_to_none=True)

    def fits(batch_size: int) -> bool:
        own = -(-batch_size // run.group.world)  # images in a process
        return fits_in_memory(lambda: _step_and_evaluation(run, own))

    if run.config.fsdp:  # the others may still have memory, and would not join in
        return out_of_memory(run.group.device, run.config.batch_size, None)
    return out_of_memory(run.group.device, run.config.batch_size, fits)


def _step_and_evaluation(run: Run, images: int) -> None:
    """A step without its update, then a prediction as evaluations have it: of larger images, or of
    more at once."""
    batch = _first(run.train, images)
    with _autocast(run):
        loss = run.objective.loss(run.model(batch.images), *run.objective.targets(batch))
    torch.autograd.grad(loss, [p for p in run.model.parameters() if p.requires_grad])
    del batch, loss
    asked = run.config.eval_batch_size
    evaluated = images if asked is None else -(-asked // run.group.world)
    with evaluating(run.model, run.group.device, run.step.autocast):
        predict(run.model, _first(run.val, evaluated).images, run.config.window)


def _first(batches: Batches, images: int) -> Batch:
    """A batch of so many images and no more, from the same arrays."""
    fewer = copy(batches)
    fewer.batch_size, fewer.rank, fewer.world = images, 0, 1
    return next(iter(fewer.epoch(1)))


def _autocast(run: Run) -> torch.autocast:
    dtype = run.step.autocast
    return torch.autocast(run.group.device.type, dtype, enabled=dtype is not None)
