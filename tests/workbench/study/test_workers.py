"""Workers: processes that train one run after the other."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepcontrol.workbench.study.executors import Local, Slot, Worker
from deepcontrol.workbench.study.jobs import Job, plan
from deepcontrol.workbench.study.settings import PRESETS
from tests.processes import DEADLOCK
from tests.workbench.train.runs import differences, tiny, train_here


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    started = Worker(tmp_path / "start.txt", {"OMP_NUM_THREADS": "1"})
    yield started
    started.stop(DEADLOCK)
    started.close()


def wait(worker: Worker) -> int:
    deadline = time.monotonic() + DEADLOCK
    while (code := worker.exit_code()) is None:
        assert time.monotonic() < deadline, "the run did not end"
        time.sleep(0.05)
    return code


def test_the_second_run_is_the_same_as_alone(tmp_path: Path, worker: Worker) -> None:
    for name, seed in (("first", 1), ("second", 2)):
        worker.train([tiny(tmp_path / name, seed=seed)], tmp_path / f"{name}.txt")
        assert wait(worker) == 0
        assert worker.is_alive
        log = (tmp_path / f"{name}.txt").read_text()
        assert log.count("finished 3 epochs") == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the worker
    try:
        train_here(tmp_path / "alone", seed=2)
    finally:
        torch.set_num_threads(threads)
    assert differences(tmp_path / "second", tmp_path / "alone") == []


@pytest.mark.slow
def test_a_failed_run_ends_the_worker(tmp_path: Path, worker: Worker) -> None:
    config = tiny(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{")
    worker.train([config], tmp_path / "log.txt")
    assert wait(worker) == 1
    worker.process.wait(DEADLOCK)
    assert worker.exit_code() == 1
    assert "error: " in (tmp_path / "log.txt").read_text()
    worker.train([tiny(tmp_path / "other")], tmp_path / "log.txt")  # nobody reads it
    assert worker.exit_code() == 1


@pytest.mark.slow
def test_a_run_saves_when_its_parent_ends(tmp_path: Path, worker: Worker) -> None:
    worker.train([tiny(tmp_path / "run", epochs=1000)], tmp_path / "log.txt")
    deadline = time.monotonic() + DEADLOCK
    while not (tmp_path / "run" / "last").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert wait(worker) == 143
    assert "SIGTERM: saved at step" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_a_slot_keeps_its_worker_until_a_run_fails(tmp_path: Path) -> None:
    (like, *_) = plan(PRESETS["quick"].catalog, PRESETS["quick"], tmp_path, None)

    names = ("a", "b", "broken", "c")
    jobs = {name: Job(like.arm, 0, tiny(tmp_path / name, epochs=1)) for name in names}

    def run(name: str) -> tuple[int, int]:
        """Return the exit code and the process of a run."""
        assert executor.start([jobs[name]]) == "cpu"
        assert not executor.has_room()
        process = executor.running[name,][1].process.pid
        deadline = time.monotonic() + DEADLOCK
        while not (found := executor.ended()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert [each for each, _ in found] == [name]
        return found[0][1], process

    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with Local([Slot("cpu", {"OMP_NUM_THREADS": "1"})], tmp_path / "logs") as executor:
        results = [run(name) for name in names]
    assert [code for code, _ in results] == [0, 0, 1, 0]
    a, b, broken, c = (process for _, process in results)
    assert a == b == broken != c
