"""Choose the path of a tensor: Triton kernels, registered ops or plain PyTorch.

Detects torch.compile, export, tracing and functorch transforms. `fallback_reason` decides whether
the kernels run and says why not; `deepcontrol doctor` prints the reason. DEEPCONTROL_KERNELS=off
forces the plain path and is read at each call.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .layout import flat_strides, is_batched, shape_cache

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_environment = getattr(os.environ, "_data", os.environ)  # on Linux, a dict of bytes
_SWITCH = (
    os.fsencode("DEEPCONTROL_KERNELS") if _environment is not os.environ else "DEEPCONTROL_KERNELS"
)


def fallback_reason(z: Tensor) -> str | None:
    """Return why z (N, C, *) takes the plain path, or None if the kernels run."""
    if not z.is_cuda:
        return f"the kernels run on CUDA devices, not on {z.device.type}"
    reason = device_fallback_reason(z.device.index)
    if reason is not None:
        return reason
    return shape_cache(_maps_fallback_reason, z.dtype, z.shape, z.stride())


def _maps_fallback_reason(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> str | None:
    if dtype not in DTYPES:
        return f"the kernels take bf16, fp16 and fp32, not {dtype}"
    if 0 in shape:
        return "the tensor is empty"
    map_strides, positions = flat_strides(shape, strides), math.prod(shape[2:])
    if map_strides is None:
        return f"the positions of a map are not evenly spaced in memory: strides {strides}"
    # A program takes up to 2^13 positions of one map, or up to 2^6 small maps.
    far = map_strides[2] >= 2**18 or (positions < 2**13 and map_strides[1] >= 2**25)
    if far or max(shape[0] * shape[1], positions) >= 2**31:
        return "the kernels count in 32 bits within a block of maps"
    return None


def uses_kernels(z: Tensor, traced: bool = False) -> bool:
    """Return whether a kernel processes z.

    Args:
        traced: A compiler traces the call and launches the kernel later, on a real tensor.
    """
    # A subclass (a fake tensor, a distributed one) has no own memory to pass to a kernel.
    return (traced or type(z) in (Tensor, torch.nn.Parameter)) and fallback_reason(z) is None


def device_fallback_reason(device: int | None) -> str | None:
    """Return why no tensor on that CUDA device takes the kernels, or None."""
    if kernel_switch() == "off":  # before the cache: the variable may change within one process
        return "DEEPCONTROL_KERNELS=off"
    return _device_fallback_reason(device)


def kernel_switch() -> str:
    """Return DEEPCONTROL_KERNELS: "on", the default, or "off"."""
    if _SWITCH not in _environment:  # the common case: os.environ.get takes microseconds
        return "on"
    value = os.environ["DEEPCONTROL_KERNELS"]
    if value not in ("on", "off"):
        raise ValueError(f"DEEPCONTROL_KERNELS must be on or off, not {value!r}")
    return value


@functools.cache
def _device_fallback_reason(device: int | None) -> str | None:
    if torch.version.hip is not None:
        return "the kernels are tested on NVIDIA devices only"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):  # no bf16, and no memory ordering that Triton guarantees
        return f"the kernels need compute capability 8.0, the device has {capability}"
    return None


# A tensor that has left a transform of torch.func still wraps its value, which kernels need.
unwrap_if_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


def needs_plain_ops() -> bool:
    """Return whether the caller handles aten ops only: export, tracing, torch.func.

    torch.func (vmap, grad, jvp) rejects the autograd of ops made with torch.library, and
    forward-mode differentiation has no rule for them.
    """
    return (
        _is_exporting()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def compiles_with_ops() -> bool:
    """Return whether torch.compile is tracing and can use the registered ops.

    They need Triton.
    """
    return torch.compiler.is_compiling() and register_ops()


def needs_differentiable_backward(grad: Tensor, grad_mean: Tensor | None = None) -> bool:
    """Return whether a backward must be plain PyTorch.

    That is the case for second derivatives, where autograd differentiates the backward, for batched
    gradients, and under a transform of torch.func.
    """
    if torch.is_grad_enabled() or grad_mean is not None:
        return True
    return is_batched(grad) or needs_plain_ops()


def differentiate(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], g: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of function(*inputs) for the gradient g of its result.

    For a backward whose own derivatives are needed, or that gets a batch of gradients: autograd
    differentiates the plain function. Nothing is saved for it but the inputs.

    Args:
        needs: Whether each input needs a gradient; the others get None.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that a tensor that is two inputs at once gets a gradient for each.
        views = [a.view_as(a) for a in inputs]
        wanted = [a for a, need in zip(views, needs, strict=False) if need]
        grads = iter(
            torch.autograd.grad(
                function(*views), wanted, g, create_graph=create_graph, allow_unused=True
            )
        )
    return [next(grads) if need else None for _, need in zip(inputs, needs, strict=False)]


def register_ops() -> bool:
    """Register the ops for torch.compile; return False without Triton.

    Called when a model is compiled and not at import, because it imports Triton and the compiler.
    """
    try:
        from .triton import agc, agc_pool, gain, pool
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        return False
    for module in (agc, agc_pool, gain, pool):
        module.register()
    return True


def _is_exporting() -> bool:
    return torch.compiler.is_exporting()  # True inside torch 2.11's compiler if traced into


# Has the effect of torch.compiler.assume_constant_result without importing the compiler: dynamo
# calls the function while it traces and keeps the answer.
for _constant in (register_ops, _is_exporting):
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
