"""Launch Triton kernels with little host time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton
from torch.utils._python_dispatch import _disable_current_modes
from triton import JITFunction

from ..replay import KernelHandle, RecordedLaunch, record_launch

MAX_KERNELS = 8192  # compiled kernels kept; the cache starts over if sizes keep changing
NO_HOOKS = (None, None, None)  # the metadata of a launch and the hooks before and after it

_compiled: dict[tuple[Any, ...], Any] = {}


class Launch(NamedTuple):
    """A kernel, its grid and its arguments by name, Triton's options included."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: dict[str, Any],
    device: torch.device,
    traced: bool = False,
) -> None:
    """Run a kernel over a grid on `device`, which holds its tensors.

    Triton binds and specializes all arguments again at every launch. For twenty of them that takes
    longer than most kernels run, and an eager training step would wait for Python. Nearly all
    launches repeat, so the compiled kernel is cached by everything it was specialized for.

    Args:
        arguments: Arguments by name, Triton's options included.
        traced: A compiler traces the call and launches the kernel later.
    """
    if traced:
        wrap_triton(kernel)[grid](**arguments)
        return
    if not isinstance(kernel, JITFunction):  # Triton's interpreter
        with _disable_current_modes():  # it computes with torch's ops, which no recorder should see
            kernel[grid](**arguments)
        record_launch(lambda: _interpreted(kernel, grid, arguments))
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current device
            launch(kernel, grid, arguments, device)
        return
    ordered = [arguments[name] for name in kernel.arg_names]
    # Triton specializes for the dtype and alignment of pointers, and for numbers.
    specialized = [
        (a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else a for a in ordered
    ]
    key = (id(kernel), device.index, grid, arguments.get("num_warps"), *specialized)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = kernel[grid](**arguments)
        if len(_compiled) >= MAX_KERNELS:
            _compiled.clear()
        _compiled[key] = compiled
    else:
        compiled[grid](*ordered)
    record_launch(lambda: _recorded(compiled, grid, ordered))


def _recorded(compiled: Any, grid: tuple[int, int, int], ordered: list[Any]) -> RecordedLaunch:
    fixed = (compiled.function, compiled.packed_metadata, *NO_HOOKS)
    return RecordedLaunch(compiled.run, grid, fixed, ordered, kernel_handle(compiled))


def kernel_handle(compiled: Any) -> KernelHandle | None:
    """Return a compiled kernel's launch parameters, or None if it is no plain launch.

    Kernels with clusters, cooperative grids, dependent launches, scratch memory or tensor
    descriptors need Triton's own launcher.
    """
    metadata, types = compiled.metadata, tuple(compiled.src.signature.values())
    special = any(getattr(metadata, name, None) for name in _SPECIAL_LAUNCHES)
    clusters = tuple(getattr(metadata, "cluster_dims", ())) not in ((), (1, 1, 1))
    if special or clusters or getattr(metadata, "num_ctas", 1) != 1:
        return None
    if not isinstance(compiled.function, int) or not all(isinstance(t, str) for t in types):
        return None
    return KernelHandle(compiled.function, 32 * metadata.num_warps, metadata.shared, types)


_SPECIAL_LAUNCHES = (
    "launch_cooperative_grid",
    "launch_pdl",
    "global_scratch_size",
    "profile_scratch_size",
    "tensordesc_meta",
)


def _interpreted(
    kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any]
) -> RecordedLaunch:
    names = list(arguments)

    def run(x: int, y: int, z: int, stream: None, *values: Any) -> None:
        kernel[x, y, z](**dict(zip(names, values, strict=True)))

    return RecordedLaunch(run, grid, (), list(arguments.values()))
