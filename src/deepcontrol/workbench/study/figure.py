"""The figures of a study: the paper's figure 1, and what it does not show; which arms they draw."""

from dataclasses import dataclass
from typing import Literal

from .arms import Arm, agc, bn
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


@dataclass(frozen=True)
class Panel:
    """One chart: a line for each arm."""

    letter: str
    title: str
    metric: Literal["val_error", "val_loss"]
    lines: tuple[Arm, ...]

    def label(self, arm: Arm) -> str:
        """What tells an arm from the panel's others.

        >>> panel = Panel("a", "", "val_error", (agc(8), agc(8, 0.32), agc(8, 0.32, init="unit")))
        >>> [panel.label(arm) for arm in panel.lines]
        ['rate 0.16', 'rate 0.32', 'rate 0.32, unit']
        """
        words = [arm.norm.upper()] * (len({a.norm for a in self.lines}) > 1)
        words += [f"batch {arm.batch}"] * (len({a.batch for a in self.lines}) > 1)
        words += [f"rate {arm.rate:g}"] * (len({a.rate for a in self.lines}) > 1)
        return ", ".join([*words, *arm.specials]) or "He's, all learned"


BOTH, BOTH_CLASSNET = (agc(4), bn(4)), (CLASSNET_AGC, CLASSNET_BN)

FIGURE_1 = (
    Panel("a", "BN, SegNet: batches", "val_error", (bn(1), bn(4), bn(8))),
    Panel("b", "AGC, SegNet: batches", "val_error", (agc(1), agc(4), agc(8))),
    Panel("c", "AGC and BN, SegNet, batch 4: error", "val_error", BOTH),
    Panel("d", "AGC and BN, ClassNet, batch 4: error", "val_error", BOTH_CLASSNET),
    Panel("e", "AGC and BN, SegNet, batch 4: loss", "val_loss", BOTH),
    Panel("f", "AGC and BN, ClassNet, batch 4: loss", "val_loss", BOTH_CLASSNET),
    Panel("g", "BN, SegNet, batch 8: rates", "val_error", (bn(8, 0.08), bn(8))),
    Panel(
        "h",
        "AGC, SegNet, batch 8: rates",
        "val_error",
        (agc(8, 0.08), agc(8), agc(8, 0.32), agc(8, 0.64)),
    ),
)

# All of SegNet. A study draws as much of it as it trains.
FIGURE_2 = (
    Panel("a", "AGC and BN, batch 1", "val_error", (agc(1), bn(1))),
    Panel(
        "b",
        "AGC, batch 4: how filters start",
        "val_error",
        (agc(4), IDENTITY, IDENTITY_CLIPPED, UNIT),
    ),
    Panel(
        "c",
        "AGC, batch 4: lambda or gamma fixed",
        "val_error",
        (agc(4), *(agc(4, fixed_lambda=value) for value in (0.0, 1.0)), agc(4, fixed_gamma=1.0)),
    ),
    Panel("d", "AGC, batch 4: class weights of mean 4", "val_error", (agc(4), LIGHT, HEAVY)),
    Panel("e", "AGC, batch 1: rates", "val_error", (agc(1), agc(1, 0.08), agc(1, 0.16))),
    Panel(
        "f",
        "AGC, batches 4 and 8: further rates",
        "val_error",
        (LIGHT, agc(4), agc(4, 0.16), agc(8, 0.02)),
    ),
    Panel(
        "g",
        "AGC, batch 8: the highest rate",
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
    Panel(
        "h",
        "AGC: gradients clipped at the paper's rates",
        "val_error",
        (
            agc(4),
            agc(4, clip_grad_norm=CLIP),
            agc(1),
            agc(1, clip_grad_norm=CLIP),
            IDENTITY_CLIPPED_SINGLE,
        ),
    ),
)
