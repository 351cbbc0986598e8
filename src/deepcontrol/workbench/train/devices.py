"""Where a run computes, and in which numbers."""

import os
import resource

import torch

from ..hardware import hardware
from .config import Train


def choose_device(name: str) -> torch.device:
    """The device by its name; auto is a GPU if there is one."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("--device cuda, but torch sees no CUDA device here: `deepcontrol doctor`")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def choose_autocast(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype to compute in, or None for that of the parameters."""
    if precision == "bf16" or (precision == "auto" and device.type == "cuda"):
        return torch.bfloat16
    return None


def machine(device: torch.device, autocast: torch.dtype | None) -> str:
    """What a run is made on and in which numbers, for those who read its folder."""
    numbers = str(autocast or torch.float32).removeprefix("torch.")
    return f"{hardware(device.type)}, {numbers}"


def set_up(config: Train) -> None:
    """What torch has as switches of the whole process: determinism, and cuDNN's trials."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not config.deterministic
    torch.manual_seed(config.seed)


def peak_mib(device: torch.device) -> float:
    """The most memory so far: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
