"""Executors: train runs in local processes, or as tasks on a Ray cluster.

A worker is a process that trains one run after the other, since starting Python and CUDA can take
longer than a small run. It reads runs from its standard input, one line of JSON each (several runs
in a line form an ensemble), and writes an exit code for each line to its standard output. When the
input closes, because the process at the other end has ended, the run saves and stops as after
SIGTERM.
"""

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..folders.storage import make_folder, open_append, parse_json
from ..terminal import SafeConsole
from ..train.config import Train
from ..train.config_file import from_json, to_json
from ..train.ensemble import train_ensemble
from ..train.faults import FaultError
from ..train.loop import train
from .jobs import Job

GRACE = 120.0  # seconds to save before a process is killed
POLL = 0.5  # seconds between two reads of the stop flag


# Workers


class Worker:
    """A process that trains runs, seen from the process that starts it.

    Args:
        log: Receives the errors of a process that fails to start.
        environment: Environment variables in addition to those of this process.
    """

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None) -> None:
        with open_append(log) as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deepcontrol.workbench.study.executors"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **(environment or {})},
                text=True,
                start_new_session=True,  # Ctrl-C must reach only this process
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def train(self, configs: Sequence[Train], log: Path) -> None:
        """Train a run, or several at once, with the output in `log`.

        The previous run must have ended.
        """
        assert self.process.stdin is not None
        line = json.dumps({"configs": [*map(to_json, configs)], "log": str(log.absolute())})
        with contextlib.suppress(BrokenPipeError):  # `exit_code` reports that the process ended
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def exit_code(self) -> int | None:
        """Return the exit code of the run, or None while it trains."""
        assert self.process.stdout is not None
        ended = self.process.poll()  # before the read, so that no line is missed
        try:
            line = os.read(self.process.stdout.fileno(), 64)
        except BlockingIOError:
            line = b""
        return int(line) if line else ended

    def stop(self, seconds: float) -> None:
        """Let the run save and end the process; kill it after `seconds`."""
        if self.is_alive:
            self.process.terminate()
            try:
                self.process.wait(max(0.0, seconds))
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Close the pipes, which ends the process if it is still there."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def worker_main() -> int:
    """Train runs until stdin closes or a run fails; return the last exit code.

    A failed run ends the process, because it may leave the GPU unusable.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()
    codes = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    while line := lines.get():
        run = parse_json(line)
        with open_append(Path(run["log"])) as log:
            sys.stdout.flush()
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log.fileno(), stream.fileno())
        code = _train([*map(from_json, run["configs"])])
        sys.stdout.flush()
        print(code, file=codes, flush=True)
        if code:
            return code
        free_memory()
    return 0


def _train(configs: Sequence[Train]) -> int:
    console = SafeConsole(width=200)
    try:
        return train(configs[0], console) if len(configs) == 1 else train_ensemble(configs, console)
    except (ValueError, OSError, FaultError) as error:
        print(f"error: {error}", flush=True)
        return 1


def free_memory() -> None:
    """Free the memory of the last run, and measure the peak of the next one alone."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _read_lines(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line)
    os.kill(os.getpid(), signal.SIGTERM)


# On this machine


@dataclass(frozen=True)
class Slot:
    """A place for one run, and the environment variables of its process."""

    name: str
    environment: Mapping[str, str]


def find_slots(per_device: int | None, gpus: Sequence[str], cores: int) -> list[Slot]:
    """Return slots on each GPU (default: one), or on the CPU (default: one per core).

    The slots share the cores. OMP_NUM_THREADS, if it is set, is the number of threads of each slot.

    >>> [slot.name for slot in find_slots(2, ["0", "1"], cores=8)]
    ['gpu 0', 'gpu 1', 'gpu 0', 'gpu 1']
    """
    count = per_device or (1 if gpus else cores)
    devices = [f"gpu {gpu}" for gpu in gpus] or ["cpu"]
    share = max(1, cores // (count * len(devices)))
    threads = os.environ.get("OMP_NUM_THREADS") or str(share)
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


class Local:
    """Executor of one worker per slot, and one run or ensemble at a time per worker."""

    def __init__(self, slots: Sequence[Slot], logs: Path) -> None:
        self.logs = logs
        self.free: list[tuple[Slot, Worker | None]] = [(slot, None) for slot in slots]
        self.running: dict[tuple[str, ...], tuple[Slot, Worker]] = {}  # by the names of the runs

    def __enter__(self) -> "Local":
        make_folder(self.logs, inside=self.logs.parent)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all processes, also after an exception."""
        workers = [worker for _, worker in self.running.values()]
        for worker in [*workers, *(worker for _, worker in self.free if worker is not None)]:
            worker.stop(GRACE)
            worker.close()

    def has_room(self) -> bool:
        return bool(self.free)

    def start(self, jobs: Sequence[Job]) -> str:
        """Start a run, or several at once, and return its device."""
        slot, worker = self.free.pop(0)
        log = self.logs / f"{jobs[0].name}.txt"
        if worker is None or not worker.is_alive:
            worker = Worker(log, slot.environment)
        for job in jobs[1:]:
            with open_append(self.logs / f"{job.name}.txt") as file:
                print(f"trained at once with {jobs[0].name}: see {log.name}", file=file)
        worker.train([job.config for job in jobs], log)
        self.running[tuple(job.name for job in jobs)] = (slot, worker)
        return slot.name

    def ended(self) -> list[tuple[str, int]]:
        """Return names and exit codes of the runs that ended since the last call."""
        codes = {names: worker.exit_code() for names, (_, worker) in self.running.items()}
        found = [(names, code) for names, code in codes.items() if code is not None]
        for names, code in found:
            slot, worker = self.running.pop(names)
            if code:  # the process ends as well
                worker.stop(GRACE)
                worker.close()
                self.free.append((slot, None))
            else:
                self.free.append((slot, worker))
        return [(name, code) for names, code in found for name in names]

    def stop(self) -> None:
        """Let all runs save and end."""
        workers = [worker for _, worker in self.running.values()]
        for worker in workers:
            worker.process.terminate()
        deadline = time.monotonic() + GRACE
        for worker in workers:
            worker.stop(deadline - time.monotonic())


# On a Ray cluster


def load_ray() -> Any:
    """Import Ray, which is an optional dependency."""
    try:
        import ray
    except ImportError:
        raise ValueError(
            '--executor ray needs Ray: in a clone of the repository, run: pip install ".[ray]"'
        ) from None
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
    with open_append(log) as file:
        print(f"on node {ray.get_runtime_context().get_node_id()}", file=file, flush=True)
    worker = Worker(log)
    worker.train([config], log)
    while (code := worker.exit_code()) is None:
        if ray.get(flag.get.remote()):
            worker.stop(GRACE)
        else:
            time.sleep(POLL)
    worker.stop(GRACE)
    worker.close()
    return code


class OnRay:
    """Executor with one Ray task per run.

    It runs `per_gpu` tasks on each GPU, or one per core without GPUs.

    ray.init() connects to the cluster of RAY_ADDRESS or of this machine, or starts one here. All
    nodes must share the study folder and the data. A task has a worker of its own. It
    polls a flag, because Ray can only kill a task, and the run has to save first.
    """

    def __init__(self, per_gpu: int | None, logs: Path) -> None:
        self.ray = load_ray()
        self.per_gpu, self.logs = per_gpu or 1, logs.absolute()
        self.running: dict[str, Any] = {}

    def __enter__(self) -> "OnRay":
        make_folder(self.logs, inside=self.logs.parent)
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

    def start(self, jobs: Sequence[Job]) -> str:
        """Submit a run."""
        (job,) = jobs
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
