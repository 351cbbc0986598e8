"""Which path an op takes: Triton's kernels where they serve, plain torch everywhere else.

`why_plain` is the one place that decides, and it decides in words: `deepcontrol doctor` prints what
it says. DEEPCONTROL_KERNELS=off, read at each call, forces the plain path.
"""

import functools
import importlib.util
import math
import os

import torch
from torch import Tensor

from .remember import remembered

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_plain(z: Tensor) -> str | None:
    """Why z (N, C, *) takes the plain path, or None where the kernels take it."""
    if not z.is_cuda:
        return f"the kernels run on CUDA devices, not on {z.device.type}"
    reason = why_no_kernels(z.device.index)
    if reason is not None:
        return reason
    return remembered(_why_not_these, z.dtype, z.shape, z.stride())


def _why_not_these(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> str | None:
    if dtype not in DTYPES:
        return f"the kernels take bf16, fp16 and fp32, not {dtype}"
    if 0 in shape:
        return "there is nothing to compute"
    of_maps, positions = strides_of_maps(shape, strides), math.prod(shape[2:])
    if of_maps is None:
        return f"the positions of a map are not evenly spaced in memory: strides {strides}"
    # A program takes up to 2^13 positions of one map, or up to 2^6 maps that are small.
    far = of_maps[2] >= 2**18 or (positions < 2**13 and of_maps[1] >= 2**25)
    if far or max(shape[0] * shape[1], positions) >= 2**31:
        return "the kernels count in 32 bits within a block of maps"
    return None


def takes_kernels(z: Tensor, traced: bool = False) -> bool:
    """Whether z goes to a kernel now; traced: a compiler will launch it later, on a real tensor."""
    # A subclass (a fake tensor, a distributed one) has no memory of its own to hand to a kernel.
    return (traced or type(z) in (Tensor, torch.nn.Parameter)) and why_plain(z) is None


def why_no_kernels(device: int | None) -> str | None:
    """Why no tensor of that CUDA device meets a kernel, or None."""
    if switch() == "off":  # before the cache: a user may switch within one process
        return "DEEPCONTROL_KERNELS=off"
    return _why_device_has_none(device)


def switch() -> str:
    """DEEPCONTROL_KERNELS: on, also where it is not set, or off."""
    value = os.environ.get("DEEPCONTROL_KERNELS", "on")
    if value not in ("on", "off"):
        raise ValueError(f"DEEPCONTROL_KERNELS is on or off, not {value!r}")
    return value


@functools.cache
def _why_device_has_none(device: int | None) -> str | None:
    if torch.version.hip is not None:
        return "the kernels are tested on NVIDIA devices alone"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):  # no bf16 there, and memory ordering that Triton does not promise
        return f"the kernels need compute capability 8.0, the device has {capability}"
    return None


def map_strides(z: Tensor) -> tuple[int, int, int] | None:
    """Strides of z (N, C, *) seen as (N, C, positions), or None if its positions need several.

    Contiguous and channels_last maps of any dimension have one; sliced or transposed ones may not.

    >>> map_strides(torch.empty(2, 3, 4, 5))
    (60, 20, 1)
    >>> map_strides(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
    (60, 1, 3)
    >>> map_strides(torch.empty(2, 3, 4, 5)[..., ::2]) is None
    True
    """
    return remembered(strides_of_maps, z.shape, z.stride())


def strides_of_maps(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, int, int] | None:
    stride, count = 0, 1  # of the innermost positions, and how many they are
    for size, step in zip(reversed(shape[2:]), reversed(strides[2:]), strict=True):
        if size == 1:
            continue
        if count == 1:
            stride = step
        elif step != stride * count:
            return None
        count *= size
    if 0 in (step for step, size in zip(strides, shape, strict=True) if size > 1):
        return None  # expanded: what is written would land on itself
    return strides[0], strides[1], stride
