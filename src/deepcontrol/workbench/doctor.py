"""What runs here, and why: versions, devices, and the path that the ops take on each."""

import importlib.metadata
import platform
from dataclasses import dataclass

import torch

from .. import __version__
from ..nn import AGCConv2d
from ..ops.dispatch import fallback_reason, kernel_switch


@dataclass(frozen=True)
class Path:
    """The path that a half-type map takes on a device, and how far its neuron is from fp64."""

    device: str
    name: str
    why_plain: str | None  # None: the kernels
    error: float

    @property
    def sound(self) -> bool:
        return self.error < TOLERANCE


TOLERANCE = 1e-4  # relative, of a neuron's output and gradients in fp32


def versions() -> dict[str, str]:
    """Whatever a report of a fault should name."""
    found = {"deepcontrol": __version__, "Python": platform.python_version()}
    for package in ("torch", "triton", "numpy", "matplotlib", "tensorboard", "torchvision"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__  # with its build, which the package's metadata may lack
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        found["cuDNN"] = str(torch.backends.cudnn.version())
    found["DEEPCONTROL_KERNELS"] = kernel_switch()
    return found


def paths() -> list[Path]:
    """The CPU and every CUDA device, each tried with one neuron."""
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return [_try(device) for device in devices]


def _try(device: str) -> Path:
    if device == "cpu":
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    else:
        about = torch.cuda.get_device_properties(device)
        name = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, sm_{about.major}{about.minor}"
    maps = torch.zeros(1, 64, 16, 16, dtype=torch.bfloat16, device=device)
    return Path(device, name, fallback_reason(maps), _error(device))


def _error(device: str) -> float:
    """One neuron's output and gradients in fp32 against the same in fp64: the largest difference.

    TF32 is a choice about convolutions and not an error here, so it is off meanwhile.
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
    return torch.stack(errors).max().item()  # which a NaN gets through, unlike Python's max


def _outputs(neuron: AGCConv2d, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.requires_grad_()
    y = neuron(x)
    return y, *torch.autograd.grad(y, (x, *neuron.parameters()), g)
