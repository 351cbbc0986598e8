"""The gain in the weights as Triton kernels: V = gamma W, and back.

    dW = gamma dV        dgamma = <W, dV> over each filter

In plain torch these are eight passes over the weights, which at batch 1 are most of a network's
memory. Here each is one: a program takes one filter, whose weights lie together in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..maps import is_laid_out, like_layout, memory_order
from .launch import divide, launch, power_of_2

BLOCK = 1024  # weights that a program scales
BLOCK_BACKWARD = 8192  # weights that it reads at once to go back: a filter, nearly always


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


def takes(weight: Tensor) -> bool:
    """Whether each filter of weight (C_out, ...) lies together: contiguous and channels_last do."""
    order = memory_order(weight)
    return order[0] == 0 and is_laid_out(weight, order)


def scale(weight: Tensor, gain: Tensor, dtype: torch.dtype, traced: bool = False) -> Tensor:
    """gamma W in `dtype`, laid out as W."""
    scaled = torch.empty_like(weight, dtype=dtype)
    rows, length = weight.shape[0], weight[0].numel()
    launch(
        _scale, (rows, divide(length, BLOCK), 1), traced, weight.device, weight=weight,
        gain=gain.contiguous(), scaled=scaled, length=length, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return scaled


def scale_backward(
    weight: Tensor, gain: Tensor, dscaled: Tensor, traced: bool = False
) -> tuple[Tensor, Tensor]:
    """dW and dgamma."""
    dscaled = like_layout(dscaled, memory_order(weight))
    dweight = torch.empty_like(weight)
    dgain = gain.new_empty(gain.shape)
    rows, length = weight.shape[0], weight[0].numel()
    block = power_of_2(length, BLOCK_BACKWARD)
    launch(
        _scale_backward, (rows, 1, 1), traced, weight.device, weight=weight,
        gain=gain.contiguous(), dscaled=dscaled, dweight=dweight, dgain=dgain, length=length,
        BLOCK=block, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return dweight, dgain
