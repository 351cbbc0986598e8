"""`deepcontrol reproduce`: from claims to runs, from runs to verdicts and a page."""

import contextlib
import math
import os
import shlex
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..bench.results import read_rows
from ..train.build import open_sources
from ..train.interrupts import interrupts
from . import record
from .claims import Judged, judge
from .evidence import bench_rows, find_evidence, rows_that_decide
from .grid import grid
from .jobs import LOGS, drop_checkpoints, plan, refuse_others
from .local import Local, find_slots, visible_gpus
from .pack import BENCH, pack
from .queue import Queue
from .settings import Reproduce
from .show import Show, table_of_runs, table_of_verdicts


def run_reproduce(settings: Reproduce, console: Console) -> int:
    """Train what is missing, judge what is there; returns the exit code."""
    began = time.monotonic()
    protocol, out = settings.protocol, settings.out
    if not console.is_terminal:
        console.width = 140  # a log has no edge to fold a table at
    asked = {job.name for job in plan(settings.claims, protocol, out, settings.data_root)}
    settings = settings.with_claims(record.claims_before(out, protocol))
    packed = None if settings.pack is None else into_pack(settings, settings.pack)
    jobs = plan(settings.claims, protocol, out, settings.data_root)
    refuse_others(jobs)
    if settings.bench is not None and not settings.bench.is_file():
        raise ValueError(f"--bench: there is no file {settings.bench}")
    show = Show(console)
    over = (lambda job: None) if settings.keep_checkpoints else drop_checkpoints
    queue = Queue(
        jobs, out / LOGS, show.say, show.look, over, lambda q: keep_record(settings, q), asked
    )
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
            conclude(settings, queue)  # what is there already can be reported on meanwhile
            with show, executor(settings) as executes:
                queue.run(executes, noted, deadline, last_start)
        judged, pages = conclude(settings, queue), {out.resolve(): out}
        if packed is not None:
            judged = conclude_packed(settings, queue, packed)
            pages[packed.out.resolve()] = packed.out
        say_all(console, queue, judged, protocol.note)
        for page in pages.values():
            console.print(escape(draw(page)), highlight=False, soft_wrap=True)
    if noted.signum:
        return 128 + noted.signum
    return 1 if queue.having("failed") else 0


def into_pack(settings: Reproduce, folder: Path) -> Reproduce:
    """The study in the folder to be packed into: about all that is there, and what comes now.

    ValueError if it holds another study.
    """
    before = record.claims_before(folder, settings.protocol)
    return replace(settings, out=folder).with_claims(before)


def conclude_packed(settings: Reproduce, queue: Queue, packed: Reproduce) -> list[Judged]:
    """Copy the runs that are over, and judge what the folder then holds."""
    drawn, pictured = record.shown_runs(
        [entry.job for entry in queue.entries.values()], settings.protocol
    )
    over = [entry.job for entry in queue.having("done", "diverged")]
    rows = rows_that_decide(packed.claims, bench_rows(settings), read_rows(packed.out / BENCH))
    pack(over, packed.out, drawn, pictured, rows)
    jobs = plan(packed.claims, packed.protocol, packed.out, packed.data_root)
    copies = Queue(jobs, packed.out / LOGS)
    for entry in copies.having("waiting"):
        original = queue.entries.get(entry.job.name)
        if original is not None:  # the pack's page, too, says what failed
            entry.state, entry.fault = original.state, original.fault
    return conclude(packed, copies)


def conclude(settings: Reproduce, queue: Queue) -> list[Judged]:
    """The verdicts of the runs in a study's folder, which are written there."""
    evidence = find_evidence(settings, queue)
    judged = [judge(claim, evidence) for claim in settings.claims]
    words = shlex.join(settings.command)
    record.write(settings.out, settings.protocol, words, queue, judged, grid(evidence.curves))
    return judged


def keep_record(settings: Reproduce, queue: Queue) -> None:
    """The verdicts as they stand, so that `report` tells the truth of a study that is under way or
    was killed. What keeps it from being written is said where it is written at last."""
    with contextlib.suppress(OSError):
        conclude(settings, queue)


def draw(study: Path) -> str:
    """Make a study's page; returns where it is, in words."""
    try:
        from ..report.study import read_study
        from ..report.study_page import write_study_page
    except ModuleNotFoundError as error:  # a machine that trains may have nothing to draw with
        return f"No page: {error}. `deepcontrol report {study}` makes it elsewhere."
    return f"The page: {write_study_page(read_study(study), study)}"


def executor(settings: Reproduce) -> AbstractContextManager[Any]:
    logs = settings.out / LOGS
    if settings.executor == "ray":
        from .on_ray import OnRay  # needs an extra

        return OnRay(settings.slots, logs)
    return Local(find_slots(settings.slots, visible_gpus(), os.cpu_count() or 1), logs)


def say_all(console: Console, queue: Queue, judged: list[Judged], note: str) -> None:
    """How it ended: the verdicts, what failed, and what is left."""
    console.print(table_of_verdicts(judged))
    if note:
        console.print(escape(note), highlight=False)
    for entry in queue.having("failed"):
        line = f"[bold red]failed:[/] {entry.job.name}: {escape(entry.fault)}"
        console.print(line, highlight=False, soft_wrap=True)
    over, left = len(queue.having("done", "diverged")), len(queue.having("stopped", "waiting"))
    more = f" {left} {'is' if left == 1 else 'are'} left: the same command goes on." * (left > 0)
    console.print(f"{over} of {len(queue.entries)} runs are done.{more}", highlight=False)
