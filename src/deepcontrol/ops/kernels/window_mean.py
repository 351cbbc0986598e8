"""The sums of a 3x3 convolution's output from the sums of its input, in Triton: ops/window_mean.py.

A program takes a few channels of x in one sample, and a block of filters: it adds up what the
kernel that wrote x has left, reads the borders, and leaves a part of the sum for each filter. The
kernel that rewrites the output adds up the parts, as it does with those of agc_sum_kernel.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backend import map_strides
from ..window_mean import Origin
from .launch import divide, launch, power_of_2

CHANNELS = 16  # that a program takes
BORDER = 256  # positions of a border that it reads at once


@triton.jit
def _border(x, start, step, length, inside, BORDER: tl.constexpr, CHANNELS: tl.constexpr):
    """The sum of x over `length` positions from `start`, `step` apart: (CHANNELS,)."""
    total = tl.zeros([BORDER, CHANNELS], tl.float32)
    for i0 in range(0, length, BORDER):
        i = i0 + tl.arange(0, BORDER)
        at = x[None, :] + start + i.to(tl.int64)[:, None] * step
        there = (i < length)[:, None] & inside[None, :]
        total += tl.load(at, mask=there, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def window_mean_kernel(
    x, totals, filters, partial, C, F, height, width, total_groups, total_parts, parts, groups,
    sn, sc, sp, fo, fc, fi, fj, TOTAL_C: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr,
    BORDER: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    part, unit = tl.program_id(0) % parts, tl.program_id(0) // parts
    n, f0 = unit // groups, unit % groups * BLOCK_F
    c = part * CHANNELS + tl.arange(0, CHANNELS)
    f = f0 + tl.arange(0, BLOCK_F)
    inside = c < C

    first = (tl.cast(n, tl.int64) * total_groups + c // TOTAL_C) * total_parts * TOTAL_C
    of_totals = totals + first + c % TOTAL_C
    sums = tl.zeros([BLOCK_T, CHANNELS], tl.float32)
    for t0 in range(0, total_parts, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        there = (t < total_parts)[:, None] & inside[None, :]
        sums += tl.load(of_totals[None, :] + t[:, None] * TOTAL_C, mask=there, other=0.0)
    whole = tl.sum(sums, 0)

    of_x = x + tl.cast(n, tl.int64) * sn + c.to(tl.int64) * sc
    row, bottom = tl.cast(width, tl.int64) * sp, tl.cast(height - 1, tl.int64) * width * sp
    right = tl.cast(width - 1, tl.int64) * sp
    top_row = _border(of_x, 0, sp, width, inside, BORDER, CHANNELS)
    bottom_row = _border(of_x, bottom, sp, width, inside, BORDER, CHANNELS)
    left_column = _border(of_x, 0, row, height, inside, BORDER, CHANNELS)
    right_column = _border(of_x, right, row, height, inside, BORDER, CHANNELS)

    there = (f < F)[:, None] & inside[None, :]
    of_filters = filters + f.to(tl.int64)[:, None] * fo + c[None, :] * fc
    products = tl.zeros([BLOCK_F, CHANNELS], tl.float32)
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            seen = whole
            corner = of_x
            # The upper taps never see the bottom row, the left ones never the right column.
            if i == 0:
                seen -= bottom_row
                corner += bottom
            elif i == 2:
                seen -= top_row
            if j == 0:
                seen -= right_column
                corner += right
            elif j == 2:
                seen -= left_column
            if i != 1 and j != 1:
                seen += tl.load(corner, mask=inside, other=0.0).to(tl.float32)
            taps = tl.load(of_filters + i * fi + j * fj, mask=there, other=0.0)
            products += taps.to(tl.float32) * seen[None, :]
    at = (tl.cast(unit, tl.int64) * parts + part) * BLOCK_F + tl.arange(0, BLOCK_F)
    tl.store(partial + at, tl.sum(products, 1))


def window_mean(origin: Origin, totals: Tensor, block_f: int) -> Tensor:
    """The sums of the convolution's output, (N, groups of block_f filters, parts, block_f)."""
    x, filters = origin.x, origin.filters
    (n, c, height, width), f = x.shape, filters.shape[0]
    strides = map_strides(x)
    assert strides is not None  # ops/window_mean.py asks first
    parts, groups = divide(c, CHANNELS), divide(f, block_f)
    partial = totals.new_empty((n, groups, parts, block_f), dtype=torch.float32)
    geometry: dict[str, Any] = dict(zip(("sn", "sc", "sp"), strides, strict=True))
    geometry |= dict(zip(("fo", "fc", "fi", "fj"), filters.stride(), strict=True))
    launch(
        window_mean_kernel, (n * groups * parts, 1, 1), False, x.device, x=x, totals=totals,
        filters=filters, partial=partial, C=c, F=f, height=height, width=width,
        total_groups=totals.shape[1], total_parts=totals.shape[2], parts=parts, groups=groups,
        TOTAL_C=totals.shape[3], BLOCK_F=block_f, BLOCK_T=power_of_2(totals.shape[2], BORDER),
        BORDER=power_of_2(max(height, width), BORDER), CHANNELS=CHANNELS, num_warps=4, **geometry,
    )  # fmt: skip
    return partial
