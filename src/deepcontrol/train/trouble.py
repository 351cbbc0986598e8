"""A run in trouble: what is looked at, once something is known to be wrong."""

import json

import torch

from . import records
from .faults import FaultError, find_culprit, not_finite, out_of_memory, step_fits
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
    fault = not_finite(epochs_before + 1, number + 1, culprits, run.config.out)
    if run.group.leads:
        # That it diverged is a result, and others must be able to tell it from a failure.
        about = {"epoch": epochs_before + 1, "step": number + 1, "fault": str(fault)}
        records.write_whole(run.config.out / records.DIVERGED, json.dumps(about) + "\n")
    raise fault


def memory_fault(run: Run) -> FaultError:
    """What to say after memory ran out, with smaller batches tried."""
    run.step.reset()
    run.optimiser.zero_grad(set_to_none=True)
    batch = next(iter(run.train.epoch(1)))

    def fits(batch_size: int) -> bool:
        own = -(-batch_size // run.group.world)  # images in a process
        targets = [a[:own] for a in run.objective.targets(batch)]
        with _autocast(run):
            return step_fits(run.model, run.objective.loss, batch.images[:own], targets)

    if run.config.fsdp:  # the others may still have memory, and would not join in
        return out_of_memory(run.group.device, run.config.batch_size, None)
    return out_of_memory(run.group.device, run.config.batch_size, fits)


def _autocast(run: Run) -> torch.autocast:
    dtype = run.step.autocast
    return torch.autocast(run.group.device.type, dtype, enabled=dtype is not None)
