"""The hardware: names, memory and threads.

`deepcontrol doctor` tests the ops on each device.
"""

import contextlib
import importlib.metadata
import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__
from ..nn import AGCConv2d
from ..ops import native
from ..ops.dispatch import fallback_reason, kernel_switch

TOLERANCE = 1e-4  # relative error of a neuron's output and gradients in fp32


def hardware(device: str) -> str:
    """Return the name of the GPU, or of the CPU with the number of threads."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {threads()}"


def threads() -> str:
    """Return the number of torch's threads in words."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"


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
    """Use at most a thread per core of the container, unless the user set a number.

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


# deepcontrol doctor


@dataclass(frozen=True)
class Doctor:
    """Show versions and devices, and test the ops on each device.

    The test compares the output and the gradients of one neuron in fp32 with fp64. The table also
    shows whether the ops use the Triton kernels or plain torch, and why. The exit code is 1 if a
    test fails.
    """


@dataclass(frozen=True)
class DeviceReport:
    """The result of the test on one device."""

    device: str
    name: str
    why_plain: str | None  # None: a bf16 map takes the kernels
    error: float  # relative error of one neuron in fp32

    @property
    def passed(self) -> bool:
        return self.error < TOLERANCE


def run_doctor(console: Console) -> int:
    """Run `deepcontrol doctor` and return the exit code."""
    for name, version in versions().items():
        console.print(f"{name:20s} {escape(version)}", highlight=False)
    table = Table("device", "hardware", "implementation", "error against fp64")
    reports = check_devices()
    for report in reports:
        ops = "Triton kernels" if report.why_plain is None else f"plain torch: {report.why_plain}"
        result = "ok" if report.passed else f"[bold red]wrong[/]: more than {TOLERANCE:.0e}"
        row = (report.device, escape(report.name), escape(ops), f"{report.error:.1e} {result}")
        table.add_row(*row)
    console.print(table)
    return 0 if all(report.passed for report in reports) else 1


def versions() -> dict[str, str]:
    """Return the versions that a bug report needs."""
    found = {"deepcontrol": __version__, "Python": platform.python_version()}
    for package in ("torch", "triton", "numpy", "matplotlib", "tensorboard", "torchvision"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__  # includes the build, which the metadata may lack
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        found["cuDNN"] = str(torch.backends.cudnn.version())
    found["DEEPCONTROL_KERNELS"] = kernel_switch()
    reason = native.why_python()
    found["eager mode"] = "compiled helper" if reason is None else f"Python: {reason}"
    return found


def check_devices() -> list[DeviceReport]:
    """Check one neuron on the CPU and on every CUDA device."""
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return [_check_device(device) for device in devices]


def _check_device(device: str) -> DeviceReport:
    if device == "cpu":
        name = f"{platform.processor() or platform.machine()}, {threads()}"
    else:
        gpu = torch.cuda.get_device_properties(device)
        name = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
    maps = torch.zeros(1, 64, 16, 16, dtype=torch.bfloat16, device=device)
    return DeviceReport(device, name, fallback_reason(maps), _relative_error(device))


def _relative_error(device: str) -> float:
    """Return the largest relative fp32 error of a neuron's output and gradients.

    The reference is fp64. TF32 convolutions are less precise by design, so TF32 is off here.
    """
    torch.manual_seed(0)
    neuron = AGCConv2d(8, 16, 3, padding=1).to(device)
    x, g = torch.randn(2, 8, 24, 20, device=device), torch.randn(2, 16, 24, 20, device=device)
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    ):
        found = _outputs(neuron, x, g)
        exact = _outputs(neuron.double(), x.double(), g.double())
    errors = [(a.double() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)]
    return torch.stack(errors).max().item()  # torch's max propagates NaN, Python's does not


def _outputs(neuron: AGCConv2d, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.requires_grad_()
    y = neuron(x)
    return y, *torch.autograd.grad(y, (x, *neuron.parameters()), g)
