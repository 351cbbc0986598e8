"""The gain in the weights in Triton: V = gamma W (op scale_filters), and its backward.

    dW = gamma dV        dgamma = <W, dV> over each filter

In plain PyTorch these are eight passes over the weights, which at batch 1 take most of a network's
memory. Here each is one pass: a program takes one filter, contiguous in memory.
Left to itself, torch.compile makes two kernels of the backward, one for dW and one for dgamma.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..gain_conv import scale_backward as dispatch_backward
from ..gain_conv import scale_function
from ..layout import is_laid_out, like_layout, memory_order
from .launch import divide, launch, power_of_2

BLOCK = 1024  # weights per program in the forward
BLOCK_BACKWARD = 8192  # weights that a program reads at once in the backward: nearly any filter


@triton.jit
def _scale(weight, gain, scaled, length, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.cast(row, tl.int64) * length + i
    w = tl.load(weight + at, mask=i < length).to(tl.float32)
    v = w * tl.load(gain + row).to(tl.float32)
    tl.store(scaled + at, v.to(scaled.dtype.element_ty), mask=i < length)


@triton.jit
def _scale_backward(weight, gain, dscaled, dweight, dgain, length, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    gamma = tl.load(gain + row).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = tl.cast(row, tl.int64) * length + i
        dv = tl.load(dscaled + at, mask=i < length, other=0.0).to(tl.float32)
        total += dv * tl.load(weight + at, mask=i < length, other=0.0).to(tl.float32)
        tl.store(dweight + at, (gamma * dv).to(dweight.dtype.element_ty), mask=i < length)
    tl.store(dgain + row, tl.sum(total, 0))


def supports(weight: Tensor) -> bool:
    """Return whether each filter of weight (C_out, ...) is contiguous in memory.

    It is in both the contiguous and the channels_last layout.
    """
    order = memory_order(weight)
    return order[0] == 0 and is_laid_out(weight, order)


def scale(weight: Tensor, gain: Tensor, dtype: torch.dtype, traced: bool = False) -> Tensor:
    """Return gamma W in `dtype`, in the layout of W."""
    scaled = torch.empty_like(weight, dtype=dtype)
    rows, length = weight.shape[0], weight[0].numel()
    arguments = dict(
        weight=weight, gain=gain.contiguous(), scaled=scaled, length=length, BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip
    launch(_scale, (rows, divide(length, BLOCK), 1), arguments, weight.device, traced)
    return scaled


def scale_backward(
    weight: Tensor, gain: Tensor, dscaled: Tensor, traced: bool = False
) -> tuple[Tensor, Tensor]:
    """Return dW and dgamma."""
    dscaled = like_layout(dscaled, memory_order(weight))
    dweight = torch.empty_like(weight)
    dgain = gain.new_empty(gain.shape)
    rows, length = weight.shape[0], weight[0].numel()
    block = power_of_2(length, BLOCK_BACKWARD)
    arguments = dict(
        weight=weight, gain=gain.contiguous(), dscaled=dscaled, dweight=dweight, dgain=dgain,
        length=length, BLOCK=block, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    launch(_scale_backward, (rows, 1, 1), arguments, weight.device, traced)
    return dweight, dgain


# The ops that torch.compile sees: kernel launches or plain PyTorch inside. Eager mode does not
# register them, because that imports the compiler.


def _traced_scale(weight: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    return scale_function(weight, traced=True)(weight, gain, dtype)


def _traced_backward(weight: Tensor, gain: Tensor, dscaled: Tensor) -> tuple[Tensor, Tensor]:
    return dispatch_backward(weight, gain, dscaled, traced=True)


def _fake_scale(weight: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(weight, dtype=dtype)


def _fake_backward(weight: Tensor, gain: Tensor, dscaled: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), torch.empty_like(gain)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, gain, _ = inputs
    ctx.save_for_backward(weight, gain)


def _backward(ctx: Any, dscaled: Tensor) -> tuple[Tensor | None, ...]:
    op = torch.ops.deepcontrol.scale_filters_backward
    return *op(*ctx.saved_tensors, dscaled), None


@functools.cache
def register() -> None:
    """Register the ops with torch.library."""
    op: Any = triton_op("deepcontrol::scale_filters", _traced_scale, mutates_args=())
    op.register_fake(_fake_scale)
    op.register_autograd(_backward, setup_context=_save)
    op = triton_op("deepcontrol::scale_filters_backward", _traced_backward, mutates_args=())
    op.register_fake(_fake_backward)
