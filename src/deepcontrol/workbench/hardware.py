"""Name, memory and threads of the hardware that a run or a benchmark uses."""

import contextlib
import os
import resource
from pathlib import Path

import torch


def hardware(device: str) -> str:
    """Return the name of the GPU, or of the CPU with the number of threads."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {torch.get_num_threads()} threads"


def total_memory(device: torch.device) -> int:
    """Return the bytes that a process can allocate at most.

    On a GPU its memory. On a CPU memory and swap of the machine, within the limits of the container
    and of the process (`ulimit -v`).
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + _swap()]
    of_process = resource.getrlimit(resource.RLIMIT_AS)[0]
    if of_process != resource.RLIM_INFINITY:
        limits.append(of_process)
    with contextlib.suppress(OSError, ValueError):  # no container, or its limit is "max"
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def fit_threads() -> None:
    """Use no more threads than the container may use cores, unless the user chose a number.

    torch starts a thread per core of the machine. Threads beyond a container's share wait for each
    other in every op.
    """
    cores = container_cores()
    if cores is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), round(cores))))


def container_cores(group: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the CPU limit of the container in cores, or None."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):  # no container, or an older kernel
        return None


def crowded_note(threads: int, load: float, cores: int) -> str:
    """Return a warning if other processes keep the cores busy, else "".

    The threads of an op wait for the slowest one, so that two threads on a shared core can be ten
    times slower than one.

    Args:
        threads: Threads of this process.
        load: Processes that are running or waiting for a core, without this one.
        cores: Cores of the machine.

    >>> crowded_note(2, 0.3, 2), crowded_note(1, 8.0, 2)
    ('', '')
    >>> crowded_note(8, 7.6, 8).split(".")[0]
    'About 8 other processes are running on 8 cores, and this one uses 8 threads'
    """
    if threads == 1 or load + threads <= 1.5 * cores:
        return ""
    return (
        f"About {load:.0f} other processes are running on {cores} cores, and this one uses "
        f"{threads} threads. Threads that share a core slow each other down, up to ten times. If "
        "it is slow, stop it and run the same command with OMP_NUM_THREADS=1."
    )


def _swap() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("SwapTotal:")))
    except (OSError, StopIteration):  # not Linux
        return 0
