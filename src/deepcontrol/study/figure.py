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
    lines: tuple[tuple[str, Arm], ...]


def batches(kind: str, arms: tuple[Arm, ...]) -> tuple[tuple[str, Arm], ...]:
    return tuple((f"{kind}, batch {arm.batch}, rate {arm.rate:g}", arm) for arm in arms)


BOTH = (("AGC", agc(4)), ("BN", bn(4)))
BOTH_CLASSNET = (("AGC", CLASSNET_AGC), ("BN", CLASSNET_BN))

PANELS = (
    Panel("a", "BN, SegNet: batches", "val_error", batches("BN", (bn(1), bn(4), bn(8)))),
    Panel("b", "AGC, SegNet: batches", "val_error", batches("AGC", (agc(1), agc(4), agc(8)))),
    Panel("c", "AGC and BN, SegNet, batch 4: error", "val_error", BOTH),
    Panel("d", "AGC and BN, ClassNet, batch 4: error", "val_error", BOTH_CLASSNET),
    Panel("e", "AGC and BN, SegNet, batch 4: loss", "val_loss", BOTH),
    Panel("f", "AGC and BN, ClassNet, batch 4: loss", "val_loss", BOTH_CLASSNET),
    Panel("g", "BN, SegNet, batch 8: rates", "val_error", batches("BN", (bn(8, 0.08), bn(8)))),
    Panel(
        "h",
        "AGC, SegNet, batch 8: rates",
        "val_error",
        batches("AGC", (agc(8, 0.08), agc(8), agc(8, 0.32), agc(8, 0.64))),
    ),
)
