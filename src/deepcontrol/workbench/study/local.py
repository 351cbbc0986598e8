"""Runs as processes of this machine: a queue over its GPUs, or over places on its CPU."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .jobs import Job
from .worker import GRACE, stop, worker_command


@dataclass(frozen=True)
class Slot:
    """A place for one run, as the environment of its process."""

    name: str
    environment: Mapping[str, str]


def find_slots(per_device: int | None, gpus: Sequence[str], cores: int) -> list[Slot]:
    """So many a GPU, one by default, or places on the CPU, one a core by default.

    >>> [slot.name for slot in find_slots(2, ["0", "1"], cores=8)]
    ['gpu 0', 'gpu 1', 'gpu 0', 'gpu 1']
    """
    count = per_device or (1 if gpus else cores)
    places = [f"gpu {gpu}" for gpu in gpus] or ["cpu"]
    threads = str(max(1, cores // (count * len(places))))
    slots = []
    for _ in range(count):  # one on each GPU before the second on any
        for index, place in enumerate(places):
            environment = {"OMP_NUM_THREADS": threads}
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[index]
            slots.append(Slot(place, environment))
    return slots


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    import torch

    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


@dataclass
class Running:
    process: subprocess.Popen[str]
    slot: Slot
    log: IO[str]


class Local:
    """One process a run, as many at a time as there are slots."""

    def __init__(self, slots: Sequence[Slot], logs: Path) -> None:
        self.free = list(slots)
        self.logs = logs
        self.running: dict[str, Running] = {}

    def __enter__(self) -> "Local":
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, no process is left behind."""
        for running in self.running.values():
            stop(running.process, GRACE)
            running.log.close()

    def has_room(self) -> bool:
        return bool(self.free)

    def start(self, job: Job) -> str:
        """Start a run; returns where."""
        slot = self.free.pop(0)
        log = (self.logs / f"{job.name}.txt").open("a")
        process = subprocess.Popen(
            worker_command(job.config, sys.executable),
            stdin=subprocess.PIPE,  # it ends when this does, however this process ends
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **slot.environment},
            text=True,
            start_new_session=True,  # Ctrl-C is this process's alone, which tells the others
        )
        self.running[job.name] = Running(process, slot, log)
        return slot.name

    def ended(self) -> list[tuple[str, int]]:
        """Names and exit codes of the runs that ended since this was asked last."""
        found = [(n, c) for n, r in self.running.items() if (c := r.process.poll()) is not None]
        for name, _ in found:
            running = self.running.pop(name)
            running.log.close()
            assert running.process.stdin is not None
            running.process.stdin.close()
            self.free.append(running.slot)
        return found

    def stop(self) -> None:
        """Let all runs save and end."""
        for running in self.running.values():
            running.process.terminate()
        deadline = time.monotonic() + GRACE
        for running in self.running.values():
            stop(running.process, deadline - time.monotonic())
