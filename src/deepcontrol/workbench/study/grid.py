"""The best rate of each batch: AGC's final errors over a grid of batches and rates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .arms import Arm, agc
from .measures import FINAL, Curve
from .rules import spread


@dataclass(frozen=True)
class Cell:
    """What came of one batch at one rate."""

    batch: int
    rate: float
    error: str  # the mean over seeds and its deviation, %
    is_best: bool  # of its batch


def grid(curves: Mapping[Arm, Sequence[Curve]]) -> list[Cell]:
    """SegNet with AGC as the paper has it, by batch and rate; empty if no rates can be compared."""
    errors = {
        arm: [FINAL.of(curve) for curve in runs]
        for arm, runs in sorted(curves.items(), key=lambda item: (item[0].batch, item[0].rate))
        if runs and arm == agc(arm.batch, arm.rate)
    }
    batches = [arm.batch for arm in errors]
    if len(batches) == len(set(batches)):
        return []
    lowest = {
        batch: min(fmean(e) for arm, e in errors.items() if arm.batch == batch) for batch in batches
    }
    return [
        Cell(
            arm.batch,
            arm.rate,
            spread(of_seeds),
            batches.count(arm.batch) > 1 and math.isfinite(mean) and mean == lowest[arm.batch],
        )
        for arm, of_seeds in errors.items()
        for mean in [fmean(of_seeds)]
    ]
