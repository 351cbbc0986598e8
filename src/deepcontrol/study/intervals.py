"""How sure a number over a few seeds is: 90% intervals of means and of their differences.

A claim holds if the whole interval lies in the region that the claim names, and fails if the whole
interval lies outside. With 90% each side is a test at 5%, and the claim "the same" is the usual
test of equivalence by two one-sided tests.
"""

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple

# 95% quantiles of Student's t by degrees of freedom; beyond them, the normal distribution's.
STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
NORMAL = 1.645


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

    A run that diverged is infinite, and makes its side so, for certain. If both sides have one,
    nothing can be said.

    >>> [round(value, 2) for value in difference([3.0, 5.0], [1.0, 1.0])]
    [3.0, 0.08, 5.92]
    """
    middle = fmean(a) - (fmean(b) if b is not None else 0.0)
    if math.isinf(middle):
        return Interval(middle, middle, middle)
    groups = [a] if b is None else [a, b]
    freedom = sum(len(group) - 1 for group in groups)
    if freedom == 0 or math.isnan(middle):
        return Interval(middle, -math.inf, math.inf)
    pooled = sum((len(g) - 1) * variance(g) for g in groups if len(g) > 1) / freedom
    t = STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL
    half = t * math.sqrt(pooled * sum(1 / len(g) for g in groups))
    return Interval(middle, middle - half, middle + half)
