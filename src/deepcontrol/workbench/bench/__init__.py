"""`deepcontrol bench`: measure AGC (automatic gain control) against its peers.

AGC is checked first. Then the missing cases are measured and written to a CSV file, row by row.
"""

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

from .cases import (
    NETWORKS,
    Bench,
    Case,
    cpu_comparisons,
    max_batch_cases,
    network_cases,
    profile_cases,
    tier,
)
from .contenders import check_network
from .kernels import measure_op, measure_profile, op_cases
from .measure import free_memory, measure_interleaved, measure_max_batch, measure_step
from .results import (
    Row,
    draw_chart,
    provenance,
    read_rows,
    source_hash,
    tables,
    write_rows,
)

__all__ = ["Bench", "run_bench"]


@dataclass(frozen=True)
class Task:
    """Cases that are measured together: one on a GPU, a whole comparison on a CPU."""

    cases: tuple[Case, ...]
    measure: Callable[[int], list[Row]]


def run_bench(settings: Bench, console: Console) -> int:
    """Run `deepcontrol bench` and return the exit code."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not console.is_terminal:
        console.width = 120  # a log has no screen width
    out = settings.out or default_out(settings, device)
    if settings.report:
        rows = read_rows(out)
        if not rows:
            raise ValueError(f"{out} has no rows to report; run without --report to measure")
    else:
        rows = measure_all(settings, device, out, console)
    for table in tables(rows):
        console.print(table)
    show_chart(rows, settings.chart or out.with_suffix(".png"), console)
    return 0


def default_out(settings: Bench, device: str) -> Path:
    if settings.quick:  # these times are meaningless: keep them out of the results
        return Path(f"out/bench-quick-{device}.csv")
    return Path(f"benchmarks/results/bench-{device}.csv")


def measure_all(settings: Bench, device: str, out: Path, console: Console) -> list[Row]:
    """Measure the missing cases, write the CSV after each, and return all rows."""
    now = datetime.datetime.now(datetime.UTC)
    here = {**provenance(device), "source": source_hash(), "run": f"{now:%Y-%m-%dT%H:%M:%SZ}"}
    console.print(f"Hardware: {here['hardware']}; torch {here['torch']}", highlight=False)
    if device == "cpu":
        console.print(
            "No CUDA device found: measuring a small set of cases on the CPU. "
            "Its ratios do not apply to a GPU."
        )
    tasks = gpu_tasks(settings) if device == "cuda" else cpu_tasks(settings)
    if not tasks:
        raise ValueError("these flags select no case on this machine; try fewer flags")
    old = read_rows(out)
    rows = [row for row in old if settings.resume and is_valid(row, here)]
    if len(old) > len(rows):
        console.print(f"Discarding {len(old) - len(rows)} outdated rows of {escape(str(out))}.")
    missing = [task for task in tasks if not is_done(task, rows)]
    console.print(f"{len(tasks) - len(missing)} of {len(tasks)} tasks done, {len(missing)} left.")
    checked: set[str] = set()
    start = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for task in progress.track(missing, description="measuring"):
            if settings.minutes is not None and time.monotonic() - start > settings.minutes * 60:
                console.print(f"Stopped after {settings.minutes:g} minutes; run again to continue.")
                break
            check_first(task, device, checked, settings, console)
            new = [{**row, **here} for row in measure_task(task, settings.steps)]
            keys = [case.key for case in task.cases]
            rows = [row for row in rows if not any(key.items() <= row.items() for key in keys)]
            rows += new
            write_rows(out, rows)
            for row in new:
                console.print(log_line(row), highlight=False, soft_wrap=True)
            clean_up(task)
    if out.exists():
        console.print(f"Results: {escape(str(out))}", soft_wrap=True)
    return rows


def gpu_tasks(settings: Bench) -> list[Task]:
    """List the tasks: main training steps, small groups, the rest of the grid."""
    steps = network_cases(settings)
    ordered: list[tuple[Callable[[Case, int], list[Row]], Sequence[Case]]] = [
        (measure_step, [case for case in steps if tier(case) == 0]),
        (measure_profile, profile_cases(settings)),
        (measure_max_batch, max_batch_cases(settings)),
        (measure_op, op_cases(settings)),
        (measure_step, [case for case in steps if tier(case) > 0]),
    ]
    return [
        Task((case,), functools.partial(measure, case))
        for measure, cases in ordered
        for case in cases
    ]


def cpu_tasks(settings: Bench) -> list[Task]:
    return [
        Task(cases, functools.partial(measure_interleaved, cases))
        for cases in cpu_comparisons(settings)
    ]


def is_valid(row: Row, here: Row) -> bool:
    """Return whether a row has no error and the same hardware, versions and source."""
    if "error" in row:
        return False
    same = [k for k in here if k not in ("run", "date")]
    return all(row.get(k) == here[k] for k in same if here[k])


def is_done(task: Task, rows: Sequence[Row]) -> bool:
    return all(any(case.key.items() <= row.items() for row in rows) for case in task.cases)


def check_first(
    task: Task, device: str, checked: set[str], settings: Bench, console: Console
) -> None:
    """Check a network before its first case.

    Groups without a network are parts of SegNet.
    """
    group = task.cases[0].group
    network = group if group in NETWORKS else "segnet"
    if network in checked:
        return
    checked.add(network)
    width = 1.0 if device == "cuda" and not settings.quick else 0.125
    error = check_network(network, device, width)
    clean_up(task)
    console.print(
        f"{network}: AGC's loss and gradients match fp64 (relative error {error:.1e}).",
        highlight=False,
    )


def measure_task(task: Task, steps: int) -> list[Row]:
    """Return the rows of a task. A failure becomes rows with an `error` column."""
    try:
        return task.measure(steps)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        message = f"{type(error).__name__}: {first}"[:300]
        return [{**case.key, "error": message} for case in task.cases]


def clean_up(task: Task) -> None:
    """Free compiled code and memory before the next task."""
    if any(case.engine.startswith(("compile", "reduce")) for case in task.cases):
        torch.compiler.reset()
    free_memory()


def log_line(row: Row) -> str:
    """Format a row for the log."""
    batch = "" if row["batch"] == "0" else f"batch {row['batch']} "  # max-batch has none
    parts = (row["group"], row["size"], batch + row["dtype"], row["contender"], row["engine"])
    head = escape(" ".join(parts) + ": ")
    if "error" in row:
        return f"{head}[bold red]failed[/]: {escape(row['error'])}"
    if "largest_batch" in row:
        return f"{head}largest batch in {row['limit_gib']} GiB is {row['largest_batch']}"
    if "gpu_ms" in row:
        floor = f", floor {row['floor_ms']} ms" if "floor_ms" in row else ""
        return f"{head}{row['part']} {row['gpu_ms']} ms{floor}"
    if "us_p50" in row:
        return f"{head}{row['us_p50']} µs, floor {row['floor_us']} µs"
    memory = row.get("activations_mib") or row.get("saved_mib")
    end = f", {memory} MiB" if memory else ""
    return f"{head}{row['ms_p50']} ms ({row['ms_p20']} to {row['ms_p80']}){end}"


def show_chart(rows: Sequence[Row], path: Path, console: Console) -> None:
    """Draw the chart, or print how to get it if matplotlib is missing."""
    try:
        drawn = draw_chart(rows, path)
    except ModuleNotFoundError as error:
        console.print(f"No chart: {error}. Install matplotlib and run again with --report.")
        return
    if drawn:
        console.print(f"Chart: {escape(str(path))}", soft_wrap=True)
