"""The gain in the weights as Triton kernels: V = gamma W, and back.

    dW = gamma dV        dgamma = <W, dV> over each filter

In plain torch these are eight passes over the weights, which at batch 1 are most of a network's
memory. Here each is one: a program takes one filter, whose weights lie together in memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from ..backend import on_device
from ..maps import like_layout, memory_order

BLOCK = 1024


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
    return order[0] == 0 and weight.permute(order).is_contiguous()


def scale(weight: Tensor, gain: Tensor, dtype: torch.dtype, traced: bool = False) -> Tensor:
    """gamma W in `dtype`, laid out as W."""
    scaled = torch.empty_like(weight, dtype=dtype)
    length = weight[0].numel()
    grid = (weight.shape[0], -(-length // BLOCK))
    arguments = dict(weight=weight, gain=gain.contiguous(), scaled=scaled, length=length)
    _run(_scale, grid, traced, **arguments)
    return scaled


def scale_backward(
    weight: Tensor, gain: Tensor, dscaled: Tensor, traced: bool = False
) -> tuple[Tensor, Tensor]:
    """dW and dgamma."""
    dscaled = like_layout(dscaled, memory_order(weight))
    dweight = torch.empty_like(weight)
    dgain = gain.new_empty(gain.shape)
    _run(
        _scale_backward, (weight.shape[0],), traced, weight=weight, gain=gain.contiguous(),
        dscaled=dscaled, dweight=dweight, dgain=dgain, length=weight[0].numel(),
    )  # fmt: skip
    return dweight, dgain


def _run(kernel: Any, grid: tuple[int, ...], traced: bool, **arguments: Any) -> None:
    with on_device(arguments["weight"]):
        (wrap_triton(kernel) if traced else kernel)[grid](**arguments, BLOCK=BLOCK, num_warps=4)
