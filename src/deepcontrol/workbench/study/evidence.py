"""What verdicts rest on: the runs that are over, and the benchmark's rows."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ..bench.results import Row, read_rows
from .arms import Arm
from .claims import Claim
from .jobs import RUNS, finished_curve
from .measures import Curve
from .pack import BENCH as PACKED
from .queue import Queue
from .rules import BenchRatio, Evidence
from .settings import Reproduce

BENCH = Path("benchmarks/results/bench-cuda.csv")  # where `deepcontrol bench` writes


def find_evidence(settings: Reproduce, queue: Queue) -> Evidence:
    """Of the runs in a study's folder. One whose files do not say it all any more has failed."""
    curves: dict[Arm, list[Curve]] = defaultdict(list)
    for entry in queue.entries.values():
        if entry.state in ("running", "elsewhere"):  # its last lines may be half written
            continue
        try:
            curve = finished_curve(entry.job)
        except ValueError as error:
            entry.state, again = "failed", f"remove {RUNS}/{entry.job.name} to have it made again"
            entry.fault = f"it is damaged: {error}; {again}"
            continue
        if curve is not None:
            curves[entry.job.arm].append(curve)
    return Evidence(curves, bench_rows(settings))


def bench_rows(settings: Reproduce) -> list[Row]:
    """From the file that was named, from this repository's, or from a packed study's own."""
    usual = BENCH if BENCH.exists() else settings.out / PACKED
    return read_rows(settings.bench or usual)


def rows_that_decide(claims: Sequence[Claim], *sources: Sequence[Row]) -> list[Row]:
    """The benchmark's rows that claims rest on: each claim's from the first that has any."""
    decide: list[Row] = []
    for claim in claims:
        for rows in sources:
            found = [r for c in claim.checks if isinstance(c, BenchRatio) for r in c.rests_on(rows)]
            if found:
                decide += [dict(row) for row in found]
                break
    return [row for i, row in enumerate(decide) if row not in decide[:i]]
