"""The gain in the weights in Triton: V = gamma W (op scale_filters) and backward.

    dW = gamma dV        dgamma = <W, dV> over each filter

With a filter_norm c (weight normalization), V = gamma s W with s = c / |W|, and

    dW = gamma s (dV - W <W, dV> / |W|^2)        dgamma = s <W, dV>

A centered filter (weight standardization) has W - mean(W) in place of W, and dW less its mean. Mean
and norm are summed by the program that scales the filter, so they take no launch of their own.

In plain PyTorch these are eight passes over the weights, which at batch 1 take most of a network's
memory. Here each is one pass: a program takes one filter, contiguous in memory.
Left to itself, torch.compile makes two kernels of the backward, one for dW and one for dgamma.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..gain_conv import scale_backward as dispatch_backward
from ..gain_conv import scale_function
from ..layout import is_laid_out, like_layout, memory_order
from ..reference import SMALLEST_SQUARE, FilterNorm
from .launch import launch
from .tiling import divide, power_of_2

BLOCK = 1024  # weights per program in the forward
BLOCK_FILTER = 8192  # weights that a program reads at once if it sums a filter: nearly any filter

_SMALLEST_SQUARE = tl.constexpr(SMALLEST_SQUARE)


class MapGradients(NamedTuple):
    """Sums of h per map, (N, C), means, and the filters' gradients to make of them."""

    sum_h: Tensor
    mean: Tensor
    dbeta: Tensor
    dlam: Tensor


@triton.jit
def _square_norm(squares, NORM: tl.constexpr):
    """Return |W|^2 as reference.square_norm does."""
    square = tl.sum(squares, 0)
    return tl.where(square < _SMALLEST_SQUARE, NORM * NORM, square)


@triton.jit
def _filter_mean(weight, row, length, BLOCK: tl.constexpr):
    """Return the mean of the weights of a filter."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = tl.cast(row, tl.int64) * length + i
        total += tl.load(weight + at, mask=i < length, other=0.0).to(tl.float32)
    return tl.sum(total, 0) / length


@triton.jit
def filter_factor(
    weight, gain, row, length, NORM: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr
):
    """Return a filter's mean (0 unless CENTERED), and the factor from W - mean to V.

    A gain of None is 1.
    """
    factor = tl.cast(1.0, tl.float32)
    if gain is not None:
        factor = tl.load(gain + row).to(tl.float32)
    mean = tl.cast(0.0, tl.float32)
    if CENTERED:
        mean = _filter_mean(weight, row, length, BLOCK)
    if NORM > 0:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, length, BLOCK):
            j = start + tl.arange(0, BLOCK)
            other = tl.cast(row, tl.int64) * length + j
            w_j = tl.load(weight + other, mask=j < length, other=0.0).to(tl.float32)
            if CENTERED:
                w_j = tl.where(j < length, w_j - mean, 0.0)
            squares += w_j * w_j
        factor *= NORM * tl.rsqrt(_square_norm(squares, NORM))
    return mean, factor


@triton.jit
def _scale(
    weight, gain, scaled, length, NORM: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.cast(row, tl.int64) * length + i
    w = tl.load(weight + at, mask=i < length).to(tl.float32)
    mean, factor = filter_factor(weight, gain, row, length, NORM, CENTERED, BLOCK)
    if CENTERED:
        w -= mean
    v = w * factor
    tl.store(scaled + at, v.to(scaled.dtype.element_ty), mask=i < length)


@triton.jit
def _scale_backward(
    weight, gain, dscaled, dweight, dgain, sum_h, mean, dbeta, dlam, length, N,
    NORM: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dW and dgamma of a filter and, given the sums of its maps, dbeta, dlam."""
    row = tl.program_id(0)
    if sum_h is not None:
        db = tl.zeros([BLOCK_N], tl.float32)
        dl = db
        for n0 in range(0, N, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            h = tl.load(sum_h + n * tl.num_programs(0) + row, mask=n < N, other=0.0)
            db += h
            dl += h * tl.load(mean + n * tl.num_programs(0) + row, mask=n < N, other=0.0)
        tl.store(dbeta + row, tl.sum(db, 0))
        tl.store(dlam + row, -tl.sum(dl, 0))
    gamma = tl.load(gain + row).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if NORM > 0:
        squares = tl.zeros([BLOCK], tl.float32)
    if CENTERED:
        w_mean = _filter_mean(weight, row, length, BLOCK)
        dv_mean = _filter_mean(dscaled, row, length, BLOCK)
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = tl.cast(row, tl.int64) * length + i
        dv = tl.load(dscaled + at, mask=i < length, other=0.0).to(tl.float32)
        w = tl.load(weight + at, mask=i < length, other=0.0).to(tl.float32)
        if CENTERED:
            w = tl.where(i < length, w - w_mean, 0.0)
        total += dv * w
        if NORM > 0:
            squares += w * w
        else:
            tl.store(dweight + at, (gamma * dv).to(dweight.dtype.element_ty), mask=i < length)
    product = tl.sum(total, 0)
    if NORM > 0:
        square = _square_norm(squares, NORM)
        scale = NORM * tl.rsqrt(square)
        along = product / square
        for start in range(0, length, BLOCK):  # reads both again, from a cache
            i = start + tl.arange(0, BLOCK)
            at = tl.cast(row, tl.int64) * length + i
            dv = tl.load(dscaled + at, mask=i < length, other=0.0).to(tl.float32)
            w = tl.load(weight + at, mask=i < length, other=0.0).to(tl.float32)
            if CENTERED:  # a centered W has mean 0, so that dv alone has one to subtract
                w -= w_mean
                dv -= dv_mean
            dw = (dv - w * along) * (gamma * scale)
            tl.store(dweight + at, dw.to(dweight.dtype.element_ty), mask=i < length)
        product *= scale
    tl.store(dgain + row, product)


def supports(weight: Tensor) -> bool:
    """Return whether each filter of weight (C_out, ...) is contiguous in memory.

    It is in both the contiguous and the channels_last layout.
    """
    order = memory_order(weight)
    return order[0] == 0 and is_laid_out(weight, order)


def scale(
    weight: Tensor,
    gain: Tensor,
    dtype: torch.dtype,
    filter_norm: FilterNorm | None = None,
    traced: bool = False,
) -> Tensor:
    """Return the scaled filters V in `dtype`, in the layout of W."""
    scaled = torch.empty_like(weight, dtype=dtype)
    rows, length = weight.shape[0], weight[0].numel()
    # A program that needs the norm sums the whole filter, so it also writes as much of it.
    block = BLOCK if filter_norm is None else power_of_2(length, BLOCK_FILTER)
    norm, centered = filter_norm or (0.0, False)
    arguments = dict(
        weight=weight, gain=gain.contiguous(), scaled=scaled, length=length,
        NORM=norm, CENTERED=centered, BLOCK=block, num_warps=8 if block > 4 * BLOCK else 4,
    )  # fmt: skip
    launch(_scale, (rows, divide(length, block), 1), arguments, weight.device, traced)
    return scaled


def scale_backward(
    weight: Tensor,
    gain: Tensor,
    dscaled: Tensor,
    filter_norm: FilterNorm | None = None,
    traced: bool = False,
    map_gradients: MapGradients | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dW and dgamma; write dbeta and dlam if map_gradients are given.

    These take a launch of their own otherwise, which adds up the sums of all samples.
    """
    dscaled = like_layout(dscaled, memory_order(weight))
    dweight = torch.empty_like(weight)
    dgain = gain.new_empty(gain.shape)
    rows, length = weight.shape[0], weight[0].numel()
    block = power_of_2(length, BLOCK_FILTER)
    norm, centered = filter_norm or (0.0, False)
    arguments = dict(
        weight=weight, gain=gain.contiguous(), dscaled=dscaled, dweight=dweight, dgain=dgain,
        length=length, NORM=norm, CENTERED=centered, BLOCK=block, N=0, BLOCK_N=1,
        num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    arguments |= dict.fromkeys(("sum_h", "mean", "dbeta", "dlam"))
    if map_gradients is not None:
        n = map_gradients.sum_h.shape[0]
        arguments |= map_gradients._asdict() | dict(N=n, BLOCK_N=power_of_2(n, 64))
    launch(_scale_backward, (rows, 1, 1), arguments, weight.device, traced)
    return dweight, dgain


# The ops that torch.compile sees: kernel launches or plain PyTorch inside. Eager mode does not
# register them, because that imports the compiler. A FilterNorm is its two numbers here, since
# torch.library has no records.


def _filter_norm(norm: float | None, centered: bool) -> FilterNorm | None:
    return None if norm is None else FilterNorm(norm, centered)


def _traced_scale(
    weight: Tensor,
    gain: Tensor,
    dtype: torch.dtype,
    norm: float | None = None,
    centered: bool = False,
) -> Tensor:
    filter_norm = _filter_norm(norm, centered)
    return scale_function(weight, traced=True)(weight, gain, dtype, filter_norm)


def _traced_backward(
    weight: Tensor,
    gain: Tensor,
    dscaled: Tensor,
    norm: float | None = None,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    return dispatch_backward(weight, gain, dscaled, _filter_norm(norm, centered), traced=True)


def _fake_scale(
    weight: Tensor,
    gain: Tensor,
    dtype: torch.dtype,
    norm: float | None = None,
    centered: bool = False,
) -> Tensor:
    return torch.empty_like(weight, dtype=dtype)


def _fake_backward(
    weight: Tensor,
    gain: Tensor,
    dscaled: Tensor,
    norm: float | None = None,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), torch.empty_like(gain)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, gain, _, *ctx.filter_norm = inputs
    ctx.save_for_backward(weight, gain)


def _backward(ctx: Any, dscaled: Tensor) -> tuple[Tensor | None, ...]:
    op = torch.ops.deepcontrol.scale_filters_backward
    return *op(*ctx.saved_tensors, dscaled, *ctx.filter_norm), None, None, None


@functools.cache
def register() -> None:
    """Register the ops with torch.library."""
    op: Any = triton_op("deepcontrol::scale_filters", _traced_scale, mutates_args=())
    op.register_fake(_fake_scale)
    op.register_autograd(_backward, setup_context=_save)
    op = triton_op("deepcontrol::scale_filters_backward", _traced_backward, mutates_args=())
    op.register_fake(_fake_backward)
