"""Sweeps: the final error of tuned arms over a setting, such as the batch size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..folders.studyfolder import Cell, Point, Series, Sweep
from .arms import Arm, Tuned
from .measures import FINAL, Curve
from .rules import choose, measure_arm, measure_contender

Curves = Mapping[Arm, Sequence[Curve]]


@dataclass(frozen=True)
class SweepSpec:
    """A chart with a line for each label, and a tuned arm for each of its points."""

    title: str
    x_label: str
    series: tuple[tuple[str, tuple[tuple[int, Tuned], ...]], ...]

    def sweep(self, curves: Curves) -> Sweep:
        """Return the sweep with the measured errors. Points without a finished run are left out."""
        series = (
            Series(
                label, tuple(point(x, tuned, curves) for x, tuned in points if ran(tuned, curves))
            )
            for label, points in self.series
        )
        return Sweep(self.title, self.x_label, tuple(each for each in series if each.points))


def ran(tuned: Tuned, curves: Curves) -> bool:
    return any(curves.get(arm) for arm in tuned.arms)


def point(x: int, tuned: Tuned, curves: Curves) -> Point:
    """Return the error at the chosen learning rate, and those at all learning rates."""
    chosen = choose(tuned, curves)
    cells = (
        Cell(
            batch=arm.batch,
            lr=arm.lr,
            error=measure_arm(FINAL, arm, [FINAL.of(curve) for curve in curves.get(arm, ())]),
            is_best=arm == chosen,
        )
        for arm in tuned.arms
    )
    return Point(x, measure_contender(FINAL, tuned, curves)[0], tuple(cells))
