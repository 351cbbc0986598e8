"""Name and memory of the hardware that a run or a benchmark uses."""

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


def _swap() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("SwapTotal:")))
    except (OSError, StopIteration):  # not Linux
        return 0
