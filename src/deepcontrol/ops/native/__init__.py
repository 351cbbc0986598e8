"""An optional compiled helper that runs AGC layers in eager mode without Python.

Small steps in eager mode wait for the host. The helper (eager.cpp) repeats what the Python path
has recorded: the kernel launches, the convolution, and one autograd node per layer. It handles
only calls that were recorded; all others run in Python, with the same results.

    python -m deepcontrol.ops.native        builds it for the installed torch (build.py)
    DEEPCONTROL_NATIVE=0                    does not use it

A build is loaded when a layer first has something to repeat, never at import.
"""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import dispatch
from ..gain_conv import store_map_sums, stored_map_sums
from ..replay import KernelHandle, RecordedLaunch, Replay
from .build import load

# run(module, input) returns the output of a layer, or None where the Python path must run. It is
# None until a layer is prepared.
run: Callable[[nn.Module, Tensor], Any] | None = None
active = True  # False once there is nothing to load

_extension: Any = None
_INTEGERS = {"i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64"}
_FLOATS = {"fp32": "<f", "f32": "<f", "fp64": "<d"}


def why_python() -> str | None:
    """Return why eager mode uses Python, or None if it uses the compiled helper."""
    if os.environ.get("DEEPCONTROL_NATIVE") == "0":
        return "DEEPCONTROL_NATIVE=0"
    if not torch.cuda.is_available():
        return "the helper launches CUDA kernels, and there is no CUDA device"
    try:
        extension = load()
    except (ImportError, OSError, RuntimeError) as error:
        return f"the helper cannot be loaded: {error}"
    if extension is None:
        return "the helper is not built: run python -m deepcontrol.ops.native"
    return None if extension.has_cuda() else "the helper does not find the CUDA driver"


@contextmanager
def disabled() -> Iterator[None]:
    """Take the Python path, in all threads: for comparisons."""
    global run, active
    before = run, active
    run, active = None, False
    try:
        yield
    finally:
        run, active = before


def prepare(
    module: nn.Module,
    input: Tensor,
    parameters: dict[str, Tensor],
    settings: tuple[str, ...],
    **layer: Any,
) -> None:
    """Let `run` repeat the forward of a module that the Python path has just run.

    Args:
        module: The layer.
        input: Input of the layer.
        parameters: Parameters of the layer by name, as in module._parameters.
        settings: Names of the attributes that the forward depends on.
        **layer: The fields of `Layer` in eager.cpp.
    """
    global run, active
    if not active or (_extension is None and not _start()):
        return
    if input.is_cuda and not _extension.has_cuda():
        active = False
        return
    # A parametrized one, or one that a hook computes, is not in the table that `run` reads.
    if any(module._parameters.get(name) is not a for name, a in parameters.items()):
        return
    if not _extension.wants(module, input, layer.get("map_sums")):
        return
    if any(describe(layer[name]) is None for name in ("forward", "scale") if name in layer):
        return
    layer["device"] = input.device.index if input.is_cuda else -1
    layer["parameters"] = parameters
    layer["settings"] = {name: getattr(module, name) for name in settings}
    _extension.add(module, input, layer)
    run = _extension.run


def describe(replay: Replay | None) -> tuple[Any, ...] | None:
    """Return the arguments of a Program in program.h for a recorded Replay, or None.

    Slots count all arguments of the function, None included, and then the allocated tensors.
    """
    recording = None if replay is None else replay.recording
    if recording is None:
        return None
    given = [i for i, layout in enumerate(recording.inputs) if layout is not None]
    tensors = [*given, *(len(recording.inputs) + i for i in range(len(recording.allocations)))]
    launches = []
    for launch, indices in recording.launches:
        arguments = [
            (tensors[i], None) if i < len(tensors) else (-1, recording.constants[i - len(tensors)])
            for i in indices
        ]
        described = _describe_launch(launch, arguments, recording.device is not None)
        if described is None:
            return None
        launches.append(described)
    results = [-1 if i is None else tensors[i] for i in recording.results]
    used = {slot for *_, arguments in launches for slot, _ in arguments} | set(results)
    inputs = [layout if i in used else None for i, layout in enumerate(recording.inputs)]
    device = -1 if recording.device is None else recording.device
    return inputs, recording.allocations, launches, results, device


def _describe_launch(
    launch: RecordedLaunch, arguments: list[tuple[int, Any]], on_gpu: bool
) -> tuple[Any, ...] | None:
    if not on_gpu:  # Triton's interpreter
        return launch.run, launch.grid, 0, 0, arguments
    kernel = launch.kernel
    if kernel is None or 0 in launch.grid:
        return None
    packed = pack_arguments(kernel, arguments)
    return None if packed is None else (*_header(kernel, launch.grid), packed)


def _header(kernel: KernelHandle, grid: tuple[int, int, int]) -> tuple[Any, ...]:
    return kernel.function, grid, kernel.threads, kernel.shared


def pack_arguments(
    kernel: KernelHandle, arguments: list[tuple[int, Any]]
) -> list[tuple[int, int]] | None:
    """Return (slot, bits) for each kernel parameter, or None if one has no rule.

    Triton's kernels take their arguments without those compiled in, and then the addresses of two
    scratch buffers, which are 0 for kernels that use none.

    >>> kernel = KernelHandle(1, 128, 0, ("*fp32", "i32", "constexpr", "*bf16"))
    >>> pack_arguments(kernel, [(3, None), (-1, -2), (-1, 64), (-1, None)])
    [(3, 0), (-1, 18446744073709551614), (-1, 0), (-1, 0), (-1, 0)]
    """
    if len(kernel.types) != len(arguments):
        return None
    packed = []
    for kind, (slot, value) in zip(kernel.types, arguments, strict=True):
        if kind == "constexpr":
            continue
        if kind.startswith("*") and (slot >= 0 or value is None):
            packed.append((slot, 0))
        elif kind in _INTEGERS and slot < 0 and isinstance(value, int):
            packed.append((-1, int(value) % (1 << 64)))
        elif kind in _FLOATS and slot < 0 and isinstance(value, (int, float)):
            bits = struct.pack(_FLOATS[kind], value)
            packed.append((-1, int.from_bytes(bits, "little")))
        else:
            return None
    return [*packed, (-1, 0), (-1, 0)]


def _start() -> bool:
    """Load the helper; return whether there is one."""
    global _extension, active
    active = False
    if os.environ.get("DEEPCONTROL_NATIVE") == "0":
        return False
    try:
        extension = load()
    # Incompatible build, or an unreadable cache folder: `deepcontrol doctor` prints the reason.
    except (ImportError, OSError, RuntimeError):
        return False
    if extension is None:
        return False
    extension.configure(
        {
            "compiler": vars(torch.compiler),
            "forward_ad": vars(torch.autograd.forward_ad),
            "environment": dispatch._environment,
            "kernel_switch": dispatch._SWITCH,
            "describe": describe,
            "stored_sums": stored_map_sums,
            "store_sums": store_map_sums,
        }
    )
    _extension, active = extension, True
    return True
