"""Executors: train runs in processes of this machine, or as tasks on a Ray cluster.

Each run is a separate process: `python -m deepcontrol.workbench.study.executors CONFIG` trains
the run that the JSON text describes. Its standard input is a pipe without data. When the pipe
closes, because the process at the other end has ended, the run saves and stops as after SIGTERM.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from ..train.config import Train, from_json, to_json
from ..train.faults import FaultError
from ..train.loop import train
from .jobs import Job

GRACE = 120.0  # seconds to save before a process is killed
POLL = 0.5  # seconds between two reads of the stop flag


# The process of a run


def worker_command(config: Train) -> list[str]:
    name = "deepcontrol.workbench.study.executors"
    return [sys.executable, "-m", name, json.dumps(to_json(config))]


def start_worker(
    config: Train, log: IO[str], environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """Start the process of a run. It stops when this process ends."""
    return subprocess.Popen(
        worker_command(config),
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        text=True,
        start_new_session=True,  # Ctrl-C must reach only this process, which stops the others
    )


def stop_process(process: "subprocess.Popen[str]", seconds: float) -> int:
    """Send SIGTERM, then SIGKILL after `seconds`; return the exit code."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(max(0.0, seconds))
        process.kill()
    return process.wait()


def worker_main() -> int:
    """Train the run given on the command line and return the exit code."""
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        return train(from_json(json.loads(sys.argv[1])), Console(width=200))
    except (ValueError, OSError, FaultError) as error:
        print(f"error: {error}", flush=True)
        return 1


def _stop_with_parent() -> None:
    with contextlib.suppress(OSError):
        os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)


# On this machine


@dataclass(frozen=True)
class Slot:
    """A place for one run, and the environment variables of its process."""

    name: str
    environment: Mapping[str, str]


def find_slots(per_device: int | None, gpus: Sequence[str], cores: int) -> list[Slot]:
    """Return slots on each GPU (default: one), or on the CPU (default: one per core).

    >>> [slot.name for slot in find_slots(2, ["0", "1"], cores=8)]
    ['gpu 0', 'gpu 1', 'gpu 0', 'gpu 1']
    """
    count = per_device or (1 if gpus else cores)
    devices = [f"gpu {gpu}" for gpu in gpus] or ["cpu"]
    threads = str(max(1, cores // (count * len(devices))))
    slots = []
    for _ in range(count):  # one on each GPU before the second on any
        for index, device in enumerate(devices):
            environment = {"OMP_NUM_THREADS": threads}
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[index]
            slots.append(Slot(device, environment))
    return slots


def visible_gpus() -> list[str]:
    """Return the names of the GPUs as in CUDA_VISIBLE_DEVICES."""
    import torch

    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


@dataclass
class Running:
    process: "subprocess.Popen[str]"
    slot: Slot
    log: IO[str]


class Local:
    """Executor with one process per run, and one run per slot."""

    def __init__(self, slots: Sequence[Slot], logs: Path) -> None:
        self.free = list(slots)
        self.logs = logs
        self.running: dict[str, Running] = {}

    def __enter__(self) -> "Local":
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all processes, also after an exception."""
        for running in self.running.values():
            stop_process(running.process, GRACE)
            running.log.close()

    def has_room(self) -> bool:
        return bool(self.free)

    def start(self, job: Job) -> str:
        """Start a run and return its device."""
        slot = self.free.pop(0)
        log = (self.logs / f"{job.name}.txt").open("a")
        process = start_worker(job.config, log, slot.environment)
        self.running[job.name] = Running(process, slot, log)
        return slot.name

    def ended(self) -> list[tuple[str, int]]:
        """Return names and exit codes of the runs that ended since the last call."""
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
            stop_process(running.process, deadline - time.monotonic())


# On a Ray cluster


def load_ray() -> Any:
    """Import Ray, which is an optional dependency."""
    try:
        import ray
    except ImportError:
        raise ValueError("--executor ray needs Ray: pip install 'deepcontrol[ray]'") from None
    return ray


class StopFlag:
    """Actor that tells all tasks to stop."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        self.is_set = True

    def get(self) -> bool:
        return self.is_set


def ray_task(config: Train, log: Path, flag: Any) -> int:
    """Train a run on a node of the cluster until it ends or the flag is set."""
    ray = load_ray()
    with log.open("a") as file:
        print(f"on node {ray.get_runtime_context().get_node_id()}", file=file, flush=True)
        process = start_worker(config, file)
        while process.poll() is None:
            if ray.get(flag.get.remote()):
                return stop_process(process, GRACE)
            time.sleep(POLL)
    return process.returncode


class OnRay:
    """Executor with one Ray task per run.

    It runs `per_gpu` tasks on each GPU, or one per core without GPUs.

    ray.init() connects to the cluster of RAY_ADDRESS or of this machine, or starts one here. All
    nodes must share the study folder and the data. A task runs the same process as `Local`. It
    polls a flag, because Ray can only kill a task, and the run has to save first.
    """

    def __init__(self, per_gpu: int | None, logs: Path) -> None:
        self.ray = load_ray()
        self.per_gpu, self.logs = per_gpu or 1, logs.absolute()
        self.running: dict[str, Any] = {}

    def __enter__(self) -> "OnRay":
        self.logs.mkdir(parents=True, exist_ok=True)
        if not self.ray.is_initialized():
            paths = os.pathsep.join(p for p in sys.path if p)
            self.ray.init(log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
        self._flag = self.ray.remote(num_cpus=0)(StopFlag).remote()
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.stop()
        self.ray.kill(self._flag)

    def has_room(self) -> bool:
        return len(self.running) < self._capacity()

    def start(self, job: Job) -> str:
        """Submit a run."""
        gpus = 1 / self.per_gpu if self._gpus() else 0
        task = self.ray.remote(
            num_cpus=1, num_gpus=gpus, max_retries=0, scheduling_strategy="SPREAD"
        )(ray_task)
        log = self.logs / f"{job.name}.txt"
        self.running[job.name] = task.remote(with_absolute_paths(job.config), log, self._flag)
        return "ray"

    def ended(self) -> list[tuple[str, int]]:
        """Return names and exit codes of the runs that ended since the last call."""
        names = {ref: name for name, ref in self.running.items()}
        ready = self.ray.wait(list(names), num_returns=len(names), timeout=0)[0] if names else []
        found = []
        for ref in ready:
            del self.running[names[ref]]
            try:
                code = int(self.ray.get(ref))
            except self.ray.exceptions.RayError:  # the node or Ray's process on it is gone
                code = -1
            found.append((names[ref], code))
        return found

    def stop(self) -> None:
        """Let all runs save and end."""
        self.ray.get(self._flag.set.remote())
        if self.running:
            self.ray.wait(list(self.running.values()), num_returns=len(self.running), timeout=GRACE)

    def _gpus(self) -> float:
        return float(self.ray.cluster_resources().get("GPU", 0))

    def _capacity(self) -> int:
        """Return the number of runs that fit now. Nodes can join and leave."""
        return int(self._gpus() * self.per_gpu) or int(self.ray.cluster_resources().get("CPU", 1))


def with_absolute_paths(config: Train) -> Train:
    """Make paths absolute, because Ray runs tasks in another folder."""
    root = config.data_root
    return replace(
        config, out=config.out.absolute(), data_root=None if root is None else root.absolute()
    )


if __name__ == "__main__":
    sys.exit(worker_main())
