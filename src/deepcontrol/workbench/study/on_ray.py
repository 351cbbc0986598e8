"""Runs as tasks on a Ray cluster, whose machines must share the study's folder and the data.

ray.init() finds the cluster by RAY_ADDRESS, or one on this machine, or else starts one here. A
task is one worker process, as on a single machine; it watches a flag, for it has to be stopped
without being killed.
"""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..train.config import Train
from .jobs import Job
from .worker import GRACE, stop, worker_command

LOOK = 0.5  # seconds between two looks at the flag


def load_ray() -> Any:
    """Ray itself, which is an extra."""
    try:
        import ray
    except ImportError:
        raise ValueError("--executor ray needs Ray: pip install 'deepcontrol[ray]'") from None
    return ray


class Flag:
    """Raised once, seen by all tasks."""

    def __init__(self) -> None:
        self.is_up = False

    def raise_(self) -> None:
        self.is_up = True

    def look(self) -> bool:
        return self.is_up


def work(config: Train, log: Path, flag: Any) -> int:
    """On some machine of the cluster: a run to its end, or until the flag is up."""
    ray = load_ray()
    with log.open("a") as file:
        print(f"on node {ray.get_runtime_context().get_node_id()}", file=file, flush=True)
        process = subprocess.Popen(
            worker_command(config, sys.executable),
            stdin=subprocess.PIPE,  # if Ray kills this task, the run saves and ends
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        while process.poll() is None:
            if ray.get(flag.look.remote()):
                return stop(process, GRACE)
            time.sleep(LOOK)
    return process.returncode


class OnRay:
    """One task a run: so many a GPU where the cluster has GPUs, else one a core."""

    def __init__(self, per_gpu: int | None, logs: Path) -> None:
        self.ray = load_ray()
        self.per_gpu, self.logs = per_gpu or 1, logs.absolute()
        self.running: dict[str, Any] = {}

    def __enter__(self) -> "OnRay":
        self.logs.mkdir(parents=True, exist_ok=True)
        if not self.ray.is_initialized():
            paths = os.pathsep.join(p for p in sys.path if p)
            self.ray.init(log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
        self._flag = self.ray.remote(num_cpus=0)(Flag).remote()
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.stop()
        self.ray.kill(self._flag)

    def has_room(self) -> bool:
        return len(self.running) < self._capacity()

    def start(self, job: Job) -> str:
        gpus = 1 / self.per_gpu if self._gpus() else 0
        task = self.ray.remote(
            num_cpus=1, num_gpus=gpus, max_retries=0, scheduling_strategy="SPREAD"
        )(work)
        config = absolute(job.config)
        log = self.logs / f"{job.name}.txt"
        self.running[job.name] = task.remote(config, log, self._flag)
        return "ray"

    def ended(self) -> list[tuple[str, int]]:
        names = {ref: name for name, ref in self.running.items()}
        ready = self.ray.wait(list(names), num_returns=len(names), timeout=0)[0] if names else []
        found = []
        for ref in ready:
            del self.running[names[ref]]
            try:
                code = int(self.ray.get(ref))
            except self.ray.exceptions.RayError:  # the machine, or Ray's process on it, is gone
                code = -1
            found.append((names[ref], code))
        return found

    def stop(self) -> None:
        """Let all runs save and end."""
        self.ray.get(self._flag.raise_.remote())
        if self.running:
            self.ray.wait(list(self.running.values()), num_returns=len(self.running), timeout=GRACE)

    def _gpus(self) -> float:
        return float(self.ray.cluster_resources().get("GPU", 0))

    def _capacity(self) -> int:
        """As the cluster is now: machines may come and go."""
        return int(self._gpus() * self.per_gpu) or int(self.ray.cluster_resources().get("CPU", 1))


def absolute(config: Train) -> Train:
    """Tasks run in a folder of Ray's own."""
    root = config.data_root
    return replace(
        config, out=config.out.absolute(), data_root=None if root is None else root.absolute()
    )
