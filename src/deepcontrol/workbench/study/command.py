"""`deepcontrol reproduce`: train missing runs, judge the claims, write the page."""

import contextlib
import math
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ..folders.storage import make_folder
from ..folders.studyfolder import (
    FINISHED,
    LOGS,
    RUNS,
    ClaimResult,
    State,
    Study,
    StudyRuns,
    read_study,
)
from ..report.text import check_found, measurement_line
from ..train.data import open_sources
from ..train.progress import duration
from ..train.run import interrupts
from .executors import Local, OnRay, find_slots, visible_gpus
from .jobs import (
    CurveCache,
    Job,
    Queue,
    QueueEntry,
    drop_checkpoints,
    plan,
    progress,
    refuse_changed,
)
from .record import existing_claims, judge_and_write, pack, pack_settings
from .settings import Reproduce

LOG_WIDTH = 140  # characters of a table in a log, which has no edge to wrap at

# Order of the live table, most urgent first, for terminals with fewer lines than runs.
ORDER: tuple[State, ...] = (
    "failed", "running", "locked", "stopped", "waiting", "not selected", "diverged", "done"
)  # fmt: skip
STYLES = {"failed": "bold red", "running": "bold", "diverged": "yellow", "done": "green"}
VERDICT_STYLES = {"reproduced": "green", "not reproduced": "red", "undecided": "yellow"}


def run_reproduce(settings: Reproduce, console: Console) -> int:
    """Run `deepcontrol reproduce` and return the exit code."""
    began = time.monotonic()
    preset, out = settings.effective_preset, settings.out
    if not console.is_terminal:
        console.width = LOG_WIDTH
    asked, read_curve = settings.claims, CurveCache()
    settings = settings.with_claims(existing_claims(out, preset))
    packed = None if settings.pack is None else pack_settings(settings, settings.pack)

    def planned() -> tuple[list[Job], set[str]]:
        """Return all runs, and the names of those that --only asks for."""
        jobs, wanted = (
            plan(claims, preset, out, settings.data_root, read_curve)
            for claims in (settings.claims, asked)
        )
        return jobs, {job.name for job in wanted}

    jobs, selected = planned()
    refuse_changed(jobs)
    if settings.bench is not None and not settings.bench.is_file():
        raise ValueError(f"--bench: no file {settings.bench}")
    display = Display(console)
    queue = Queue(
        jobs,
        out / LOGS,
        on_change=display.log,
        on_poll=display.update,
        on_finish=(lambda job: None) if settings.keep_checkpoints else drop_checkpoints,
        on_ended=lambda queue: update_record(settings, queue),
        selected=selected,
        at_once=settings.at_once,
        replan=planned if preset.has_tuned else None,
        read_curve=read_curve,
    )
    waiting = [entry.job.config for entry in queue.in_state("waiting")]
    if settings.dry_run:
        print_claims(console, settings)
    if settings.executor == "local" and settings.minutes != 0:
        for config in {config.data: config for config in waiting}.values():
            open_sources(config)  # one error now instead of one per run
    if settings.dry_run:
        console.print(run_table(queue, 0))
        console.print(cost_line(jobs), highlight=False)
        if preset.has_tuned:
            console.print("Further seeds of each best learning rate follow.")
        return 0
    make_folder(out / RUNS, inside=out)  # raises if a link leads out of the study
    deadline, last_start = (
        math.inf if minutes is None else began + 60 * minutes
        for minutes in (settings.minutes, settings.last_start)
    )
    with interrupts() as received:
        if settings.minutes != 0 and waiting:
            judge_and_write(settings, queue)  # `deepcontrol report` works from now on
            with display, executor(settings) as executes:
                queue.run(executes, received, deadline, last_start)
        study, folders = judge_and_write(settings, queue), {out.resolve(): out}
        if packed is not None:
            study = write_pack(settings, queue, packed)
            folders[packed.out.resolve()] = packed.out
        print_results(console, queue, study)
        for folder in folders.values():
            console.print(escape(write_page(folder)), highlight=False, soft_wrap=True)
    if received.signum:
        return 128 + received.signum
    return 1 if queue.in_state("failed") else 0


def print_claims(console: Console, settings: Reproduce) -> None:
    """Print the ids of the claims that the study judges, and of the preset's others."""
    chosen = {claim.id for claim in settings.claims}
    judged = [name for name in settings.known_ids if name in chosen]
    others = [name for name in settings.known_ids if name not in chosen]
    console.print(f"Claims: {', '.join(judged)}")
    if others:
        console.print(f"Others for --only: {', '.join(others)}")


def cost_line(jobs: Sequence[Job]) -> str:
    """Return the number of runs that are not finished, with their images and steps."""
    left = [job for job in jobs if not progress(job).is_finished(job.config)]
    count: dict[tuple[str, int | None], int] = {}
    images = steps = 0
    for config in (job.config for job in left):
        key = (config.data, config.train_limit)
        if key not in count:
            count[key] = len(open_sources(config).train)
        images += config.epochs * count[key]
        steps += config.epochs * -(-count[key] // config.batch_size)
    return f"{len(left)} runs to train: {images:,} images in {steps:,} steps."


def write_pack(settings: Reproduce, queue: Queue, packed: Reproduce) -> Study:
    """Copy the finished runs into the packed study, and judge all runs it then holds."""
    pack(settings, queue, packed)
    jobs = plan(packed.claims, packed.effective_preset, packed.out, packed.data_root)
    copies = Queue(jobs, packed.out / LOGS)
    for entry in copies.in_state("waiting"):
        original = queue.entries.get(entry.job.name)
        if original is not None:  # the packed study's page shows failures as well
            entry.state, entry.fault = original.state, original.fault
    return judge_and_write(packed, copies)


def update_record(settings: Reproduce, queue: Queue) -> None:
    """Write study.json during training, for a report if the study is killed.

    A disk error is ignored here, because the final write reports it.
    """
    with contextlib.suppress(OSError):
        judge_and_write(settings, queue)


def write_page(folder: Path) -> str:
    """Write a study's page, and return a message with its path."""
    try:
        from ..report.page import write_study_page
    except ModuleNotFoundError as error:  # a training machine may lack matplotlib
        return f"No page: {error}. Run `deepcontrol report {folder}` on another machine."
    study = read_study(folder)
    return f"Page: {write_study_page(study, StudyRuns(folder, study), folder)}"


def executor(settings: Reproduce) -> AbstractContextManager[Any]:
    logs = settings.out / LOGS
    if settings.executor == "ray":
        return OnRay(settings.slots, logs)
    return Local(find_slots(settings.slots, visible_gpus(), os.cpu_count() or 1), logs)


# Output


class Display:
    """Progress: a live table in a terminal, one line per change in a log."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started = time.monotonic()
        self._live = Live(console=console, transient=True, refresh_per_second=2)

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def log(self, entry: QueueEntry, message: str) -> None:
        """Print a change. A terminal prints only faults, since its table shows the rest."""
        if self.console.is_terminal and not (entry.fault or entry.state == "diverged"):
            return
        at = duration(time.monotonic() - self.started)
        error = "" if entry.progress.error is None else f", error {entry.progress.error:.2%}"
        epoch = f" (epoch {max(entry.progress.epoch, 0)}{error})"
        line = f"{at}  {entry.job.name}: {message}{epoch}"
        self.console.print(escape(line), highlight=False, soft_wrap=True)

    def update(self, queue: Queue) -> None:
        if self._live.is_started:
            self._live.update(run_table(queue, time.monotonic() - self.started))


def run_table(queue: Queue, seconds: float) -> Table:
    entries = sorted(queue.entries.values(), key=lambda e: ORDER.index(e.state))
    finished = len(queue.in_state(*FINISHED))
    title = f"{finished} of {len(entries)} runs finished, {duration(seconds)}"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("run")
    table.add_column("state")
    table.add_column("epoch", justify="right")
    table.add_column("error %", justify="right")
    for entry in entries:
        state = f"{entry.state}, {entry.where}" if entry.state == "running" else entry.state
        error = entry.progress.error
        table.add_row(
            entry.job.name,
            state,
            f"{max(entry.progress.epoch, 0)}/{entry.job.config.epochs}",
            "" if error is None else f"{100 * error:.2f}",
            style=STYLES.get(entry.state, ""),
        )
    return table


def verdict_table(claims: tuple[ClaimResult, ...]) -> Table:
    table = Table("claim", "paper", "measured", "verdict", title="Verdicts", title_justify="left")
    table.columns[2].overflow = "fold"
    for claim in claims:
        style = VERDICT_STYLES[claim.verdict]
        measured = "\n".join(map(measurement_line, claim.measurements))
        table.add_row(
            f"[bold]{claim.id}[/] {escape(claim.text)}",
            escape(claim.paper),
            escape(measured or check_found(claim.checks[0])),
            f"[{style}]{claim.verdict}[/]",
        )
    return table


def print_results(console: Console, queue: Queue, study: Study) -> None:
    """Print the verdicts, the failed runs, and the number of runs that remain."""
    console.print(verdict_table(study.claims))
    if study.note:
        console.print(escape(study.note), highlight=False)
    for entry in queue.in_state("failed"):
        line = f"[bold red]failed:[/] {entry.job.name}: {escape(entry.fault)}"
        console.print(line, highlight=False, soft_wrap=True)
    finished = len(queue.in_state(*FINISHED))
    left = len(queue.in_state("stopped", "waiting"))
    more = f" {left} left; run the same command to continue." * (left > 0)
    console.print(f"{finished} of {len(queue.entries)} runs finished.{more}", highlight=False)
