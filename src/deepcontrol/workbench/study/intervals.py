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

FEWEST = 3  # runs on each side, before divergence is more than chance


class Interval(NamedTuple):
    """A mean and where it may lie; infinite ends where there is no spread to tell."""

    middle: float
    low: float
    high: float


def mean_of(values: Sequence[float]) -> Interval:
    """The mean of values over seeds."""
    return difference(values, None)


def difference(a: Sequence[float], b: Sequence[float] | None) -> Interval:
    """The mean of a less that of b, or less 0; each with a variance of its own (Welch).

    Two numbers say too little of a variance: where a side has no more, both share one (Student).
    That is exact if they vary alike, and too sure of itself if they do not.

    Numbers without any spread, such as equal counts, say nothing of how far others would lie.

    A run that diverged is infinite, and so is the mean of its side. That is certain where most runs
    of one side diverged, at least three, and none of at least three on the other: by chance alone,
    three of three beside none of three has a probability of 5%. Otherwise nothing is.

    >>> [round(value, 2) for value in difference([3.0, 5.0], [1.0, 3.0])]
    [2.0, -2.13, 6.13]
    """
    middle = fmean(a) - (fmean(b) if b is not None else 0.0)
    groups = [a] if b is None else [a, b]
    if math.isinf(middle) and _have_diverged(groups):
        return Interval(middle, middle, middle)
    unknown = Interval(middle, -math.inf, math.inf)
    if min(map(len, groups)) < 2 or not math.isfinite(middle):
        return unknown
    square, freedom = (_one_variance if min(map(len, groups)) < 3 else _welch)(groups)
    if square == 0:
        return unknown
    half = student(freedom) * math.sqrt(square)
    return Interval(middle, middle - half, middle + half)


def _one_variance(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The variance of the difference of means and its degrees of freedom, if all vary alike."""
    freedom = sum(len(g) - 1 for g in groups)
    common = sum((len(g) - 1) * variance(g) for g in groups) / freedom
    return common * sum(1 / len(g) for g in groups), freedom


def _welch(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The same, whatever the variances."""
    parts = [variance(g) / len(g) for g in groups]
    total = sum(parts)
    if total == 0:
        return 0.0, 1.0
    freedom = 1 / sum((p / total) ** 2 / (len(g) - 1) for p, g in zip(parts, groups, strict=True))
    return total, freedom


def student(freedom: float) -> float:
    """The 95% quantile; between whole numbers on a straight line over 1 / freedom.

    >>> student(2.0), round(student(1.5), 2)
    (2.92, 4.05)
    """
    freedom = min(freedom, len(STUDENT))
    below = math.floor(freedom + 1e-9)  # sums of rounded numbers may fall short
    if freedom <= below:
        return STUDENT[below - 1]
    share = (1 / below - 1 / freedom) / (1 / below - 1 / (below + 1))
    return STUDENT[below - 1] + share * (STUDENT[below] - STUDENT[below - 1])


def _have_diverged(groups: Sequence[Sequence[float]]) -> bool:
    """Whether one group has for certain, and no other at all."""
    diverged = [sum(map(math.isinf, group)) for group in groups]
    most = [n >= FEWEST and 2 * n > len(g) for n, g in zip(diverged, groups, strict=True)]
    none = [n == 0 and len(g) >= FEWEST for n, g in zip(diverged, groups, strict=True)]
    return sum(most) == 1 and sum(none) == len(groups) - 1
