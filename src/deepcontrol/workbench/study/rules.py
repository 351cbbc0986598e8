"""Rules: pure functions from runs over seeds to verdicts.

A check names a quantity and an open region that the quantity must lie in. The quantity is an arm's
mean of a measure, the difference of two arms' means, or a ratio of benchmark results. A check holds
if the whole 90% interval of its quantity lies inside the region, and fails if the whole interval
lies outside. Each side is then a test at 5%, and "the same" is the usual equivalence test by two
one-sided tests. A claim is reproduced if all its checks hold, not reproduced if one fails, and
undecided otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, variance
from typing import NamedTuple

from scipy.special import stdtrit  # quantiles of Student's t

from ..folders.studyfolder import CheckResult, Measurement, Problem, Verdict
from .arms import Arm, Tuned
from .measures import FINAL, Curve, Measure

FEWEST = 3  # runs on each side before divergence decides

Row = Mapping[str, str]  # one row of the benchmark


# Intervals


class Interval(NamedTuple):
    """An estimate and its 90% interval, with infinite ends if it is unknown."""

    middle: float
    low: float
    high: float


def difference_interval(a: Sequence[float], b: Sequence[float] | None) -> Interval:
    """Estimate mean(a) - mean(b), or mean(a) if b is None.

    Each side has its own variance (Welch's interval). If a side has only two values, both
    share one variance (Student's interval): exact if they vary alike, too narrow if they do not.
    Values without any spread, such as equal counts, give no interval.

    A diverged run makes the mean of its side infinite. This decides if at least three runs of one
    side, and more than half of them, diverged and none of at least three on the other side did: by
    chance alone, three of three against none of three has a probability of 5%. Otherwise the
    interval is unknown.

    >>> [round(value, 2) for value in difference_interval([3.0, 5.0], [1.0, 3.0])]
    [2.0, -2.13, 6.13]
    """
    middle = fmean(a) - (fmean(b) if b is not None else 0.0)
    groups = [a] if b is None else [a, b]
    if math.isinf(middle) and _divergence_decides(groups):
        return Interval(middle, middle, middle)
    unknown = Interval(middle, -math.inf, math.inf)
    if min(map(len, groups)) < 2 or not math.isfinite(middle):
        return unknown
    square, freedom = (_pooled if min(map(len, groups)) < 3 else _welch)(groups)
    if square == 0:
        return unknown
    half = float(stdtrit(freedom, 0.95)) * math.sqrt(square)
    return Interval(middle, middle - half, middle + half)


def _pooled(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return squared standard error and degrees of freedom for a shared variance."""
    freedom = sum(len(g) - 1 for g in groups)
    common = sum((len(g) - 1) * variance(g) for g in groups) / freedom
    return common * sum(1 / len(g) for g in groups), freedom


def _welch(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return squared standard error and degrees of freedom for separate variances."""
    parts = [variance(g) / len(g) for g in groups]
    total = sum(parts)
    if total == 0:
        return 0.0, 1.0
    freedom = 1 / sum((p / total) ** 2 / (len(g) - 1) for p, g in zip(parts, groups, strict=True))
    return total, freedom


def _divergence_decides(groups: Sequence[Sequence[float]]) -> bool:
    diverged = [sum(map(math.isinf, group)) for group in groups]
    most = [n >= FEWEST and 2 * n > len(g) for n, g in zip(diverged, groups, strict=True)]
    none = [n == 0 and len(g) >= FEWEST for n, g in zip(diverged, groups, strict=True)]
    return sum(most) == 1 and sum(none) == len(groups) - 1


def decide(interval: Interval, low: float, high: float) -> Verdict:
    """Judge whether the interval lies inside the open region, outside, or across."""
    # An infinite end is no border, not even for an infinite interval.
    above = math.isinf(low) or interval.low > low
    below = math.isinf(high) or interval.high < high
    if above and below:
        return "reproduced"
    outside = (not above and interval.high <= low) or (not below and interval.low >= high)
    return "not reproduced" if outside else "undecided"


def combine(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a claim from those on its checks."""
    if "not reproduced" in verdicts:
        return "not reproduced"
    return "reproduced" if verdicts and set(verdicts) == {"reproduced"} else "undecided"


# Checks


@dataclass(frozen=True)
class Evidence:
    """The input of all rules: finished runs by arm, and the rows of the benchmark."""

    curves: Mapping[Arm, Sequence[Curve]] = field(default_factory=dict)
    bench: Sequence[Row] = ()


def choose(tuned: Tuned, curves: Mapping[Arm, Sequence[Curve]]) -> Arm | None:
    """Return the arm of the lowest final error of seed 0, the first one after a tie.

    None if a learning rate has no finished run of seed 0 yet, or if all of them diverged.
    """
    firsts = _first_seeds(tuned, curves)
    if firsts is None:
        return None
    errors = [FINAL.of(curve) for curve in firsts]
    best = min(range(len(errors)), key=errors.__getitem__)
    return tuned.arms[best] if math.isfinite(errors[best]) else None


def _first_seeds(tuned: Tuned, curves: Mapping[Arm, Sequence[Curve]]) -> list[Curve] | None:
    """Return the curve of seed 0 of each arm, or None if one is missing."""
    found = [next((c for c in curves.get(arm, ()) if c.seed == 0), None) for arm in tuned.arms]
    complete = [curve for curve in found if curve is not None]
    return complete if len(complete) == len(found) else None


def measure_contender(
    measure: Measure, contender: Arm | Tuned, curves: Mapping[Arm, Sequence[Curve]]
) -> tuple[Measurement, list[float]]:
    """Return a measure of an arm, or of the best of a tuned one, and its values.

    There are no values while the learning rate is not chosen. If every learning rate diverged, each
    of them counts as one run that diverged.
    """
    if isinstance(contender, Arm):
        values = [measure.of(curve) for curve in curves.get(contender, ())]
    elif chosen := choose(contender, curves):
        return measure_contender(measure, chosen, curves)
    else:
        values = [measure.of(curve) for curve in _first_seeds(contender, curves) or ()]
    return measure_arm(measure, contender, values), values


def measure_arm(measure: Measure, arm: Arm | Tuned, values: Sequence[float]) -> Measurement:
    """Record a measure's values over seeds. An infinite value is a diverged run."""
    return Measurement(
        measure=measure.name,
        arm=arm.name,
        settings=arm.settings,
        unit=measure.unit,
        digits=measure.digits,
        values=tuple(value if math.isfinite(value) else None for value in values),
        diverged=sum(map(math.isinf, values)),
    )


@dataclass(frozen=True, kw_only=True)
class Check:
    """Require measure(arm) - measure(against), or measure(arm), between low and high."""

    measure: Measure
    arm: Arm | Tuned
    against: Arm | Tuned | None = None
    low: float = -math.inf
    high: float = math.inf

    @property
    def contenders(self) -> tuple[Arm | Tuned, ...]:
        return (self.arm,) if self.against is None else (self.arm, self.against)

    def judge(self, evidence: Evidence) -> CheckResult:
        measured = [measure_contender(self.measure, c, evidence.curves) for c in self.contenders]
        values = [of_contender for _, of_contender in measured]
        is_share = self.measure.unit == "%" and self.against is not None
        result = CheckResult(
            kind="mean" if self.against is None else "difference",
            measure=self.measure.name,
            unit="points" if is_share else self.measure.unit,
            digits=self.measure.digits,
            low=finite_or_none(self.low),
            high=finite_or_none(self.high),
            operands=tuple(measurement for measurement, _ in measured),
            problem="not run",
            verdict="undecided",
        )
        if not all(values):
            return result
        interval = difference_interval(values[0], values[1] if len(values) > 1 else None)
        return replace(
            result,
            estimate=finite_or_none(interval.middle),
            interval_low=finite_or_none(interval.low),
            interval_high=finite_or_none(interval.high),
            problem=_problem(interval),
            verdict=decide(interval, self.low, self.high),
        )

    def scale_lr(self, factor: float) -> "Check":
        against = None if self.against is None else self.against.scale_lr(factor)
        return replace(self, arm=self.arm.scale_lr(factor), against=against)


def _problem(interval: Interval) -> Problem:
    if math.isinf(interval.middle):
        return "diverged" if interval.low == interval.high else "some diverged"
    if math.isnan(interval.middle):
        return "no value"
    return "no spread" if math.isinf(interval.low) else ""


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True, kw_only=True)
class BenchRatio:
    """Require column(over) / column(under) above `low`, each in its best engine.

    Two times are compared only if one call of the benchmark measured both.
    """

    measure: str
    unit: str = ""
    column: str
    over: str
    under: str
    group: str = "segnet"
    batch: int
    low: float

    contenders: tuple[Arm | Tuned, ...] = ()  # needs no training

    def judge(self, evidence: Evidence) -> CheckResult:
        over, under = (self._best(evidence.bench, who) for who in (self.over, self.under))
        result = CheckResult(
            kind="ratio",
            measure=self.measure,
            low=self.low,
            operands=(self._measured(self.over, over), self._measured(self.under, under)),
            problem="no benchmark",
            verdict="undecided",
        )
        if over is None or under is None:
            return result
        if self._timed and over.get("run") != under.get("run"):
            return replace(result, problem="separate benchmarks")
        interval = Interval(*(float(over[a]) / float(under[b]) for a, b in self._columns))
        return replace(
            result,
            estimate=interval.middle,
            interval_low=interval.low,
            interval_high=interval.high,
            problem="",
            verdict=decide(interval, self.low, math.inf),
        )

    def scale_lr(self, factor: float) -> "BenchRatio":
        del factor  # the time of a step does not depend on it
        return self

    def rows_used(self, rows: Sequence[Row]) -> list[Row]:
        """Return the benchmark rows that this check rests on."""
        found = (self._best(rows, who) for who in (self.over, self.under))
        return [row for row in found if row is not None]

    @property
    def _timed(self) -> bool:
        return self.column == "ms"

    @property
    def _middle(self) -> str:
        return f"{self.column}_p50" if self._timed else self.column

    @property
    def _columns(self) -> tuple[tuple[str, str], ...]:
        """Columns of the estimate and its ends. A time has a spread, memory has none."""
        if not self._timed:
            return ((self.column, self.column),) * 3
        p20, p50, p80 = (f"{self.column}_{p}" for p in ("p20", "p50", "p80"))
        return (p50, p50), (p20, p80), (p80, p20)

    def _measured(self, contender: str, row: Row | None) -> Measurement:
        return Measurement(
            measure=self.measure,
            arm=contender,
            settings=_contender_settings(contender),
            source="benchmark",
            engine="" if row is None else row["engine"],
            unit=self.unit,
            digits=None,
            values=() if row is None else (float(row[self._middle]),),
        )

    def _best(self, rows: Sequence[Row], contender: str) -> Row | None:
        """Return the row of the fastest engine, the smallest memory or the largest batch."""
        key = {"group": self.group, "contender": contender, "batch": str(self.batch)}
        key |= {"dtype": "bf16", "width": "1", "size": "256x512"}
        found = [r for r in rows if key.items() <= r.items() and self._middle in r]
        sign = -1 if self.column == "largest_batch" else 1
        return min(found, key=lambda r: sign * float(r[self._middle]), default=None)


def _contender_settings(contender: str) -> dict[str, str]:
    """Return the settings of a contender of the benchmark.

    >>> _contender_settings("bn"), _contender_settings("bn-byte-pool")
    ({'norm': 'BN'}, {'norm': 'BN', 'variant': 'byte pool'})
    """
    norm, _, variant = contender.partition("-")
    settings = {"norm": norm.upper()}
    return settings | {"variant": variant.replace("-", " ")} if variant else settings
