"""How every kernel here is launched: by a compiler, for the first time, and from then on.

Triton binds and specializes all arguments anew at each launch. With twenty of them that takes
longer than most kernels run, so that a training step in eager mode would wait for Python. But
nearly all of them repeat: the compiled kernel is kept by what it was specialized for, and launched.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton
from triton import JITFunction

MOST = 8192  # compiled kernels that are remembered; sizes that vary without end start over

_launchers: dict[tuple[Any, ...], Callable[..., None]] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], traced: bool, device: torch.device, **arguments: Any
) -> None:
    """Run kernel over grid on the device, where its tensors are, with arguments by name.

    traced: a compiler watches, and will launch it later. Triton's options are arguments too.
    """
    if traced:
        wrap_triton(kernel)[grid](**arguments)
    elif not isinstance(kernel, JITFunction):  # Triton's interpreter
        kernel[grid](**arguments)
    elif device.index == torch.cuda.current_device():
        _launch(kernel, grid, device.index, arguments)
    else:
        with torch.cuda.device(device):  # Triton launches on the current one
            _launch(kernel, grid, device.index, arguments)


def _launch(
    kernel: Any, grid: tuple[int, int, int], device: int, arguments: dict[str, Any]
) -> None:
    ordered = [arguments[name] for name in kernel.arg_names]
    # What Triton compiles for: a pointer's type and whether it is aligned, and numbers.
    specialized = [
        (a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else a for a in ordered
    ]
    key = (id(kernel), device, grid, arguments.get("num_warps"), *specialized)
    launcher = _launchers.get(key)
    if launcher is not None:
        launcher(*ordered)
        return
    compiled = kernel[grid](**arguments)
    if len(_launchers) >= MOST:
        _launchers.clear()
    _launchers[key] = compiled[grid]


# Triton's own are meant for kernels and cost ten microseconds a call outside of one.
def divide(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int, most: int) -> int:
    """The next power of 2, but not more than `most`."""
    p = 1
    while p < n and p < most:
        p *= 2
    return p
