"""The bench from start to end: what is left to do, check, measure, write, show."""

import datetime
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from .cases import NETWORKS, Case, network_cases, tier, wanted
from .check import check_network
from .cpu import cpu_sets, measure_set
from .fit import measure_fit
from .measure import give_memory_back, measure_step
from .ops import measure_op, op_cases
from .record import Row, about, read_rows, source_hash, write_rows
from .settings import Bench
from .shares import measure_shares
from .table import tables


@dataclass(frozen=True)
class Turn:
    """Cases that are measured together: on a GPU one, on a CPU all that are compared."""

    cases: tuple[Case, ...]
    measure: Callable[[int], list[Row]]


def run_bench(settings: Bench, console: Console) -> int:
    """Measure what is asked for and not there yet, then show all of it; returns the exit code."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not console.is_terminal:
        console.width = 120  # a log has no edge to fold a table at
    out = settings.out or default_out(settings, device)
    if settings.report:
        rows = read_rows(out)
        if not rows:
            raise ValueError(f"{out} holds no rows to report")
    else:
        rows = measure_all(settings, device, out, console)
    for table in tables(rows):
        console.print(table)
    draw_chart(rows, settings.chart or out.with_suffix(".png"), console)
    return 0


def default_out(settings: Bench, device: str) -> Path:
    if settings.quick:
        return Path(
            f"out/bench-quick-{device}.csv"
        )  # not among the results: its times mean nothing
    return Path(f"benchmarks/results/bench-{device}.csv")


def measure_all(settings: Bench, device: str, out: Path, console: Console) -> list[Row]:
    """All rows, old and new; the CSV is written anew after each turn."""
    now = datetime.datetime.now(datetime.UTC)
    here = {**about(device), "source": source_hash(), "run": f"{now:%Y-%m-%dT%H:%M:%SZ}"}
    console.print(f"On {here['hardware']}, torch {here['torch']}.", highlight=False)
    if device == "cpu":
        console.print(
            "No CUDA device here: this is the small set for a CPU. Its ratios say nothing of a GPU."
        )
    turns = gpu_turns(settings) if device == "cuda" else cpu_turns(settings)
    if not turns:
        raise ValueError("nothing to measure on this machine with these flags")
    old = read_rows(out)
    rows = [row for row in old if settings.resume and holds(row, here)]
    if len(old) > len(rows):
        console.print(f"{len(old) - len(rows)} older rows of {escape(str(out))} go.")
    left = [turn for turn in turns if not is_done(turn, rows)]
    console.print(f"{len(turns) - len(left)} of {len(turns)} are done, {len(left)} to measure.")
    checked: set[str] = set()
    start = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for turn in progress.track(left, description="measuring"):
            if settings.minutes is not None and time.monotonic() - start > settings.minutes * 60:
                console.print(f"{settings.minutes:g} minutes are over: call again to go on.")
                break
            check_first(turn, device, checked, settings, console)
            new = [{**row, **here} for row in measure_turn(turn, settings.steps)]
            keys = [case.key for case in turn.cases]
            rows = [row for row in rows if not any(key.items() <= row.items() for key in keys)]
            rows += new
            write_rows(out, rows)
            for row in new:
                console.print(line(row), highlight=False, soft_wrap=True)
            clean_up(turn)
    console.print(f"Written to {escape(str(out))}", soft_wrap=True)
    return rows


def gpu_turns(settings: Bench) -> list[Turn]:
    """The most telling steps, then what takes a minute each, then the rest of the grid."""
    steps = network_cases(settings)
    network = next(iter(NETWORKS.values()))
    size, width = ((64, 64), 0.125) if settings.quick else (network.size, network.width)
    fit = [
        Case("fit", contender, "eager", 0, size, "bf16", width)
        for contender in wanted(settings.contenders, ("bn", "agc"))
        if wanted(settings.only, ("fit",))
    ]
    shares = [
        Case("shares", contender, "graph", batch, size, "bf16", width)
        for batch in settings.batches or (8, 1)
        for contender in wanted(settings.contenders, ("agc", "bn", "none"))
        if wanted(settings.only, ("shares",))
    ]
    ordered: list[tuple[Callable[[Case, int], list[Row]], Sequence[Case]]] = [
        (measure_step, [case for case in steps if tier(case) == 0]),
        (measure_shares, shares),
        (measure_fit, fit),
        (measure_op, op_cases(settings)),
        (measure_step, [case for case in steps if tier(case) > 0]),
    ]
    return [
        Turn((case,), functools.partial(measure, case))
        for measure, cases in ordered
        for case in cases
    ]


def cpu_turns(settings: Bench) -> list[Turn]:
    return [Turn(cases, functools.partial(measure_set, cases)) for cases in cpu_sets(settings)]


def holds(row: Row, here: Row) -> bool:
    """Whether an old row is what would be measured here and now; an error is tried again."""
    if "error" in row:
        return False
    same = [k for k in here if k not in ("run", "date")]
    return all(row.get(k) == here[k] for k in same if here[k])


def is_done(turn: Turn, rows: Sequence[Row]) -> bool:
    return all(any(case.key.items() <= row.items() for row in rows) for case in turn.cases)


def check_first(
    turn: Turn, device: str, checked: set[str], settings: Bench, console: Console
) -> None:
    """Check the network of a group before its first case; all other groups are SegNet's parts."""
    group = turn.cases[0].group
    network = group if group in NETWORKS else "segnet"
    if network in checked:
        return
    checked.add(network)
    width = 1.0 if device == "cuda" and not settings.quick else 0.125
    error = check_network(network, device, width)
    clean_up(turn)
    console.print(f"{network}: AGC's loss and gradients are right to {error:.1e}.", highlight=False)


def measure_turn(turn: Turn, steps: int) -> list[Row]:
    """The rows of a turn; if it fails, rows that say why, and the bench goes on."""
    try:
        return turn.measure(steps)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        why = f"{type(error).__name__}: {first}"[:300]
        return [{**case.key, "error": why} for case in turn.cases]


def clean_up(turn: Turn) -> None:
    """Nothing of a case may weigh on the next."""
    if any(case.engine.startswith("compile") for case in turn.cases):
        torch.compiler.reset()
    give_memory_back()


def line(row: Row) -> str:
    """What a log says of a row."""
    batch = "" if row["batch"] == "0" else f"batch {row['batch']} "  # what `fit` looks for
    what = (row["group"], row["size"], batch + row["dtype"], row["contender"], row["engine"])
    head = escape(" ".join(what) + ": ")
    if "error" in row:
        return f"{head}[bold red]failed[/]: {escape(row['error'])}"
    if "largest_batch" in row:
        return f"{head}{row['largest_batch']} is the largest batch in {row['limit_gib']} GiB"
    if "gpu_ms" in row:
        floor = f", floor {row['floor_ms']}" if "floor_ms" in row else ""
        return f"{head}{row['part']} {row['gpu_ms']} ms{floor}"
    if "us_p50" in row:
        return f"{head}{row['us_p50']} us, floor {row['floor_us']}"
    memory = row.get("activations_mib") or row.get("saved_mib")
    end = f", {memory} MiB" if memory else ""
    return f"{head}{row['ms_p50']} ms ({row['ms_p20']} to {row['ms_p80']}){end}"


def draw_chart(rows: Sequence[Row], path: Path, console: Console) -> None:
    try:
        from .chart import draw
    except ModuleNotFoundError as error:  # the numbers are worth having without a picture
        console.print(f"No chart: {error}. `pip install matplotlib`, then --report.")
        return
    if draw(rows, path):
        console.print(f"Drawn to {escape(str(path))}", soft_wrap=True)
