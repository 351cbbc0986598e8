"""The queue, with an executor that trains nothing."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deepcontrol.workbench.folders.runfolder import lock
from deepcontrol.workbench.study import jobs as jobs_
from deepcontrol.workbench.study.claims import CLAIMS
from deepcontrol.workbench.study.jobs import Job, Queue, plan
from deepcontrol.workbench.study.settings import PRESETS
from deepcontrol.workbench.train.run import Interrupts


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_, "POLL", 0)


def jobs(out: Path, count: int = 4) -> list[Job]:
    return plan(CLAIMS, PRESETS["camvid"], out, None)[:count]


def write(job: Job, epoch: int) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"epoch": epoch, "val_error": 0.25})
    (job.folder / "metrics.jsonl").write_text(f'{line}\n{{"epoch": 99, "val_')


def finish(job: Job) -> int:
    write(job, job.config.epochs)
    return 0


def fail(job: Job) -> int:
    return 1


class Instant:
    """Executor whose runs end at the first poll, `room` at a time."""

    def __init__(self, does: dict[str, Callable[[Job], int]], room: int = 2) -> None:
        self.does, self.room = does, room
        self.started: list[str] = []
        self.groups: list[list[str]] = []
        self.running: dict[str, Job] = {}
        self.most = 0
        self.stopped = False

    def has_room(self) -> bool:
        return len(self.running) < self.room

    def start(self, jobs: Sequence[Job]) -> str:
        self.groups.append([job.name for job in jobs])
        self.started += self.groups[-1]
        self.running |= {job.name: job for job in jobs}
        self.most = max(self.most, len(self.running))
        return "here"

    def ended(self) -> list[tuple[str, int]]:
        found = [(n, self.does.get(n, finish)(job)) for n, job in self.running.items()]
        self.running.clear()
        return found

    def stop(self) -> None:
        self.stopped = True


def states(queue: Queue) -> list[str]:
    return [entry.state for entry in queue.entries.values()]


def test_each_run_starts_once_in_order(tmp_path: Path) -> None:
    all_jobs = jobs(tmp_path)
    queue, executor = Queue(all_jobs, tmp_path), Instant({})
    queue.run(executor, Interrupts(), math.inf)
    assert executor.started == [job.name for job in all_jobs]
    assert executor.most == 2
    assert states(queue) == ["done"] * 4


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    first, second, third, fourth = jobs(tmp_path)
    finish(first)
    write(second, 3)
    third.folder.mkdir(parents=True)
    (third.folder / "diverged.json").write_text('{"epoch": 2, "step": 7}')
    queue, executor = Queue([first, second, third, fourth], tmp_path), Instant({})
    assert states(queue) == ["done", "waiting", "diverged", "waiting"]
    queue.run(executor, Interrupts(), math.inf)
    assert executor.started == [second.name, fourth.name]


def test_a_failed_run_is_retried_once_and_reported(tmp_path: Path) -> None:
    all_jobs = jobs(tmp_path)
    name = all_jobs[1].name
    (tmp_path / f"{name}.txt").write_text("epoch 1\nerror: it does not work\n\n")
    said: list[str] = []
    queue = Queue(all_jobs, tmp_path, lambda entry, message: said.append(message))
    executor = Instant({name: fail})
    queue.run(executor, Interrupts(), math.inf)
    assert executor.started.count(name) == 2
    assert states(queue) == ["done", "failed", "done", "done"]
    assert queue.entries[name].fault == "exit code 1: error: it does not work"
    assert any("retrying once" in message for message in said)


def test_a_retry_can_succeed(tmp_path: Path) -> None:
    all_jobs = jobs(tmp_path, 1)
    answers = iter([fail, finish])
    executor = Instant({all_jobs[0].name: lambda job: next(answers)(job)})
    queue = Queue(all_jobs, tmp_path)
    queue.run(executor, Interrupts(), math.inf)
    assert states(queue) == ["done"]
    assert queue.entries[all_jobs[0].name].fault == ""


def test_a_run_that_diverges_is_a_result(tmp_path: Path) -> None:
    def diverge(job: Job) -> int:
        write(job, 1)
        (job.folder / "diverged.json").write_text('{"epoch": 2, "step": 7}')
        return 1

    all_jobs = jobs(tmp_path, 1)
    executor = Instant({all_jobs[0].name: diverge})
    queue = Queue(all_jobs, tmp_path)
    queue.run(executor, Interrupts(), math.inf)
    assert states(queue) == ["diverged"]
    assert executor.started == [all_jobs[0].name]


def test_nothing_starts_after_the_deadline_or_a_signal(tmp_path: Path) -> None:
    noted = Interrupts()
    noted.signum = 2
    for interrupts, deadline in ((Interrupts(), -math.inf), (noted, math.inf)):
        queue, executor = Queue(jobs(tmp_path), tmp_path), Instant({})
        queue.run(executor, interrupts, deadline)
        assert executor.stopped
        assert executor.started == []
        assert states(queue) == ["stopped"] * 4


def test_after_last_start_no_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(100)
    monkeypatch.setattr(jobs_.time, "monotonic", lambda: next(clock))
    queue, executor = Queue(jobs(tmp_path), tmp_path), Instant({})
    queue.run(executor, Interrupts(), deadline=math.inf, last_start=101)
    assert states(queue) == ["done", "done", "stopped", "stopped"]
    assert len(executor.started) == 2


def test_on_finish_is_called_once_per_run(tmp_path: Path) -> None:
    first, second, third = jobs(tmp_path, 3)
    finish(first)
    told: list[Job] = []
    queue = Queue([first, second, third], tmp_path, on_finish=told.append)
    assert told == []  # not before the queue runs
    queue.run(Instant({third.name: fail}), Interrupts(), math.inf)
    assert told == [first, second]


def test_on_ended_is_called_before_other_runs_start(tmp_path: Path) -> None:
    kept: list[tuple[list[str], int]] = []
    queue = Queue(
        jobs(tmp_path),
        tmp_path,
        on_ended=lambda queue: kept.append((states(queue), len(executor.started))),
    )
    executor = Instant({})
    queue.run(executor, Interrupts(), math.inf)
    assert kept == [(["done", "done", "waiting", "waiting"], 2), (["done"] * 4, 4)]


def test_a_locked_folder_is_waited_for(tmp_path: Path) -> None:
    first, second = jobs(tmp_path, 2)
    looks = 0
    with lock(first.folder):
        held = lock(second.folder)
        held.__enter__()

        def look(queue: Queue) -> None:
            nonlocal looks
            looks += 1
            if looks == 1:
                assert states(queue) == ["locked", "locked"]
                held.__exit__(None, None, None)
            elif looks == 3:
                finish(first)  # by the process that holds the lock
                noted.signum = 15

        noted = Interrupts()
        queue, executor = Queue([first, second], tmp_path, on_poll=look), Instant({})
        queue.run(executor, noted, math.inf)
    assert executor.started == [second.name]
    assert states(queue) == ["stopped", "done"]


def test_losing_the_race_for_a_lock_is_not_a_failure(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, 1)
    holder = lock(job.folder)

    def lose(job: Job) -> int:
        """Let another process take the lock first."""
        holder.__enter__()
        return 1

    def look(queue: Queue) -> None:
        if states(queue) == ["locked"]:
            finish(job)  # by the process that holds the lock
            holder.__exit__(None, None, None)

    said: list[str] = []
    queue = Queue([job], tmp_path, lambda entry, message: said.append(message), look)
    queue.run(Instant({job.name: lose}), Interrupts(), math.inf)
    assert states(queue) == ["done"]
    assert queue.entries[job.name].fault == ""
    assert said == ["started on here"]


def test_only_selected_runs_are_trained(tmp_path: Path) -> None:
    first, second, third, fourth = jobs(tmp_path)
    finish(first)
    executor = Instant({})
    queue = Queue(jobs(tmp_path), tmp_path, selected={second.name})
    queue.run(executor, Interrupts(), math.inf)
    assert executor.started == [second.name]
    assert states(queue) == ["done", "done", "not selected", "not selected"]
    assert {third.name, fourth.name} == {e.job.name for e in queue.in_state("not selected")}
