"""Choose the cases to measure, in order of priority."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from .results import Row

Group = Literal[
    "segnet",
    "resnet50",
    "unet3d",
    "nnunet",
    "nnunet-res",
    "ops",
    "profile",
    "max-batch",
    "neuron",
    "inference",
]
Contender = Literal[
    "agc",
    "one-liner",
    "bn",
    "bn-byte-pool",
    "bn-folded",
    "gn",
    "in",
    "frn",
    "evonorm-s0",
    "none",
]
Engine = Literal["eager", "compile", "reduce-overhead", "graphed", "graph", "compile+graph"]
Dtype = Literal["bf16", "tf32", "fp32"]
Layout = Literal["channels_last", "contiguous"]


@dataclass(frozen=True)
class Bench:
    """Measure step time and memory of AGC, BatchNorm and other norms.

    AGC's loss and gradients are checked against fp64 first. Then the command measures whole
    training steps, each op alone, the GPU time per kind of kernel and the largest batch that
    trains in 12 GiB. The CSV is written after every case and the most important cases run first,
    so an interrupted run is still useful. Without a GPU, a small set of cases runs on the CPU.

    A ratio between two different runs of this command is marked with ~ in the table.
    """

    only: Annotated[tuple[Group, ...], arg(help_behavior_hint="(default: all)")] = ()
    """Groups to measure. nnunet-res is nnU-Net with a residual encoder. neuron and inference run on
    the CPU only."""
    main: bool = False
    """Measure only the main cases: agc, bn and none in SegNet, ResNet-50 and the 3-D U-Net, in
    bf16."""
    contenders: Annotated[tuple[Contender, ...], arg(help_behavior_hint="(default: all)")] = ()
    """Contenders to measure. one-liner is Eq. 1 in plain PyTorch; bn, gn, in and none are stock
    PyTorch; frn and evonorm-s0 are timm's if it is installed; bn-byte-pool is bn with this
    library's pooling; bn-folded runs on the CPU only."""
    engines: Annotated[
        tuple[Engine, ...], arg(help_behavior_hint="(default: all on a GPU, eager on a CPU)")
    ] = ()
    """How the training step is executed: compile is torch.compile, graph captures the whole step
    (TrainingStep). In reduce-overhead and graphed an ordinary loop calls a model made by
    torch.compile(mode="reduce-overhead") or by deepcontrol.graphed."""
    batches: Annotated[tuple[int, ...], arg(help_behavior_hint="(default: set per group)")] = ()
    """Batch sizes."""
    dtypes: Annotated[tuple[Dtype, ...], arg(help_behavior_hint="(default: set per group)")] = ()
    """Precisions: bf16 (autocast), tf32, or fp32 without TF32."""
    sizes: Annotated[
        tuple[str, ...],
        arg(metavar="[HxW|DxHxW [...]]", help_behavior_hint="(default: set per group)"),
    ] = ()
    """Image sizes to select, such as 96x96x96."""
    layouts: Annotated[
        tuple[Layout, ...],
        arg(help_behavior_hint="(default: both for nnU-Net, else channels_last)"),
    ] = ()
    """Memory formats of the feature maps."""
    steps: int = 30
    """Timed steps per case, at least 5."""
    minutes: Annotated[float | None, arg(metavar="MINUTES", help_behavior_hint="")] = None
    """Start no new case after this time. The next call continues from there."""
    quick: bool = False
    """Smoke test with tiny networks and images. The times are meaningless."""
    out: Annotated[
        Path | None,
        arg(metavar="PATH", help_behavior_hint="(default: benchmarks/results/bench-DEVICE.csv)"),
    ] = None
    """CSV file. Existing rows are kept with --resume."""
    chart: Annotated[
        Path | None, arg(metavar="PATH", help_behavior_hint="(default: next to the CSV)")
    ] = None
    """PNG file of the chart."""
    resume: bool = True
    """Keep rows of the CSV that match this hardware, these versions and this source code."""
    report: bool = False
    """Measure nothing; print the tables and draw the chart from the CSV."""

    def __post_init__(self) -> None:
        if self.steps < 5:
            raise ValueError(f"--steps must be at least 5 for a spread, got {self.steps}")
        known = {size_name(size) for network in NETWORKS.values() for size in network.sizes}
        if unknown := set(self.sizes) - known:
            raise ValueError(
                f"unknown --sizes {' '.join(sorted(unknown))}: choose from "
                f"{', '.join(sorted(known))}"
            )
        if any(batch < 1 for batch in self.batches):
            raise ValueError(f"--batches must be positive, got {self.batches}")
        if self.minutes is not None and not self.minutes >= 0:  # also NaN
            raise ValueError(f"--minutes must be at least 0, got {self.minutes}")


@dataclass(frozen=True)
class Case:
    """One measurement. Most groups write one row per case, `profile` writes several."""

    group: str
    contender: str
    engine: str
    batch: int
    size: tuple[int, ...]
    dtype: str
    width: float = 1.0
    layout: str = "channels_last"

    @property
    def key(self) -> Row:
        """The first columns of the case's rows."""
        return {
            "group": self.group,
            "contender": self.contender,
            "engine": self.engine,
            "batch": str(self.batch),
            "size": size_name(self.size),
            "dtype": self.dtype,
            "width": f"{self.width:g}",
            "layout": self.layout,
        }


@dataclass(frozen=True)
class Network:
    """Default image sizes, batch sizes, precisions and memory formats of a network."""

    sizes: tuple[tuple[int, ...], ...]
    batches: tuple[int, ...]
    dtypes: tuple[str, ...] = ("bf16",)
    width: float = 1.0
    layouts: tuple[str, ...] = ("channels_last",)

    @property
    def size(self) -> tuple[int, ...]:
        """The first size."""
        return self.sizes[0]


_NNUNET = Network(((128, 128, 128), (96, 96, 96)), (2, 1), layouts=("channels_last", "contiguous"))
_QUICK_NNUNET = Network(((64, 64, 64),), (2,), width=0.125, layouts=("channels_last",))
NETWORKS = {
    "segnet": Network(((256, 512),), (8, 1, 4), ("bf16", "tf32")),
    "resnet50": Network(((224, 224),), (64, 8, 1)),
    "unet3d": Network(((96, 96, 96),), (1,)),
    "nnunet": _NNUNET,
    "nnunet-res": _NNUNET,
}
QUICK = {
    "segnet": Network(((64, 64),), (2,), ("bf16", "tf32"), 0.125),
    "resnet50": Network(((64, 64),), (2,)),
    "unet3d": Network(((32, 32, 32),), (2,), width=0.125),
    "nnunet": _QUICK_NNUNET,
    "nnunet-res": _QUICK_NNUNET,
}
CPU_COMPARISONS = {  # contenders, batches, size, width
    "neuron": (("agc", "bn", "none"), (1,), (256, 512), 1.0),
    "inference": (("agc", "bn", "bn-folded", "none"), (1,), (256, 512), 1.0),
    "segnet": (("agc", "bn", "none"), (1, 4), (128, 256), 0.25),
}
QUICK_CPU_SIZES = {"neuron": (32, 32), "inference": (32, 32), "segnet": (64, 64)}

CONTENDERS = ("agc", "bn", "none", "in", "gn", "frn", "evonorm-s0", "bn-byte-pool", "one-liner")
ENGINES = ("eager", "compile", "graph", "compile+graph", "graphed", "reduce-overhead")
SEGNET_ONLY = ("bn-byte-pool",)  # the other networks have no unpooling
ONLY_2D = ("frn", "evonorm-s0")
ONLY_NNUNET = ("agc", "bn", "none", "in")

# The comparison to measure first.
MAIN_CONTENDERS = ("agc", "bn", "none")
MAIN_ENGINES = ("eager", "compile", "graph", "compile+graph")
CELLS = (  # network, batch and precision, by priority
    ("segnet", 8, "bf16"),
    ("segnet", 1, "bf16"),
    ("resnet50", 64, "bf16"),
    ("unet3d", 1, "bf16"),
    ("resnet50", 1, "bf16"),
    ("nnunet", 2, "bf16"),
    ("nnunet-res", 2, "bf16"),
    ("segnet", 8, "tf32"),
    ("resnet50", 8, "bf16"),
    ("segnet", 4, "bf16"),
    ("nnunet", 1, "bf16"),
    ("nnunet-res", 1, "bf16"),
    ("segnet", 1, "tf32"),
    ("segnet", 4, "tf32"),
)
MAIN_CELLS = CELLS[:5]


def selected(names: Sequence[str], available: Iterable[str]) -> tuple[str, ...]:
    """Filter `available` by the names that a flag gave; no names select everything."""
    return tuple(a for a in available if not names or a in names)


def network_cases(settings: Bench) -> list[Case]:
    """List the training steps to time on a GPU, in order of priority."""
    networks = QUICK if settings.quick else NETWORKS
    cases = [
        Case(group, contender, engine, batch, size, dtype, network.width, layout)
        for group, network in networks.items()
        if group in selected(settings.only, networks)
        for size in selected_sizes(settings, network)
        for layout in settings.layouts or network.layouts
        for batch in settings.batches or network.batches
        for dtype in settings.dtypes or network.dtypes
        for contender in selected(settings.contenders, CONTENDERS)
        for engine in selected(settings.engines, ENGINES)
        if exists(group, contender)
    ]
    if settings.main:
        cases = [case for case in cases if tier(case) == 0]
    return sorted(cases, key=priority)


def selected_sizes(settings: Bench, network: Network) -> tuple[tuple[int, ...], ...]:
    """Filter the sizes of a network by --sizes."""
    return tuple(s for s in network.sizes if not settings.sizes or size_name(s) in settings.sizes)


def size_name(size: tuple[int, ...]) -> str:
    """Format a size, as in the CSV.

    >>> size_name((96, 96, 96))
    '96x96x96'
    """
    return "x".join(map(str, size))


def exists(group: str, contender: str) -> bool:
    """Return whether a network can be built with a contender."""
    if group.startswith("nnunet"):
        return contender in ONLY_NNUNET
    if group == "unet3d" and contender in ONLY_2D:
        return False
    return contender not in SEGNET_ONLY or group == "segnet"


def max_batch_cases(settings: Bench) -> list[Case]:
    """List the searches for the largest batch. Their batch column is 0."""
    if settings.main or not selected(settings.only, ("max-batch",)):
        return []
    network = (QUICK if settings.quick else NETWORKS)["segnet"]
    return [
        Case("max-batch", contender, "eager", 0, network.size, "bf16", network.width)
        for contender in selected(settings.contenders, ("bn", "agc"))
    ]


def profile_cases(settings: Bench) -> list[Case]:
    """List the SegNet steps to profile."""
    if settings.main or not selected(settings.only, ("profile",)):
        return []
    network = (QUICK if settings.quick else NETWORKS)["segnet"]
    return [
        Case("profile", contender, "graph", batch, network.size, "bf16", network.width)
        for batch in settings.batches or (8, 1)
        for contender in selected(settings.contenders, ("agc", "bn", "none"))
    ]


def cpu_comparisons(settings: Bench) -> list[tuple[Case, ...]]:
    """List the comparisons to measure: tuples of cases that are interleaved."""
    engines = settings.engines or ("eager",)
    for engine in engines:
        if engine not in ("eager", "compile"):
            raise ValueError(
                f"CUDA graphs need a GPU, got --engines {engine}; use eager or compile on a CPU"
            )
    if settings.main or settings.sizes or settings.layouts:
        raise ValueError("--main, --sizes and --layouts need a GPU; leave them out on a CPU")
    if set(settings.dtypes) - {"fp32"}:
        raise ValueError(f"a CPU measures fp32 only, got --dtypes {' '.join(settings.dtypes)}")
    comparisons = []
    for group in selected(settings.only, CPU_COMPARISONS):
        contenders, batches, size, width = CPU_COMPARISONS[group]
        for batch in settings.batches or batches:
            size = QUICK_CPU_SIZES[group] if settings.quick else size
            shape = (batch, size, "fp32", width, "contiguous")
            cases = tuple(
                Case(group, contender, engine, *shape)
                for contender in selected(settings.contenders, contenders)
                for engine in engines
            )
            if cases:
                comparisons.append(cases)
    return comparisons


def priority(case: Case) -> tuple[int, int, int, int]:
    """Return a sort key: main cases, then the others cell by cell, engine by engine.

    The contenders of an engine follow each other, so that they see the same state of the host.
    """
    cell = (case.group, case.batch, case.dtype)
    cell_rank = CELLS.index(cell) if cell in CELLS else len(CELLS)
    return tier(case), cell_rank, ENGINES.index(case.engine), CONTENDERS.index(case.contender)


def tier(case: Case) -> int:
    """Return 0 for main contenders and engines in main cells, 1 in others, else 2."""
    contenders = ONLY_NNUNET if case.group.startswith("nnunet") else MAIN_CONTENDERS
    if case.contender not in contenders or case.engine not in MAIN_ENGINES:
        return 2
    return 0 if (case.group, case.batch, case.dtype) in MAIN_CELLS else 1
