"""A single sample's neuron as one convolution call: the bias is known before it.

    y = relu( conv(x, V) + beta - lambda m )      V = gamma W,   m = V . S / P

S[c, k] is the sum of x over the positions that tap k of the kernel reads (ops/gain_conv.py), and P
the number of positions of the output. Two launches precede the convolution, whose epilogue adds the
bias and applies ReLU:

- `input_sums_kernel` reads x. Its programs write partial sums of each channel over the map and, for
  a 3x3 kernel, the sums of the four border rows and columns. It can also write the bits x > 0, the
  ReLU mask that the backward of the neuron before reads.
- `scale_with_mean_kernel` multiplies a filter with the sums. It can also scale the filter, which it
  reads anyway.

Folded layers need neither the mask nor the scaling. benchmarks/one_call.py uses both, to time the
same form in training.

The mean is that of the convolution as computed: V is rounded first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import FilterNorm
from . import tiling
from .blocks import pack_mask
from .gain import BLOCK_FILTER, filter_factor
from .launch import launch
from .tiling import divide, power_of_2

BLOCK = 8192  # elements of x that a program reads at once
PROGRAMS = 2  # programs per multiprocessor that sum x
MAX_CHANNELS = 512  # channels of a filter that a program reads at once


@triton.jit
def input_sums_kernel(
    x, sums, relu_mask, C, height, width, groups, parts, steps, sc, sh, sw,
    FLAT: tl.constexpr, EVEN_BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write partial sums of x, then sums of its top, bottom, left and right border."""
    part, c0 = tl.program_id(0) // groups, tl.program_id(0) % groups * BLOCK_C
    i, c = tl.arange(0, BLOCK_P), c0 + tl.arange(0, BLOCK_C)
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    if part < parts:
        for step in range(steps):
            p = tl.cast((part * steps + step) * BLOCK_P, tl.int64) + i
            at = p * sw if FLAT else p // width * sh + p % width * sw
            inside = tl.full([BLOCK_P, BLOCK_C], True, tl.int1)
            if not EVEN_BLOCKS:
                inside = (p < height * width)[:, None] & (c < C)[None, :]
            a = tl.load(x + (at[:, None] + c[None, :] * sc), mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(tl.reshape(a, [BLOCK_P // ROWS, ROWS, BLOCK_C]), 0)
            if relu_mask is not None:  # a NaN is not <= 0, and its gradient is kept
                j = tl.arange(0, BLOCK_C // 8)
                there = tl.full([BLOCK_P, BLOCK_C // 8], True, tl.int1)
                if not EVEN_BLOCKS:
                    there = (p < height * width)[:, None] & (c0 + 8 * j < C)[None, :]
                bits = pack_mask(tl.where(a <= 0, 0, 1), "channels", BLOCK_P, BLOCK_C)
                tl.store(relu_mask + (p[:, None] * (C // 8) + (c0 // 8 + j)[None, :]), bits, there)
    else:
        border = part - parts
        length, step = height, sh
        if border < 2:
            length, step = width, sw
        start = tl.cast(0, tl.int64)
        if border == 1:
            start = tl.cast(height - 1, tl.int64) * sh
        elif border == 3:
            start = tl.cast(width - 1, tl.int64) * sw
        for p0 in range(0, length, BLOCK_P):
            at = start + (p0 + i).to(tl.int64) * step
            inside = (p0 + i < length)[:, None] & (c < C)[None, :]
            a = tl.load(x + (at[:, None] + c[None, :] * sc), mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(tl.reshape(a, [BLOCK_P // ROWS, ROWS, BLOCK_C]), 0)
    tl.store(sums + part * C + c, tl.sum(total, 0), mask=c < C)


@triton.jit
def _corner(x, c, inside, row, column, sc, sh, sw):
    at = tl.cast(row, tl.int64) * sh + tl.cast(column, tl.int64) * sw
    return tl.load(x + at + c * sc, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def scale_with_mean_kernel(
    weight, gain, beta, lam, x, sums, scaled, mean, shift, C, length, height, width, parts,
    sc, sh, sw, fo, fc, fi, fj, NORM: tl.constexpr, CENTERED: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write V of a filter, the mean m of its map, and beta - lambda m.

    weight is V already, and not written again, if scaled is None.
    """
    row = tl.program_id(0)
    w_mean, factor = filter_factor(weight, gain, row, length, NORM, CENTERED, BLOCK)
    k, t = tl.arange(0, TAPS)[:, None], tl.arange(0, BLOCK_T)
    i, j = k // 3, k % 3
    total = tl.zeros([BLOCK_C], tl.float32)
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        inside = c < C
        of_parts = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for t0 in range(0, parts, BLOCK_T):
            there = (t0 + t < parts)[:, None] & inside[None, :]
            of_parts += tl.load(sums + (t0 + t)[:, None] * C + c[None, :], mask=there, other=0.0)
        seen = tl.sum(of_parts, 0)[None, :]
        if TAPS > 1:
            borders = sums + parts * C + c
            top = tl.load(borders, mask=inside, other=0.0)[None, :]
            bottom = tl.load(borders + C, mask=inside, other=0.0)[None, :]
            left = tl.load(borders + 2 * C, mask=inside, other=0.0)[None, :]
            right = tl.load(borders + 3 * C, mask=inside, other=0.0)[None, :]
            # The upper taps do not read the bottom row, the left taps not the right column.
            seen = seen - tl.where(i == 0, bottom, 0.0) - tl.where(i == 2, top, 0.0)
            seen = seen - tl.where(j == 0, right, 0.0) - tl.where(j == 2, left, 0.0)
            above = _corner(x, c, inside, 0, 0, sc, sh, sw)
            seen += tl.where((i == 2) & (j == 2), above, 0.0)
            above = _corner(x, c, inside, 0, width - 1, sc, sh, sw)
            seen += tl.where((i == 2) & (j == 0), above, 0.0)
            below = _corner(x, c, inside, height - 1, 0, sc, sh, sw)
            seen += tl.where((i == 0) & (j == 2), below, 0.0)
            below = _corner(x, c, inside, height - 1, width - 1, sc, sh, sw)
            seen += tl.where((i == 0) & (j == 0), below, 0.0)
        at = tl.cast(row, tl.int64) * fo + (c[None, :] * fc + i * fi + j * fj)
        there = inside[None, :] & ((k < 9) if TAPS > 1 else (k < 1))
        v = tl.load(weight + at, mask=there, other=0.0)
        if scaled is not None:
            v = ((v.to(tl.float32) - w_mean) * factor).to(scaled.dtype.element_ty)
            tl.store(scaled + at, v, mask=there)
        total += tl.sum(tl.where(there, v.to(tl.float32) * seen, 0.0), 0)
    m = tl.sum(total, 0) / (tl.cast(height, tl.float32) * width)
    tl.store(mean + row, m)
    bias = tl.load(beta + row).to(tl.float32) - tl.load(lam + row).to(tl.float32) * m
    tl.store(shift + row, bias.to(shift.dtype.element_ty))


class Window(NamedTuple):
    """The positions of x (1, C, H, W) that a convolution reads, and their strides.

    A 3x3 kernel with padding 1 and stride 1 reads all of them, a 1x1 kernel every stride-th.
    """

    height: int
    width: int
    sc: int
    sh: int
    sw: int

    @classmethod
    def of(cls, x: Tensor, stride: Sequence[int]) -> "Window":
        _, _, height, width = x.shape
        _, sc, sh, sw = x.stride()
        down, right = stride
        return cls(divide(height, down), divide(width, right), sc, down * sh, right * sw)


def input_sums(
    x: Tensor, window: Window, borders: bool, with_mask: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return sums (parts + 4 or 0, C) of x (1, C, H, W), and its ReLU mask or None.

    Args:
        window: The positions to sum.
        borders: Whether the last four rows are the sums of the borders of each channel.
        with_mask: Whether to write the bits x > 0, laid out as activation.empty_relu_mask says. x
            is then channels_last, and its channels are a multiple of 8.
    """
    c, positions = x.shape[1], window.height * window.width
    block_c = power_of_2(max(c, 16), 64 if c <= 128 else 32)
    block_p = min(BLOCK // block_c, power_of_2(positions, BLOCK))
    groups, blocks = divide(c, block_c), divide(positions, block_p)
    parts = min(blocks, divide(PROGRAMS * tiling.multiprocessors(x.device), groups))
    steps = divide(blocks, parts)
    parts = divide(blocks, steps)
    rows = parts + 4 * borders
    sums = x.new_empty((rows, c), dtype=torch.float32)
    relu_mask = None
    if with_mask:
        relu_mask = torch.empty(x.numel() // 8, dtype=torch.uint8, device=x.device)
    warps = max(1, min(8, block_c * block_p // 1024))
    arguments = dict(
        x=x, sums=sums, relu_mask=relu_mask, C=c, groups=groups, parts=parts, steps=steps,
        FLAT=window.sh == window.width * window.sw,
        EVEN_BLOCKS=c % block_c == 0 and positions == parts * steps * block_p,
        BLOCK_P=block_p, BLOCK_C=block_c, ROWS=min(block_p, max(1, 256 * warps // block_c)),
        num_warps=warps, **window._asdict(),
    )  # fmt: skip
    launch(input_sums_kernel, (groups * rows, 1, 1), arguments, x.device)
    return sums, relu_mask


def scale_with_mean(
    weight: Tensor,
    gain: Tensor | None,
    beta: Tensor,
    lam: Tensor,
    x: Tensor,
    window: Window,
    sums: Tensor,
    dtype: torch.dtype,
    filter_norm: FilterNorm | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return V in W's layout, and means (1, F) and bias beta - lambda m of the maps.

    Args:
        weight: Filters W (F, C, 3, 3) of a convolution with padding 1, or (F, C, 1, 1).
        gain: gamma; None if weight is V already, and the V returned is None.
        window: The positions of x that the convolution reads.
        sums: The result of `input_sums`, with borders for a 3x3 kernel.
        dtype: Dtype of V and the bias. With bf16 maps and an fp32 bias cuDNN returns garbage.
        filter_norm: Normalization of each filter before the gain, or None.
    """
    (filters, c), taps = weight.shape[:2], weight.shape[2] * weight.shape[3]
    scaled = None if gain is None else torch.empty_like(weight, dtype=dtype)
    mean = x.new_empty((1, filters), dtype=torch.float32)
    shift = x.new_empty(filters, dtype=dtype)
    block_c, parts = power_of_2(c, MAX_CHANNELS), sums.shape[0] - 4 * (taps > 1)
    norm, centered = filter_norm or (0.0, False)
    arguments = dict(
        weight=weight, gain=None if gain is None else gain.contiguous(), beta=beta.contiguous(),
        lam=lam.contiguous(), x=x, sums=sums, scaled=scaled, mean=mean, shift=shift, C=c,
        length=c * taps, parts=parts, NORM=norm, CENTERED=centered,
        TAPS=16 if taps > 1 else 1, BLOCK_C=block_c,
        BLOCK_T=power_of_2(parts, max(1, 4096 // block_c)),
        BLOCK=power_of_2(c * taps, BLOCK_FILTER), num_warps=8 if taps * block_c > 2048 else 4,
        **window._asdict(), **dict(zip(("fo", "fc", "fi", "fj"), weight.stride(), strict=True)),
    )  # fmt: skip
    launch(scale_with_mean_kernel, (filters, 1, 1), arguments, x.device)
    return scaled, mean, shift
