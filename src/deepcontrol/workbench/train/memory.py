"""Refuse runs that no machine like this one has the memory for, before anything is allocated."""

import math

import torch

from ...nn import saved_bytes
from ..data import DatasetSplit, Source
from ..hardware import total_memory
from ..sizes import format_size
from .build import build_network
from .config import Train
from .distributed import choose_autocast

# Smaller steps are not estimated: estimates take some tenths of a second, and these steps fit.
MIN_PIXELS = 2**21  # images x height x width x multiplier of the filters
COMPILED_SHARE = 0.5  # torch.compile saves less for the backward than the layers ask for


def check_memory(
    config: Train, source: Source | DatasetSplit, device: torch.device, processes: int = 1
) -> None:
    """Raise ValueError if a step needs more memory than the machine has.

    The estimate is a lower bound: parameters, their gradients and momentum, and the tensors saved
    for the backward. A run that passes may still run out of memory.
    """
    images = -(-min(config.batch_size, len(source)) // (processes * config.accumulate))
    if images * math.prod(config.sample_size) * config.width < MIN_PIXELS:
        return
    total = total_memory(device)
    # The images alone come first: shapes beyond 2^63 bytes cannot even be described.
    needed: float = 4 * config.in_channels * images * math.prod(config.sample_size)
    if needed <= total:
        needed = max(needed, step_bytes(config, len(source.classes), images, device, processes))
    if needed > total:
        raise ValueError(
            f"a step with {images} image{'s' * (images > 1)} of {format_size(config.sample_size)} "
            f"needs at least {needed / 2**30:,.1f} GiB, but {device} has {total / 2**30:,.1f} GiB: "
            "choose a smaller --batch-size, --size or --width"
        )


def step_bytes(
    config: Train, classes: int, images: int, device: torch.device, processes: int = 1
) -> float:
    """Estimate the memory of a training step on `images` images of one process.

    The network runs on the meta device, which has shapes only.
    """
    with torch.device("meta"):
        model = build_network(config, classes).to("meta")  # others' networks are on the CPU
    state = state_bytes(config, sum(p.numel() for p in model.parameters()), processes)
    dtype = choose_autocast(config.precision, device) or torch.float32
    shape = (images, config.in_channels, *config.sample_size)
    saved = saved_bytes(model.to(dtype), torch.empty(shape, device="meta", dtype=dtype))
    return state + saved * (COMPILED_SHARE if config.engine.startswith("compile") else 1)


def state_bytes(config: Train, parameters: int, processes: int = 1) -> float:
    """Return the bytes of parameters, gradients, optimizer state and EMA in one process."""
    copies = 2 + (2 if config.optimizer == "adamw" else config.momentum > 0)
    copies += config.ema is not None
    return parameters * 4 * copies / (processes if config.fsdp else 1)
