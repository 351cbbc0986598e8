"""`deepcontrol doctor`: versions, devices, and a test of the ops on each device."""

import importlib.metadata
import platform
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__
from ..nn import AGCConv2d
from ..ops import native
from ..ops.dispatch import fallback_reason, kernel_switch

TOLERANCE = 1e-4  # relative error of a neuron's output and gradients in fp32


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
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    else:
        gpu = torch.cuda.get_device_properties(device)
        name = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
    maps = torch.zeros(1, 64, 16, 16, dtype=torch.bfloat16, device=device)
    return DeviceReport(device, name, fallback_reason(maps), _relative_error(device))


def _relative_error(device: str) -> float:
    """Return the largest relative error of a neuron's output and gradients, fp32 against fp64.

    TF32 convolutions are less precise by design, so TF32 is off here.
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
