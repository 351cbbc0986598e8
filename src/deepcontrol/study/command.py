"""`deepcontrol reproduce`: from claims to runs, from runs to verdicts and a page."""

import math
import os
import shlex
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..bench.record import read_rows
from ..train.build import open_sources
from ..train.interrupts import interrupts
from . import record
from .arms import Arm
from .claims import Judged, judge
from .grid import grid
from .jobs import LOGS, Job, drop_checkpoints, finished_curve, plan, refuse_others
from .local import Local, find_slots, visible_gpus
from .measures import Curve
from .pack import pack
from .queue import Queue
from .rules import Evidence
from .settings import Reproduce
from .show import Show, table_of_runs, table_of_verdicts


def run_reproduce(settings: Reproduce, console: Console) -> int:
    """Train what is missing, judge what is there; returns the exit code."""
    began = time.monotonic()
    protocol, out = settings.protocol, settings.out
    if not console.is_terminal:
        console.width = 140  # a log has no edge to fold a table at
    asked = {job.name for job in plan(settings.claims, protocol, out, settings.data_root)}
    before = record.claims_before(out, protocol)
    if settings.ids:
        settings = settings.with_claims(before)
    jobs = plan(settings.claims, protocol, out, settings.data_root)
    refuse_others(jobs)
    show = Show(console)
    over = (lambda job: None) if settings.keep_checkpoints else drop_checkpoints
    queue = Queue(jobs, out / LOGS, show.say, show.look, over, asked)
    waiting = [entry.job.config for entry in queue.having("waiting")]
    if settings.executor == "local" and settings.minutes != 0:
        for config in {config.data: config for config in waiting}.values():
            open_sources(config)  # one error before all runs, in place of one in each
    if settings.dry_run:
        console.print(table_of_runs(queue, 0))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    deadline, last_start = (
        math.inf if minutes is None else began + 60 * minutes
        for minutes in (settings.minutes, settings.last_start)
    )
    with interrupts() as noted:
        if settings.minutes != 0 and waiting:
            with show, executor(settings) as executes:
                queue.run(executes, noted, deadline, last_start)
    judged, page = conclude(settings, queue), settings.out
    if settings.pack is not None:
        drawn, pictured = record.shown_runs(jobs, protocol)
        pack(jobs, settings.pack, drawn, pictured)
        packed = replace(settings, out=settings.pack)
        there = plan(packed.claims, protocol, packed.out, packed.data_root)
        judged, page = conclude(packed, Queue(there, packed.out / LOGS)), packed.out
    say_all(console, queue, judged, protocol.note)
    console.print(escape(draw(page)), highlight=False, soft_wrap=True)
    if noted.signum:
        return 128 + noted.signum
    return 1 if queue.having("failed") else 0


def conclude(settings: Reproduce, queue: Queue) -> list[Judged]:
    """The verdicts of the runs in a study's folder, which are written there."""
    evidence = find_evidence(settings, [entry.job for entry in queue.entries.values()])
    judged = [judge(claim, evidence) for claim in settings.claims]
    words = shlex.join(settings.command)
    record.write(settings.out, settings.protocol, words, queue, judged, grid(evidence.curves))
    return judged


def draw(study: Path) -> str:
    """Make a study's page; returns where it is, in words."""
    try:
        from ..report.study_page import write_study_page
    except ModuleNotFoundError as error:  # a machine that trains may have nothing to draw with
        return f"No page: {error}. `deepcontrol report {study}` makes it elsewhere."
    return f"The page: {write_study_page(study, study)}"


def executor(settings: Reproduce) -> AbstractContextManager[Any]:
    logs = settings.out / LOGS
    if settings.executor == "ray":
        from .on_ray import OnRay  # needs an extra

        return OnRay(settings.slots, logs)
    return Local(find_slots(settings.slots, visible_gpus(), os.cpu_count() or 1), logs)


def find_evidence(settings: Reproduce, jobs: Sequence[Job]) -> Evidence:
    """The runs that are over, and the benchmark's rows."""
    curves: dict[Arm, list[Curve]] = defaultdict(list)
    for job in jobs:
        curve = finished_curve(job)
        if curve is not None:
            curves[job.arm].append(curve)
    return Evidence(curves, read_rows(settings.bench))


def say_all(console: Console, queue: Queue, judged: list[Judged], note: str) -> None:
    """How it ended: the verdicts, what failed, and what is left."""
    console.print(table_of_verdicts(judged))
    if note:
        console.print(escape(note), highlight=False)
    for entry in queue.having("failed"):
        line = f"[bold red]failed:[/] {entry.job.name}: {escape(entry.fault)}"
        console.print(line, highlight=False, soft_wrap=True)
    over, left = len(queue.having("done", "diverged")), len(queue.having("stopped", "waiting"))
    more = f" {left} are left: the same command goes on." if left else ""
    console.print(f"{over} of {len(queue.entries)} runs are done.{more}", highlight=False)
