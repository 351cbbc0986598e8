"""What a run is reduced to before runs are compared: one number each."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

SPIKE = 1.0  # points above the epochs around it
AROUND = 5  # epochs to either side
DEEPEST, MIDDLE = (0.75, 1.1), (0.25, 0.75)  # bands of depth


class Filters(NamedTuple):
    """lambda over the filters of a layer."""

    mean: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Curve:
    """A run: its values after epochs 1, 2, ..., and lambda at the end, layer by layer."""

    errors: tuple[float, ...]  # of validation, %
    losses: tuple[float, ...]  # of validation
    lambdas: tuple[Filters, ...] = ()  # in forward order
    diverged: int | None = None  # the epoch in which a step was not finite


@dataclass(frozen=True)
class Measure:
    """A number of a run. One that diverged has infinite errors and losses."""

    words: str
    unit: str
    of: Callable[[Curve], float]
    digits: int = 2  # behind the point


def average(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def last_tenth(values: tuple[float, ...]) -> float:
    """The mean of the last tenth: one epoch at a fixed rate says little."""
    return average(values[-math.ceil(len(values) / 10) :])


def final_error(curve: Curve) -> float:
    return math.inf if curve.diverged is not None else last_tenth(curve.errors)


def course_error(curve: Curve) -> float:
    """How fast it learns: the mean over all epochs, which is the area below the curve."""
    return math.inf if curve.diverged is not None else average(curve.errors)


def early_error(curve: Curve) -> float:
    """The mean over the first third."""
    if curve.diverged is not None:
        return math.inf
    return average(curve.errors[: math.ceil(len(curve.errors) / 3)])


def final_loss(curve: Curve) -> float:
    return math.inf if curve.diverged is not None else last_tenth(curve.losses)


def spikes(curve: Curve) -> float:
    """How often the error rises SPIKE points above the median of the epochs around.

    Epochs in a row are one spike. The first third is left out: there the error falls by leaps.
    """
    if curve.diverged is not None:
        return math.nan
    errors = curve.errors
    around = [errors[max(0, i - AROUND) : i + AROUND + 1] for i in range(len(errors))]
    high = [e > median(near) + SPIKE for e, near in zip(errors, around, strict=True)]
    late = high[math.ceil(len(high) / 3) :]
    return float(sum(now and not before for before, now in itertools.pairwise([False, *late])))


def lambda_by_depth(low: float, high: float) -> Callable[[Curve], float]:
    """The mean of lambda over the layers in a band of depth.

    In an encoder-decoder the depth of layer i of n is 1 in the middle and 0 at both ends.
    """

    def mean(curve: Curve) -> float:
        n = len(curve.lambdas)
        depth = [1 - abs(2 * (i + 0.5) / n - 1) for i in range(n)]
        found = [f.mean for f, d in zip(curve.lambdas, depth, strict=True) if low <= d < high]
        return average(found)

    return mean


def rise_of_lambda(curve: Curve) -> float:
    """From the layer next to the classifier to the deepest ones."""
    return lambda_by_depth(*DEEPEST)(curve) - last_lambda(curve)


def deepest_above_middle(curve: Curve) -> float:
    """From half depth to the deepest layers."""
    return lambda_by_depth(*DEEPEST)(curve) - lambda_by_depth(*MIDDLE)(curve)


def last_lambda(curve: Curve) -> float:
    return curve.lambdas[-1].mean if curve.lambdas else math.nan


def lowest_lambda(curve: Curve) -> float:
    return min((f.lowest for f in curve.lambdas), default=math.nan)


def highest_lambda(curve: Curve) -> float:
    return max((f.highest for f in curve.lambdas), default=math.nan)


FINAL = Measure("final error", "%", final_error)
COURSE = Measure("error over all epochs", "%", course_error)
EARLY = Measure("error over the first third", "%", early_error)
LOSS = Measure("final loss", "", final_loss, 3)
SPIKES = Measure("spikes of the error", "", spikes, 1)
LAMBDA_DEEPEST = Measure("lambda in the deepest quarter", "", lambda_by_depth(*DEEPEST), 3)
LAMBDA_MIDDLE = Measure("lambda at half depth", "", lambda_by_depth(*MIDDLE), 3)
LAMBDA_DEEPER = Measure(
    "lambda of the deepest quarter less that at half depth", "", deepest_above_middle, 3
)
LAMBDA_LAST = Measure("lambda next to the classifier", "", last_lambda, 3)
LAMBDA_RISE = Measure("lambda of the deepest quarter less the last layer's", "", rise_of_lambda, 3)
LAMBDA_LOWEST = Measure("the lowest lambda", "", lowest_lambda, 3)
LAMBDA_HIGHEST = Measure("the highest lambda", "", highest_lambda, 3)
