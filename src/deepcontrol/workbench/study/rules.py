"""The rules that decide: pure functions from curves over seeds to verdicts.

A check names a quantity and an open region that the quantity must lie in: the difference of two
arms' means of some measure, an arm's mean, or a ratio of the benchmark. A claim is reproduced if
all its checks hold, not reproduced if one fails, and undecided otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from .arms import Arm
from .intervals import Interval, difference, mean_of
from .measures import Curve, Measure

Verdict = Literal["reproduced", "not reproduced", "undecided"]
Row = Mapping[str, str]


@dataclass(frozen=True)
class Evidence:
    """All that rules look at: finished runs by arm, and the rows of the benchmark."""

    curves: Mapping[Arm, Sequence[Curve]] = field(default_factory=dict)
    bench: Sequence[Row] = ()


class Value(NamedTuple):
    """Something that was measured, in words: final error, AGC batch 1, 8.1 %."""

    measure: str
    who: str
    figure: str

    def __str__(self) -> str:
        return f"{self.measure}, {self.who}: {self.figure}"


@dataclass(frozen=True)
class Finding:
    """What came of a check: the quantity, its region in words, what was found, and the verdict."""

    quantity: str
    region: str
    rule: str  # the two in short, without whose they are
    found: str
    values: tuple[Value, ...]  # what the quantity was computed from
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Check:
    """measure(arm) - measure(against), or measure(arm), lies between low and high."""

    measure: Measure
    arm: Arm
    against: Arm | None = None
    low: float = -math.inf
    high: float = math.inf

    @property
    def arms(self) -> tuple[Arm, ...]:
        return (self.arm,) if self.against is None else (self.arm, self.against)

    @property
    def quantity(self) -> str:
        less = "" if self.against is None else f" less {self.against}"
        return f"{self.measure.words}: {self.arm}{less}"

    def judge(self, evidence: Evidence) -> Finding:
        runs = {arm: evidence.curves.get(arm, ()) for arm in self.arms}
        numbers = {arm: [self.measure.of(curve) for curve in runs[arm]] for arm in self.arms}
        region = in_words(self.low, self.high, self._unit)
        kind, words = self.measure, self.measure.words
        rule = f"{words}: {region}" if self.against is None else f"{words}: differences {region}"
        values = tuple(
            Value(words, str(arm), spread(numbers[arm], kind.unit, kind.digits))
            for arm in self.arms
        )
        missing = [str(arm) for arm in self.arms if not numbers[arm]]
        if missing:
            found = f"no finished run of {' and '.join(missing)}"
            return Finding(self.quantity, region, rule, found, values, "undecided")
        if self.against is None:
            interval = mean_of(numbers[self.arm])
        else:
            interval = difference(numbers[self.arm], numbers[self.against])
        found, verdict = self._found(interval, numbers), decide(interval, self.low, self.high)
        return Finding(self.quantity, region, rule, found, values, verdict)

    def at_rates_times(self, factor: float) -> "Check":
        against = None if self.against is None else self.against.at_rate_times(factor)
        return replace(self, arm=self.arm.at_rate_times(factor), against=against)

    @property
    def _unit(self) -> str:
        if self.measure.unit == "%" and self.against is not None:
            return " points"
        return self.measure.unit and f" {self.measure.unit}"

    def _found(self, interval: Interval, numbers: Mapping[Arm, Sequence[float]]) -> str:
        number = f"{{:.{self.measure.digits}f}}".format
        seeds = " and ".join(dict.fromkeys(str(len(n)) for n in numbers.values()))
        of_seeds = f"{seeds} seed{'s' * (seeds != '1')}"
        if math.isinf(interval.middle) and interval.low == interval.high:
            return f"{'worse' if interval.middle > 0 else 'better'} without bound: runs diverged"
        if math.isinf(interval.middle):
            return f"too few runs to tell, {of_seeds}: some diverged"
        if math.isnan(interval.middle):
            return "nothing to compare: runs diverged, or say nothing of it"
        if math.isinf(interval.low):
            return f"{number(interval.middle)}{self._unit}, {of_seeds}: no spread to judge by"
        return (
            f"{number(interval.middle)}{self._unit}, 90% within {number(interval.low)} and "
            f"{number(interval.high)}, {of_seeds}"
        )


@dataclass(frozen=True, kw_only=True)
class BenchRatio:
    """column(over) / column(under) of SegNet's rows lies above `low`; each in its best engine.

    Two times are compared only if one call of the benchmark measured both.
    """

    words: str
    unit: str = ""
    column: str
    over: str
    under: str
    group: str = "segnet"
    batch: int
    low: float

    arms: tuple[Arm, ...] = ()  # it needs no run

    @property
    def quantity(self) -> str:
        return f"{self.words}: {self.over.upper()} over {self.under.upper()}"

    def judge(self, evidence: Evidence) -> Finding:
        over, under = (self._best(evidence.bench, who) for who in (self.over, self.under))
        region = in_words(self.low, math.inf, "")
        rule = f"{self.quantity} {region}"
        if over is None or under is None:
            found = "the benchmark's file has no such rows: deepcontrol bench"
            return Finding(self.quantity, region, rule, found, (), "undecided")
        unit = self.unit and f" {self.unit}"
        values = tuple(
            Value(self.words, f"{who.upper()} ({row['engine']})", f"{row[self._middle]}{unit}")
            for who, row in ((self.over, over), (self.under, under))
        )
        if self._timed and over.get("run") != under.get("run"):
            found = "measured in two calls of the benchmark: deepcontrol bench --no-resume"
            return Finding(self.quantity, region, rule, found, values, "undecided")
        interval = Interval(*(self._ratio(over, under, ends) for ends in self._ends))
        verdict = decide(interval, self.low, math.inf)
        return Finding(self.quantity, region, rule, f"{interval.middle:.2f}", values, verdict)

    def at_rates_times(self, factor: float) -> "BenchRatio":
        del factor  # a step takes as long at any rate
        return self

    def rests_on(self, rows: Sequence[Row]) -> list[Row]:
        """Those of the benchmark's rows that decide."""
        found = (self._best(rows, who) for who in (self.over, self.under))
        return [row for row in found if row is not None]

    @property
    def _timed(self) -> bool:
        return self.column == "ms"

    @property
    def _middle(self) -> str:
        return f"{self.column}_p50" if self._timed else self.column

    @property
    def _ends(self) -> tuple[tuple[str, str], ...]:
        """Columns of the ratio's middle and of its ends: a time has a spread, memory has none."""
        if not self._timed:
            return ((self.column, self.column),) * 3
        p20, p50, p80 = (f"{self.column}_{p}" for p in ("p20", "p50", "p80"))
        return (p50, p50), (p20, p80), (p80, p20)

    def _ratio(self, over: Row, under: Row, columns: tuple[str, str]) -> float:
        return float(over[columns[0]]) / float(under[columns[1]])

    def _best(self, rows: Sequence[Row], contender: str) -> Row | None:
        key = {"group": self.group, "contender": contender, "batch": str(self.batch)}
        key |= {"dtype": "bf16", "width": "1", "size": "256x512"}
        found = [r for r in rows if key.items() <= r.items() and self._middle in r]
        # The fastest engine for time, the leanest for memory; of batches the largest one.
        sign = -1 if self.column == "largest_batch" else 1
        return min(found, key=lambda r: sign * float(r[self._middle]), default=None)


def decide(interval: Interval, low: float, high: float) -> Verdict:
    """By where the interval lies: in the open region, outside of it, or across its border."""
    # An end that is infinite is no border, not even for what diverged.
    above = math.isinf(low) or interval.low > low
    below = math.isinf(high) or interval.high < high
    if above and below:
        return "reproduced"
    beside = (not above and interval.high <= low) or (not below and interval.low >= high)
    return "not reproduced" if beside else "undecided"


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Of a claim, from those of its checks."""
    if "not reproduced" in verdicts:
        return "not reproduced"
    return "reproduced" if verdicts and set(verdicts) == {"reproduced"} else "undecided"


def in_words(low: float, high: float, unit: str) -> str:
    """
    >>> in_words(-1, 1, " points"), in_words(2, math.inf, " points"), in_words(0.6, 1, "")
    ('within 1 point of 0', 'above 2 points', 'between 0.6 and 1')
    """

    def many(number: float) -> str:
        return f"{number:g}{' point' if (number, unit) == (1, ' points') else unit}"

    if math.isinf(high):
        return f"above {many(low)}"
    if math.isinf(low):
        return f"below {many(high)}"
    return f"within {many(high)} of 0" if low == -high else f"between {low:g} and {many(high)}"


def spread(numbers: Sequence[float], unit: str = "", digits: int = 2) -> str:
    """The mean over seeds, the deviation, and how many there are.

    >>> spread([9.5, 10.5], "%"), spread([math.inf, 9.5]), spread([])
    ('10.00 ± 0.71 % (n=2)', '1 of 2 diverged', 'not run')
    """
    if not numbers:
        return "not run"
    diverged = sum(map(math.isinf, numbers))
    if diverged:
        return f"{diverged} of {len(numbers)} diverged"
    if any(map(math.isnan, numbers)):
        return "nothing, of a run that diverged or has none"
    deviation = f" ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    mean = f"{fmean(numbers):.{digits}f}{deviation}{unit and f' {unit}'}"
    return f"{mean} (n={len(numbers)})"
