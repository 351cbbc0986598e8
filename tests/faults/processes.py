"""Faults of processes: kills, also under torchrun, full disks, limits of the system, long runs.

    python -m tests.faults.processes NAME FOLDER SEED COUNT

It prints a line per attempt: "detected", "harmless", or the failure. One process imports torch and
forks for each run, which saves the import.
"""

import contextlib
import functools
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer would import it, which takes seconds
from PIL import Image

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data.road_scenes import Streets
from deepcontrol.workbench.folders.runfolder import is_locked
from deepcontrol.workbench.train import loop
from deepcontrol.workbench.train.data import build_data, open_sources
from deepcontrol.workbench.train.distributed import Group
from tests.processes import DEADLOCK
from tests.workbench.train.killing import kill_and_resume
from tests.workbench.train.runs import command, differences, tiny

ROOT = Path(__file__).parents[2]
EPOCHS, STEPS = 2, 8
SOAK_EPOCHS, SOAK_START, SOAK_MIB = 10, 40, 48  # epochs per attempt; where growth is counted from
OUT_OF_SPACE = OSError(28, "No space left on device")


def forked(arguments: list[str], prepare: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Run a command in a fork, after `prepare`. Return its exit status and its errors."""
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(errors.fileno(), 2)
            torch.set_num_threads(1)
            code = 70
            try:
                prepare()
                code = main(arguments)
                sys.stdout.flush()
                sys.stderr.flush()
            except SystemExit as end:
                code = int(end.code or 0) if not isinstance(end.code, str) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        return status, errors.read().decode(errors="replace")


def judged(status: int, text: str) -> str:
    """Return "harmless" after success, "detected" after an error in words, or the failure."""
    if status == 0:
        return "harmless"
    lines = text.strip().splitlines()
    words = [line for line in lines if "error: " in line]
    if status != 1 or not words or "Traceback" in text or "unexpected" in text:
        return f"exit status {status}: {' / '.join(lines[-3:])[-600:]}"
    return "detected"


def resumed(run: Path, whole: Path, arguments: list[str], result: str) -> str:
    """Run a command again without a fault; return `result` if it ends as the uninterrupted run."""
    if result not in ("detected", "harmless"):
        return result
    status, text = forked(arguments)
    if status:
        return f"did not resume: {status} {text[-300:]}"
    found = differences(run, whole)
    return f"differs: {', '.join(found)}" if found else result


def uninterrupted(folder: Path) -> Path:
    """Train the run to compare with."""
    whole = folder / "whole"
    assert forked(command(whole, epochs=EPOCHS))[0] == 0
    return whole


# Attempts


def kills(folder: Path, seed: int, count: int) -> Iterator[str]:
    whole = uninterrupted(folder)
    for number in range(count):
        yield kill_and_resume(folder, 0, 1000 * seed + number, whole) or "harmless"


class FullDisk:
    """Let calls that write fail from the n-th on, or the n-th alone.

    Args:
        first: Number of the first call that fails; 0 for none.
        lasts: Whether all calls after it fail too.
    """

    NAMES = ("open", "fsync", "replace", "rename", "mkdir")

    def __init__(self, first: int, lasts: bool) -> None:
        self.first, self.lasts, self.calls = first, lasts, 0

    def install(self) -> None:
        for name in self.NAMES:
            setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return original(*args, **kwargs)
            self.calls += 1
            if self.calls == self.first or (self.lasts and 0 < self.first < self.calls):
                raise OUT_OF_SPACE
            return original(*args, **kwargs)

        return call


def full_disks(folder: Path, seed: int, count: int) -> Iterator[str]:
    """Attempts at calls that are spread evenly over all of a run."""
    whole, rng = uninterrupted(folder), random.Random(seed)
    with tempfile.NamedTemporaryFile() as counted:

        def count_calls() -> None:
            disk, leave = FullDisk(0, False), os._exit
            disk.install()

            def report(code: int) -> None:
                Path(counted.name).write_text(str(disk.calls))
                leave(code)

            os._exit = report  # type: ignore[assignment]

        assert forked(command(folder / "counted", epochs=EPOCHS), count_calls)[0] == 0
        calls = int(Path(counted.name).read_text())
    for number in range(count):
        first = 1 + (number * calls // count + rng.randrange(max(1, calls // count))) % calls
        run, disk = folder / f"run{number}", FullDisk(first, rng.random() < 0.5)
        arguments = command(run, epochs=EPOCHS, save_steps=rng.choice([0, 3]))
        status, text = forked(arguments, disk.install)
        result = resumed(run, whole, arguments, judged(status, text))
        yield result if result in ("detected", "harmless") else f"call {first}: {result}"


def limits(folder: Path, seed: int, count: int, kind: str) -> Iterator[str]:
    """Run a command with few descriptors or with little memory."""
    whole, rng = uninterrupted(folder), random.Random(f"{seed} {kind}")
    picture = folder / "large.png"
    pixels = np.random.default_rng(0).integers(0, 256, (600, 900, 3), np.uint8)
    Image.fromarray(pixels).save(picture)
    for number in range(count):
        name = rng.choice(["train", "train", "eval", "predict", "report"])
        run = folder / f"run{number}"
        arguments = {
            "train": command(run, epochs=EPOCHS),
            "eval": ["eval", str(whole)],
            "predict": ["predict", str(whole), str(picture), "--out", str(run)],
            "report": ["report", str(whole), "--out", str(run)],
        }[name]
        amount = rng.randrange(12) if kind == "descriptors" else int(2 ** rng.uniform(20, 28))
        status, text = forked(arguments, lambda kind=kind, n=amount: restrict(kind, n))  # type: ignore[misc]
        result = judged(status, text)
        if name == "train":
            result = resumed(run, whole, arguments, result)
        yield result if result in ("detected", "harmless") else f"{name}, {amount}: {result}"


def restrict(kind: str, amount: int) -> None:
    """Limit this process to some more descriptors, or some more bytes, than it has."""
    if kind == "descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for descriptor in taken[len(taken) - amount :]:
            os.close(descriptor)
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + amount
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def few_descriptors(folder: Path, seed: int, count: int) -> Iterator[str]:
    return limits(folder, seed, count, "descriptors")


def little_memory(folder: Path, seed: int, count: int) -> Iterator[str]:
    return limits(folder, seed, count, "memory")


def soak(folder: Path, seed: int, count: int) -> Iterator[str]:
    """Train for many epochs. Descriptors, threads and memory must not grow."""
    log, epochs = folder / "usage.txt", SOAK_START + SOAK_EPOCHS * count
    arguments = command(folder / "run", epochs=epochs, train_limit=2, val_limit=1, save_steps=1)

    def measure() -> None:
        finish = loop.finish_epoch

        def finish_and_measure(run: Any) -> None:
            finish(run)
            run.writer.wait()
            used = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            with log.open("a") as file:
                print(*used, pages * resource.getpagesize() / 2**20, file=file)

        loop.finish_epoch = finish_and_measure

    status, text = forked(arguments, measure)
    if status:
        yield judged(status, text)
        return
    rows = [[float(value) for value in line.split()] for line in log.read_text().splitlines()]
    first = rows[SOAK_START]
    for number in range(count):
        last = rows[SOAK_START + SOAK_EPOCHS * (number + 1)]
        grown = last[0] > first[0] or last[1] > first[1] or last[2] > first[2] + SOAK_MIB
        yield f"grew from {first} to {last}" if grown else "harmless"


def torchrun(out: Path, fault: str, step: int, restarts: int) -> tuple[int, str]:
    """Train with two processes under torchrun, which restarts them. Return status and errors."""
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    script = ["-m", "tests.faults.provoke", fault, str(step), *command(out, epochs=EPOCHS)]
    words = [sys.executable, "-m", *launcher, *script]
    with tempfile.TemporaryFile() as errors:  # a pipe would wait for processes without an agent
        done = subprocess.run(
            words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors, timeout=DEADLOCK
        )
        errors.seek(0)
        return done.returncode, errors.read().decode(errors="replace")


def torchrun_kills(folder: Path, seed: int, count: int) -> Iterator[str]:
    """Kill a process, which torchrun restarts, or torchrun itself, which the user starts again."""
    whole, rng = folder / "whole", random.Random(seed)
    assert torchrun(whole, "kill:0", 0, 0)[0] == 0  # there is no step 0
    for number in range(count):
        run, step, seconds = folder / f"run{number}", rng.randrange(1, STEPS + 1), rng.random() / 20
        target = "agent" if number % 2 else "kill"
        status, text = torchrun(run, f"{target}:{seconds}@{number // 2 % 2}", step, restarts=1)
        if target == "agent":
            if status != -signal.SIGKILL:
                yield f"torchrun was not killed: {status}"
                continue
            deadline = time.monotonic() + DEADLOCK  # only ends a deadlock
            while is_locked(run) and time.monotonic() < deadline:
                time.sleep(0.1)
            status, text = torchrun(run, "kill:0", 0, 0)
        if status:
            yield f"{target} at step {step}: exit status {status}: {text[-500:]}"
            continue
        found = differences(run, whole)
        yield f"differs: {', '.join(found)}" if found else "harmless"


Attempts = Callable[[Path, int, int], Iterator[str]]
# By name: the attempts, and by how much fewer they are than those of the first class.
CLASSES: dict[str, tuple[Attempts, int]] = {
    "kill -9 at a random moment, then resumed": (kills, 1),
    "kill -9 of a process under torchrun, or of torchrun": (torchrun_kills, 3),
    "full disk at any write of a run, then resumed": (full_disks, 1),
    "few descriptors (train, eval, predict, report)": (few_descriptors, 1),
    "little memory (train, eval, predict, report)": (little_memory, 1),
    "soak: ten more epochs without growth": (soak, 2),
}


def attempts(name: str, seed: int, count: int) -> list[str]:
    """Run a class of faults in a process of its own. Return a result per attempt."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            "-m",
            "tests.faults.processes",
            name,
            folder,
            str(seed),
            str(count),
        ]
        environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = done.stdout.splitlines()
    return found if done.returncode == 0 else [*found, done.stderr[-1000:]]


def run_class() -> None:
    name, folder, seed, count = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:5])
    # The fingerprint draws two scenes, which would take half of every run here.
    Streets.fingerprint = functools.cache(Streets.fingerprint)  # type: ignore[method-assign]
    for changes in ({}, {"train_limit": 2, "val_limit": 1}):
        config = tiny(**changes)
        build_data(config, open_sources(config), Group(torch.device("cpu")), lambda *_: None)
        for source in open_sources(config):
            source.fingerprint()
    for result in CLASSES[name][0](folder, seed, count):
        print(" ".join(result.split()), flush=True)


if __name__ == "__main__":
    run_class()
