"""What `deepcontrol bench` can be asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Group = Literal["segnet", "resnet50", "unet3d", "ops", "shares", "fit", "neuron", "inference"]
Contender = Literal[
    "agc", "one-liner", "bn", "bn-byte-pool", "bn-folded", "gn", "in", "none"
]  # their words are in contenders.py
Engine = Literal["eager", "compile", "graph", "compile+graph"]
Dtype = Literal["bf16", "tf32", "fp32"]


@dataclass(frozen=True)
class Bench:
    """Time and memory of AGC beside BatchNorm, other norms and none, on this machine.

    Correctness is checked first; then whole training steps are timed, each op alone against the
    fewest bytes it can move, where the GPU's time goes, and the largest batch that fits into
    12 GiB. The most telling cases come first, so a run that is cut short is of use, and the CSV is
    written after each. A machine without a GPU gets a small set for its CPU.

    Ratios compare cases of one call; where a ratio spans two calls, the table marks it with ~.
    """

    only: tuple[Group, ...] = ()
    """Which groups; all if none is named. neuron and inference are the CPU's."""
    contenders: tuple[Contender, ...] = ()
    """Which contenders; all if none is named. one-liner is Eq. 1 typed in PyTorch; bn, gn, in and
    none are stock PyTorch; bn-byte-pool is bn with this library's pooling; bn-folded is a CPU's."""
    engines: tuple[Engine, ...] = ()
    """How steps are run; all that the device has if none is named, on a CPU eager alone."""
    batches: tuple[int, ...] = ()
    """Batch sizes, in place of each group's own."""
    dtypes: tuple[Dtype, ...] = ()
    """bf16 (autocast), tf32, or fp32 without TF32, in place of each group's own."""
    steps: int = 30
    """Timed steps of each case, at least 5."""
    minutes: float | None = None
    """Start no case after this time; the next call goes on from there."""
    quick: bool = False
    """Tiny networks and sizes: to see that all of it runs. The times mean nothing."""
    out: Path | None = None
    """The CSV; benchmarks/results/bench-cuda.csv or -cpu.csv unless told otherwise."""
    chart: Path | None = None
    """The picture; beside the CSV unless told otherwise."""
    resume: bool = True
    """Keep the CSV's rows of this hardware, these versions and this source; measure the rest."""
    report: bool = False
    """Measure nothing: the table and the picture of what the CSV holds."""

    def __post_init__(self) -> None:
        if self.steps < 5:
            raise ValueError(f"--steps must be at least 5 for a spread, got {self.steps}")
        if any(batch < 1 for batch in self.batches):
            raise ValueError(f"--batches must be positive, got {self.batches}")
