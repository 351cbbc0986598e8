"""Figure 1 of the paper: its eight panels, and which arms each of them draws."""

from dataclasses import dataclass
from typing import Literal

from .arms import Arm, agc, bn
from .claims import CLASSNET_AGC, CLASSNET_BN


@dataclass(frozen=True)
class Panel:
    """One chart: a line for each arm."""

    letter: str
    title: str
    metric: Literal["val_error", "val_loss"]
    lines: tuple[Arm, ...]

    def label(self, arm: Arm) -> str:
        """What tells an arm from the panel's others."""
        if len({a.norm for a in self.lines}) > 1:
            return arm.norm.upper()
        return f"batch {arm.batch}, rate {arm.rate:g}"


BOTH, BOTH_CLASSNET = (agc(4), bn(4)), (CLASSNET_AGC, CLASSNET_BN)

PANELS = (
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
