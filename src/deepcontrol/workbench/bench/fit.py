"""The largest batch that trains in 12 GiB: the paper's own constraint, which held BatchNorm at 8.

12 GiB is what PyTorch may take for tensors, fragments included; the driver's own share of a card is
not part of it.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import torch

from .cases import Case
from .measure import MIB, give_memory_back, precision, training_step
from .record import Row

LIMIT_GIB = 12
MOST = 4096


def measure_fit(case: Case, steps: int) -> list[Row]:
    """The largest batch of SegNet's training steps, run eagerly in bf16, within LIMIT_GIB."""
    del steps  # it is memory that counts
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    limit = LIMIT_GIB * 1024 * MIB
    if total < limit:
        raise RuntimeError(f"the device has {total / MIB / 1024:.1f} GiB, less than {LIMIT_GIB}")
    give_memory_back()  # what others left counts against the limit
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        largest = largest_that(lambda batch: fits(replace(case, group="segnet", batch=batch)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return [{**case.key, "largest_batch": str(largest), "limit_gib": str(LIMIT_GIB)}]


def fits(case: Case) -> bool:
    """Whether it trains; and nothing of the attempt is left."""
    try:
        train_twice(case)
    except RuntimeError as error:  # cuDNN and cuBLAS have words of their own for it
        if not re.search(r"out of memory|alloc_failed|not_initialized", str(error), re.IGNORECASE):
            raise
        fitted = False
    else:
        fitted = True
    give_memory_back()
    return fitted


def train_twice(case: Case) -> None:
    """Two steps: the optimizer has all its state from the second on."""
    with precision(case.dtype):
        # Trials of cuDNN's algorithms would take memory that no training needs.
        torch.backends.cudnn.benchmark = False
        step, batch = training_step(case, "cuda")
        step(*batch)
        step(*batch)
        torch.cuda.synchronize()


def largest_that(works: Callable[[int], bool]) -> int:
    """The largest number from 1 to MOST that works, or 0, by doubling and halving.

    >>> largest_that(lambda n: n <= 37)
    37
    """
    good, bad = 0, 1
    while works(bad):
        good, bad = bad, 2 * bad
        if bad > MOST:
            return good
    while bad - good > 1:
        middle = (good + bad) // 2
        if works(middle):
            good = middle
        else:
            bad = middle
    return good
