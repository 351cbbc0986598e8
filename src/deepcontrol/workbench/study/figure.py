"""Figures and tables of a study: panels of arms, learning-rate grid, and sweeps.

A sweep is the final error of tuned arms over a setting, such as the batch size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ..folders.studyfolder import Cell, Line, Metric, Panel, Point, Series, Sweep
from .arms import Arm, Tuned, agc, bn, gn
from .claims import (
    CLASSNET_AGC,
    CLASSNET_BN,
    CLIP,
    HEAVY,
    IDENTITY,
    IDENTITY_CLIPPED,
    IDENTITY_CLIPPED_SINGLE,
    LIGHT,
    UNIT,
)
from .measures import FINAL, Curve
from .rules import choose, measure_arm, measure_contender


@dataclass(frozen=True)
class PanelSpec:
    """A chart with a line for each arm."""

    letter: str
    title: str
    metric: Metric
    arms: tuple[Arm, ...]

    def label(self, arm: Arm) -> str:
        """Label an arm by its differences to the panel's other arms.

        >>> arms = (agc(8), agc(8, 0.32), agc(8, 0.32, init="unit"))
        >>> spec = PanelSpec("a", "", "val_error", arms)
        >>> [spec.label(arm) for arm in spec.arms]
        ['lr 0.16', 'lr 0.32', 'lr 0.32, unit init']
        """
        words = [arm.norm.upper()] * (len({a.norm for a in self.arms}) > 1)
        words += [f"batch {arm.batch}"] * (len({a.batch for a in self.arms}) > 1)
        words += [f"lr {arm.lr:g}"] * (len({a.lr for a in self.arms}) > 1)
        return ", ".join([*words, *arm.variants.values()]) or "default"

    def panel(self, runs: Mapping[Arm, Sequence[str]], lr_scale: float) -> Panel:
        """Return the panel with the names of the runs of each arm."""
        scaled = replace(self, arms=tuple(arm.scale_lr(lr_scale) for arm in self.arms))
        lines = (Line(scaled.label(arm), tuple(runs.get(arm, ()))) for arm in scaled.arms)
        return Panel(self.letter, self.title, self.metric, tuple(lines))


BOTH, BOTH_CLASSNET = (agc(4), bn(4)), (CLASSNET_AGC, CLASSNET_BN)

FIGURE_1 = (
    PanelSpec("a", "BN, SegNet: batch sizes", "val_error", (bn(1), bn(4), bn(8))),
    PanelSpec("b", "AGC, SegNet: batch sizes", "val_error", (agc(1), agc(4), agc(8))),
    PanelSpec("c", "AGC and BN, SegNet, batch 4: error", "val_error", BOTH),
    PanelSpec("d", "AGC and BN, ClassNet, batch 4: error", "val_error", BOTH_CLASSNET),
    PanelSpec("e", "AGC and BN, SegNet, batch 4: loss", "val_loss", BOTH),
    PanelSpec("f", "AGC and BN, ClassNet, batch 4: loss", "val_loss", BOTH_CLASSNET),
    PanelSpec("g", "BN, SegNet, batch 8: learning rates", "val_error", (bn(8, 0.08), bn(8))),
    PanelSpec(
        "h",
        "AGC, SegNet, batch 8: learning rates",
        "val_error",
        (agc(8, 0.08), agc(8), agc(8, 0.32), agc(8, 0.64)),
    ),
)

# All of SegNet. A study draws the arms that it trains.
FIGURE_2 = (
    PanelSpec("a", "AGC and BN, batch 1", "val_error", (agc(1), bn(1))),
    PanelSpec(
        "b",
        "AGC, batch 4: initialization",
        "val_error",
        (agc(4), IDENTITY, IDENTITY_CLIPPED, UNIT),
    ),
    PanelSpec(
        "c",
        "AGC, batch 4: lambda or gamma fixed",
        "val_error",
        (agc(4), *(agc(4, fixed_lambda=value) for value in (0.0, 1.0)), agc(4, fixed_gamma=1.0)),
    ),
    PanelSpec("d", "AGC, batch 4: class weights of mean 4", "val_error", (agc(4), LIGHT, HEAVY)),
    PanelSpec(
        "e", "AGC, batch 1: learning rates", "val_error", (agc(1), agc(1, 0.08), agc(1, 0.16))
    ),
    PanelSpec(
        "f",
        "AGC, batches 4 and 8: more learning rates",
        "val_error",
        (LIGHT, agc(4), agc(4, 0.16), agc(8, 0.02)),
    ),
    PanelSpec(
        "g",
        "AGC, batch 8: highest learning rate",
        "val_error",
        (
            agc(8, 0.32),
            agc(8, 0.64),
            agc(8, 0.64, init="identity"),
            agc(8, 0.64, init="unit"),
            agc(8, 0.64, clip_grad_norm=CLIP),
            agc(8, 0.64, init="identity", clip_grad_norm=CLIP),
        ),
    ),
    PanelSpec(
        "h",
        "AGC: clipping at the paper's learning rates",
        "val_error",
        (
            agc(4),
            agc(4, clip_grad_norm=CLIP),
            agc(1),
            agc(1, clip_grad_norm=CLIP),
            IDENTITY_CLIPPED_SINGLE,
        ),
    ),
    PanelSpec("i", "AGC and GN, batch 1", "val_error", (agc(1), gn(1))),
    PanelSpec("j", "GN: batch sizes", "val_error", (gn(1), gn(4), gn(8))),
)


def figure_2(
    runs: Mapping[Arm, Sequence[str]], lr_scale: float, specs: Sequence[PanelSpec] = FIGURE_2
) -> tuple[Panel, ...]:
    """Return the panels that compare something figure 1 does not draw."""
    in_figure_1 = {arm for spec in FIGURE_1 for arm in spec.arms}
    panels = []
    for spec in specs:
        arms = tuple(arm for arm in spec.arms if arm.scale_lr(lr_scale) in runs)
        if len(arms) > 1 and (arms == spec.arms or not in_figure_1.issuperset(arms)):
            panels.append(replace(spec, arms=arms).panel(runs, lr_scale))
    return tuple(panels)


def lr_grid(curves: Mapping[Arm, Sequence[Curve]]) -> tuple[Cell, ...]:
    """Return AGC's final error in SegNet by batch size and learning rate.

    The grid is empty if no batch size has more than one learning rate.
    """
    errors = {
        arm: [FINAL.of(curve) for curve in runs]
        for arm, runs in sorted(curves.items(), key=lambda item: (item[0].batch, item[0].lr))
        if runs and arm == agc(arm.batch, arm.lr)
    }
    batches = [arm.batch for arm in errors]
    if len(batches) == len(set(batches)):
        return ()
    lowest = {
        batch: min(fmean(e) for arm, e in errors.items() if arm.batch == batch) for batch in batches
    }
    return tuple(
        Cell(
            batch=arm.batch,
            lr=arm.lr,
            error=measure_arm(FINAL, arm, values),
            is_best=batches.count(arm.batch) > 1
            and math.isfinite(fmean(values))
            and fmean(values) == lowest[arm.batch],
        )
        for arm, values in errors.items()
    )


# Sweeps


Curves = Mapping[Arm, Sequence[Curve]]


@dataclass(frozen=True)
class SweepSpec:
    """A chart with a line for each label, and a tuned arm for each of its points."""

    title: str
    x_label: str
    series: tuple[tuple[str, tuple[tuple[int, Tuned], ...]], ...]

    def sweep(self, curves: Curves) -> Sweep:
        """Return the sweep with measured errors; leave out points without a finished run."""
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
