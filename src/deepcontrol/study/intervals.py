"""How sure a number over a few seeds is: 90% intervals of means and of their differences.

A claim holds if the whole interval lies in the region that the claim names, and fails if the whole
interval lies outside. With 90% each side is a test at 5%, and the claim "the same" is the usual
test of equivalence by two one-sided tests.
"""

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple

# 95% quantiles of Student's t by degrees of freedom; beyond them the last is a little too wide.
STUDENT = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
    1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
    1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip


class Interval(NamedTuple):
    """A mean and where it may lie; infinite ends where there is no spread to tell."""

    middle: float
    low: float
    high: float


def mean_of(values: Sequence[float]) -> Interval:
    """The mean of values over seeds."""
    return difference(values, None)


def difference(a: Sequence[float], b: Sequence[float] | None) -> Interval:
    """The mean of a less that of b, or less 0; with one common variance.

    A run that diverged is infinite, and so is the mean of its side. That is certain where most runs
    of one side diverged, at least two, and none of at least two on the other. Otherwise nothing is.

    >>> [round(value, 2) for value in difference([3.0, 5.0], [1.0, 1.0])]
    [3.0, 0.08, 5.92]
    """
    middle = fmean(a) - (fmean(b) if b is not None else 0.0)
    groups = [a] if b is None else [a, b]
    if math.isinf(middle) and _have_diverged(groups):
        return Interval(middle, middle, middle)
    freedom = sum(len(group) - 1 for group in groups)
    if min(map(len, groups)) < 2 or not math.isfinite(middle):
        return Interval(middle, -math.inf, math.inf)
    pooled = sum((len(g) - 1) * variance(g) for g in groups) / freedom
    t = STUDENT[min(freedom, len(STUDENT)) - 1]
    half = t * math.sqrt(pooled * sum(1 / len(g) for g in groups))
    return Interval(middle, middle - half, middle + half)


def _have_diverged(groups: Sequence[Sequence[float]]) -> bool:
    """Whether one group has for certain, and no other at all."""
    diverged = [sum(map(math.isinf, group)) for group in groups]
    most = [n >= 2 and 2 * n > len(g) for n, g in zip(diverged, groups, strict=True)]
    none = [n == 0 and len(g) >= 2 for n, g in zip(diverged, groups, strict=True)]
    return sum(most) == 1 and sum(none) == len(groups) - 1
