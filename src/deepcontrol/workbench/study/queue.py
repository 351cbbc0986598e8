"""The queue: which run is next, what became of those that ended, and when to stop."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ..runfolder import is_locked
from ..train.interrupts import Interrupts
from .jobs import Job, Progress, progress

State = Literal[
    "done", "diverged", "running", "elsewhere", "waiting", "stopped", "failed", "not asked for"
]
TRIES = 2
LOOK = 0.5  # seconds between two looks


class Executor(Protocol):
    """Who trains."""

    def has_room(self) -> bool: ...
    def start(self, job: Job) -> str: ...
    def ended(self) -> list[tuple[str, int]]: ...
    def stop(self) -> None: ...


@dataclass
class Entry:
    """A run in the queue."""

    job: Job
    state: State
    progress: Progress
    tries: int = 0
    where: str = ""
    fault: str = ""  # the last line of its log, if it failed


class Queue:
    """All runs of a study.

    `say` is told of every change and `look` shows how it stands. Before another run is started,
    `over` gets each that is over, and `keep` the queue whenever some have ended. Only what is
    `asked` for is trained: names, or None for all.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        logs: Path,
        say: Callable[[Entry, str], None] = lambda entry, what: None,
        look: Callable[["Queue"], None] = lambda queue: None,
        over: Callable[[Job], None] = lambda job: None,
        keep: Callable[["Queue"], None] = lambda queue: None,
        asked: Collection[str] | None = None,
    ) -> None:
        self.entries = {job.name: Entry(job, "waiting", progress(job)) for job in jobs}
        self.logs, self.say, self.look, self.over, self.keep = logs, say, look, over, keep
        for name, entry in self.entries.items():
            if not self._settle_if_over(entry) and asked is not None and name not in asked:
                entry.state = "not asked for"

    def having(self, *states: State) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.state in states]

    def run(
        self,
        executor: Executor,
        noted: Interrupts,
        deadline: float,
        last_start: float = math.inf,
    ) -> None:
        """Until all runs are over, the deadline is there, or a signal is.

        After `last_start` the runs under way are waited for, and no other is started.
        """
        for entry in self.having("done", "diverged"):
            self.over(entry.job)
        while self.having("waiting", "elsewhere", "running"):
            if ended := executor.ended():
                self._take(ended)
                self.keep(self)
            may_start = time.monotonic() < last_start
            is_idle = not may_start and not self.having("running")
            if noted.signum or time.monotonic() >= deadline or is_idle:
                self._stop(executor)
                return
            if may_start:
                self._start(executor)
            for entry in self.having("running", "elsewhere"):
                entry.progress = progress(entry.job)
            self.look(self)
            time.sleep(LOOK if self.having("waiting", "elsewhere", "running") else 0)

    def _start(self, executor: Executor) -> None:
        for entry in self.having("waiting", "elsewhere"):
            if not executor.has_room():
                return
            if is_locked(entry.job.folder):  # what an earlier call left may still be saving
                entry.state = "elsewhere"
                continue
            entry.progress = progress(entry.job)
            if self._settle_if_over(entry):
                continue
            entry.where = executor.start(entry.job)
            entry.state = "running"
            entry.tries += 1
            self.say(entry, f"started on {entry.where}")

    def _stop(self, executor: Executor) -> None:
        executor.stop()
        self._take(executor.ended(), stopping=True)
        for entry in self.having("waiting", "elsewhere"):
            entry.state = "stopped"
        self.look(self)

    def _take(self, ended: Sequence[tuple[str, int]], stopping: bool = False) -> None:
        for name, code in ended:
            entry = self.entries[name]
            entry.progress = progress(entry.job)
            if self._settle_if_over(entry):
                self.over(entry.job)
                self.say(entry, entry.state)
            elif stopping:
                entry.state = "stopped"
                self.say(entry, "stopped, saved" if entry.progress.epoch >= 0 else "stopped")
            elif is_locked(entry.job.folder):  # somebody else was there first
                entry.state = "elsewhere"
                entry.tries -= 1
            else:
                entry.fault = f"exit code {code}: {last_line(self.logs / f'{name}.txt')}"
                entry.state = "failed" if entry.tries >= TRIES else "waiting"
                again = "" if entry.state == "failed" else "; it is tried once more"
                self.say(entry, f"failed, {entry.fault}{again}")

    def _settle_if_over(self, entry: Entry) -> bool:
        if entry.progress.is_over(entry.job.config):
            entry.state = "done" if entry.progress.diverged is None else "diverged"
            entry.fault = ""  # of an earlier try
            return True
        return False


def last_line(path: Path) -> str:
    """What a process said last."""
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError:
        return "it said nothing"
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
