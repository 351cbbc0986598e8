"""Measures: functions that reduce a run to one number, before runs are compared."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from ..optim import Schedule

SPIKE = 1.0  # points above the median of the surrounding epochs
SPIKE_WINDOW = 5  # epochs to either side
DEEPEST, MIDDLE = (0.75, 1.1), (0.25, 0.75)  # ranges of depth


class LayerLambda(NamedTuple):
    """Statistics of lambda over the filters of a layer."""

    mean: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Curve:
    """A finished run: metrics after epochs 1, 2, ..., and lambda at the end."""

    errors: tuple[float, ...]  # validation, %
    losses: tuple[float, ...]  # validation
    lambdas: tuple[LayerLambda, ...] = ()  # by layer, in forward order
    diverged: int | None = None  # epoch of the first step that was not finite
    seed: int = 0
    schedule: Schedule = "constant"
    ious: tuple[float, ...] = ()  # validation, %; empty in classification


@dataclass(frozen=True)
class Measure:
    """A named function of a run. Errors and losses of a diverged run are infinite."""

    name: str
    unit: str
    of: Callable[[Curve], float]
    digits: int = 2  # decimals to show


def mean_or_nan(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def final_value(values: tuple[float, ...], schedule: Schedule) -> float:
    """Average the last tenth: single epochs at a constant learning rate are noisy.

    With a cosine schedule the last epoch is the result: the learning rate has fallen to 0.
    """
    last = 1 if schedule == "cosine" else math.ceil(len(values) / 10)
    return mean_or_nan(values[-last:])


def final_error(curve: Curve) -> float:
    return math.inf if curve.diverged is not None else final_value(curve.errors, curve.schedule)


def mean_error(curve: Curve) -> float:
    """Average the error over all epochs: the area below the curve."""
    return math.inf if curve.diverged is not None else mean_or_nan(curve.errors)


def early_error(curve: Curve) -> float:
    """Average the error over the first third of the epochs."""
    if curve.diverged is not None:
        return math.inf
    return mean_or_nan(curve.errors[: math.ceil(len(curve.errors) / 3)])


def final_loss(curve: Curve) -> float:
    return math.inf if curve.diverged is not None else final_value(curve.losses, curve.schedule)


def final_iou(curve: Curve) -> float:
    return -math.inf if curve.diverged is not None else final_value(curve.ious, curve.schedule)


def spikes(curve: Curve) -> float:
    """Count rises of the error by SPIKE points above the median around them.

    Consecutive epochs count as one spike. The first third is left out, because the error falls
    in steps there.
    """
    if curve.diverged is not None:
        return math.nan
    errors = curve.errors
    windows = [errors[max(0, i - SPIKE_WINDOW) : i + SPIKE_WINDOW + 1] for i in range(len(errors))]
    high = [e > median(window) + SPIKE for e, window in zip(errors, windows, strict=True)]
    late = high[math.ceil(len(high) / 3) :]
    return float(sum(now and not before for before, now in itertools.pairwise([False, *late])))


def lambda_by_depth(low: float, high: float) -> Callable[[Curve], float]:
    """Return a measure: the mean of lambda over the layers in a range of depth.

    In an encoder-decoder of n layers, the depth of layer i is 1 in the middle and 0 at both ends.
    """

    def mean(curve: Curve) -> float:
        n = len(curve.lambdas)
        depths = [1 - abs(2 * (i + 0.5) / n - 1) for i in range(n)]
        layers = zip(curve.lambdas, depths, strict=True)
        return mean_or_nan([layer.mean for layer, depth in layers if low <= depth < high])

    return mean


def deepest_minus_last(curve: Curve) -> float:
    return lambda_by_depth(*DEEPEST)(curve) - last_lambda(curve)


def deepest_minus_middle(curve: Curve) -> float:
    return lambda_by_depth(*DEEPEST)(curve) - lambda_by_depth(*MIDDLE)(curve)


def last_lambda(curve: Curve) -> float:
    return curve.lambdas[-1].mean if curve.lambdas else math.nan


def lowest_lambda(curve: Curve) -> float:
    return min((layer.lowest for layer in curve.lambdas), default=math.nan)


def highest_lambda(curve: Curve) -> float:
    return max((layer.highest for layer in curve.lambdas), default=math.nan)


FINAL = Measure("final error", "%", final_error)
MEAN = Measure("mean error over all epochs", "%", mean_error)
EARLY = Measure("mean error over the first third", "%", early_error)
LOSS = Measure("final loss", "", final_loss, 3)
IOU = Measure("final mean IoU", "%", final_iou)
SPIKES = Measure("error spikes", "", spikes, 1)
LAMBDA_DEEPEST = Measure("lambda, deepest quarter", "", lambda_by_depth(*DEEPEST), 3)
LAMBDA_MIDDLE = Measure("lambda, half depth", "", lambda_by_depth(*MIDDLE), 3)
LAMBDA_DEEPER = Measure("lambda, deepest quarter minus half depth", "", deepest_minus_middle, 3)
LAMBDA_LAST = Measure("lambda, last layer", "", last_lambda, 3)
LAMBDA_RISE = Measure("lambda, deepest quarter minus last layer", "", deepest_minus_last, 3)
LAMBDA_LOWEST = Measure("lowest lambda", "", lowest_lambda, 3)
LAMBDA_HIGHEST = Measure("highest lambda", "", highest_lambda, 3)
