"""What is measured, and in which order: the most telling first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .record import Row
from .settings import Bench


@dataclass(frozen=True)
class Case:
    """One measurement: a row of the CSV, or in a few groups several."""

    group: str
    contender: str
    engine: str
    batch: int
    size: tuple[int, ...]
    dtype: str
    width: float = 1.0

    @property
    def key(self) -> Row:
        """The case as the first columns of its rows."""
        return {
            "group": self.group,
            "contender": self.contender,
            "engine": self.engine,
            "batch": str(self.batch),
            "size": "x".join(map(str, self.size)),
            "dtype": self.dtype,
            "width": f"{self.width:g}",
        }

    def __str__(self) -> str:
        size = "x".join(map(str, self.size))
        parts = (self.group, size, f"batch {self.batch}", self.dtype, self.contender, self.engine)
        return " ".join(parts)


@dataclass(frozen=True)
class Network:
    """What a network is measured on unless the user says otherwise."""

    size: tuple[int, ...]
    batches: tuple[int, ...]
    dtypes: tuple[str, ...]
    width: float = 1.0


NETWORKS = {
    "segnet": Network((256, 512), (8, 1, 4), ("bf16", "tf32")),
    "resnet50": Network((224, 224), (64, 8, 1), ("bf16",)),
    "unet3d": Network((96, 96, 96), (1,), ("bf16",)),
}
QUICK = {
    "segnet": Network((64, 64), (2,), ("bf16", "tf32"), 0.125),
    "resnet50": Network((64, 64), (2,), ("bf16",)),
    "unet3d": Network((32, 32, 32), (2,), ("bf16",), 0.125),
}
CONTENDERS = ("agc", "bn", "none", "one-liner", "bn-byte-pool", "gn", "in")
ENGINES = ("eager", "compile", "graph", "compile+graph")

FIRST = (
    ("agc", "graph"),
    ("agc", "compile+graph"),
    ("bn", "eager"),
    ("bn", "compile+graph"),
    ("none", "eager"),
    ("none", "compile+graph"),
)
CELLS = (
    ("segnet", 8, "bf16"),
    ("segnet", 1, "bf16"),
    ("resnet50", 64, "bf16"),
    ("unet3d", 1, "bf16"),
    ("segnet", 8, "tf32"),
    ("resnet50", 8, "bf16"),
    ("resnet50", 1, "bf16"),
    ("segnet", 4, "bf16"),
    ("segnet", 1, "tf32"),
    ("segnet", 4, "tf32"),
)


MAIN = 4  # so many of the cells are the main ones


def wanted(asked: Sequence[str], there: Iterable[str]) -> tuple[str, ...]:
    """Those of `there` that were asked for; all of them if nothing was."""
    return tuple(a for a in there if not asked or a in asked)


def network_cases(settings: Bench) -> list[Case]:
    """Every training step to time on a GPU, the most telling first."""
    networks = QUICK if settings.quick else NETWORKS
    cases = [
        Case(group, contender, engine, batch, network.size, dtype, network.width)
        for group, network in networks.items()
        if group in wanted(settings.only, networks)
        for batch in settings.batches or network.batches
        for dtype in settings.dtypes or network.dtypes
        for contender in wanted(settings.contenders, CONTENDERS)
        for engine in wanted(settings.engines, ENGINES)
        if contender != "bn-byte-pool" or group == "segnet"  # the others have no unpooling
    ]
    return sorted(cases, key=importance)


def importance(case: Case) -> tuple[int, int, int]:
    """What to sort by: the few telling pairs in every cell, then all the rest cell by cell."""
    pair, cell = (case.contender, case.engine), (case.group, case.batch, case.dtype)
    first = FIRST.index(pair) if pair in FIRST else len(FIRST)
    of_cell = CELLS.index(cell) if cell in CELLS else len(CELLS)
    return tier(case), of_cell, first


def tier(case: Case) -> int:
    """0 for the telling pairs in the main cells, 1 for those pairs elsewhere, 2 for the rest."""
    if (case.contender, case.engine) not in FIRST:
        return 2
    return 0 if (case.group, case.batch, case.dtype) in CELLS[:MAIN] else 1
