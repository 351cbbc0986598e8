"""Blocks of feature maps and their sums: the code that the AGC kernels share.

Maps (N, C, *) are viewed as (N, C, P) with strides sn, sc and sp. A block is BLOCK_P positions of
BLOCK_C maps of sample n, from position p0 and channel c0, as a tensor [BLOCK_P, BLOCK_C].

`agc_sum_kernel` reads maps and writes partial sums, (N, groups, parts, channels of a group). The
kernels that rewrite the maps add them up in a fixed order. There are no atomics, so results are the
same in every run.

`window_mean_kernel` writes partial sums of a 3x3 convolution's output without reading it, from the
sums of the convolution's input (ops/gain_conv.py). A program takes a few channels of x in one
sample and a block of filters, adds up the stored map sums, reads the borders and writes one partial
sum per filter.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gain_conv import ConvOperands
from ..layout import map_strides
from ..reference import LEAKY_SLOPE
from .launch import Launch
from .tiling import TiledMaps, divide, power_of_2, tile_maps

CHANNELS = 16  # channels of x per program of window_mean_kernel
BORDER = 256  # positions of a border that it reads at once

_SLOPE = tl.constexpr(LEAKY_SLOPE)


@triton.jit
def to_fp32(a):
    """Convert a to fp32.

    A bf16 number is the upper half of an fp32 number. Shifting it there lets the compiler round
    two numbers with one instruction before; a cast takes one instruction and a register for each.
    """
    if a.dtype == tl.bfloat16:
        return (a.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return a.to(tl.float32)


@triton.jit
def act(u, ACT: tl.constexpr):
    if ACT == "relu":
        u = tl.where(u <= 0, 0.0, u)  # u <= 0 is false for NaN, which is kept
    elif ACT == "leaky_relu":
        u = tl.where(u > 0, u, _SLOPE * u)
    elif ACT == "silu":
        u = u * tl.sigmoid(u)
    elif ACT == "gelu":
        u = 0.5 * u * (1.0 + tl.math.erf(0.7071067811865476 * u))
    return u


@triton.jit
def act_backward(g, saved, ACT: tl.constexpr):
    """Return g act'(u); `saved` is y for relu and leaky_relu, u for silu and gelu."""
    if ACT == "relu":
        g = tl.where(saved <= 0, 0.0, g)
    elif ACT == "leaky_relu":
        g = tl.where(saved > 0, g, _SLOPE * g)
    elif ACT == "silu":
        s = tl.sigmoid(saved)
        g = g * (s * (1.0 + saved * (1.0 - s)))
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.math.erf(0.7071067811865476 * saved))
        g = g * (cdf + saved * 0.3989422804014327 * tl.exp(-0.5 * saved * saved))
    return g


@triton.jit
def load_per_filter(parameter, c, C, DEFAULT: tl.constexpr):
    """Load a parameter of a unit's filters in fp32, (1, BLOCK_C); DEFAULT if None."""
    if parameter is None:
        return tl.full([1, c.shape[0]], DEFAULT, tl.float32)
    else:
        return tl.load(parameter + c, mask=c < C, other=DEFAULT).to(tl.float32)[None, :]


@triton.jit
def block_offsets(
    n, c0, p0, C, P, sn, sc, sp,
    EVEN_BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return offsets and mask of BLOCK_P positions of a unit.

    Only the corner may exceed int32.
    """
    i, j = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C)
    corner = tl.cast(n, tl.int64) * sn + tl.cast(c0, tl.int64) * sc + tl.cast(p0, tl.int64) * sp
    inside = tl.full([BLOCK_P, BLOCK_C], True, tl.int1)  # a constant: the compiler drops it
    if not EVEN_BLOCKS:
        inside = (p0 + i < P)[:, None] & (c0 + j < C)[None, :]
    return corner + (i[:, None] * sp + j[None, :] * sc), inside


@triton.jit
def mask_offsets(
    n, c0, p0, C, P, sn, sc, sp, EVEN_BLOCKS: tl.constexpr, MASK_PACKING: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return offsets and mask of the bytes of the ReLU mask that belong to a block."""
    corner = tl.cast(n, tl.int64) * sn + tl.cast(c0, tl.int64) * sc + tl.cast(p0, tl.int64) * sp
    if MASK_PACKING == "channels":
        i, j = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C // 8)
        at = corner // 8 + (i[:, None] * (sp // 8) + j[None, :])
        j *= 8
    else:
        i, j = tl.arange(0, BLOCK_P // 8), tl.arange(0, BLOCK_C)
        at = corner // 8 + (i[:, None] + j[None, :] * (sc // 8))
        i *= 8
    inside = tl.full([i.shape[0], j.shape[0]], True, tl.int1)
    if not EVEN_BLOCKS:
        inside = (p0 + i < P)[:, None] & (c0 + j < C)[None, :]
    return at, inside


@triton.jit
def pack_mask(positive, MASK_PACKING: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Pack a block of booleans into the bytes of the ReLU mask."""
    k = tl.arange(0, 8)
    if MASK_PACKING == "channels":
        bits = tl.reshape(positive.to(tl.int32), [BLOCK_P, BLOCK_C // 8, 8]) << k[None, None, :]
        byte = tl.sum(bits, 2)
    else:
        bits = tl.reshape(positive.to(tl.int32), [BLOCK_P // 8, 8, BLOCK_C]) << k[None, :, None]
        byte = tl.sum(bits, 1)
    return byte.to(tl.uint8)


@triton.jit
def unpack_mask(byte, MASK_PACKING: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Unpack the bytes of the ReLU mask to a block of 0 and 1."""
    k = tl.arange(0, 8)
    if MASK_PACKING == "channels":
        bits = (byte.to(tl.int32)[:, :, None] >> k[None, None, :]) & 1
    else:
        bits = (byte.to(tl.int32)[:, None, :] >> k[None, :, None]) & 1
    return tl.reshape(bits, [BLOCK_P, BLOCK_C])


@triton.jit
def load_parameters(mean, gamma, beta, lam, n, c, C, SAVED: tl.constexpr):
    """Load gamma, beta and lambda m if u is recomputed from z; else they are unused."""
    if SAVED == "input":
        m = tl.load(mean + n * C + c, mask=c < C, other=0.0)[None, :]
        gain, bias = load_per_filter(gamma, c, C, 1.0), load_per_filter(beta, c, C, 0.0)
        return gain, bias, load_per_filter(lam, c, C, 0.0) * m
    else:
        return 1.0, 0.0, 0.0


@triton.jit
def load_block(
    maps, n, c0, p0, C, P, sn, sc, sp,
    EVEN_BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Load a block of maps in fp32."""
    at, inside = block_offsets(n, c0, p0, C, P, sn, sc, sp, EVEN_BLOCKS, BLOCK_P, BLOCK_C)
    return tl.load(maps + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def act_gradient(
    g, saved, gain, bias, background, n, c0, p0, C, P, sn, sc, sp,
    ACT: tl.constexpr, SAVED: tl.constexpr, MASK_PACKING: tl.constexpr, EVEN_BLOCKS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return h = g act'(u) of a block, and z - lambda m if z is saved.

    Otherwise the second result is h, and not used.
    """
    up = load_block(g, n, c0, p0, C, P, sn, sc, sp, EVEN_BLOCKS, BLOCK_P, BLOCK_C)
    if SAVED == "input":
        z = load_block(saved, n, c0, p0, C, P, sn, sc, sp, EVEN_BLOCKS, BLOCK_P, BLOCK_C)
        centered = z - background
        return act_backward(up, gain * centered + bias, ACT), centered
    elif SAVED == "output":
        y = load_block(saved, n, c0, p0, C, P, sn, sc, sp, EVEN_BLOCKS, BLOCK_P, BLOCK_C)
        h = act_backward(up, y, ACT)
        return h, h
    elif SAVED == "mask":
        at, there = mask_offsets(
            n, c0, p0, C, P, sn, sc, sp, EVEN_BLOCKS, MASK_PACKING, BLOCK_P, BLOCK_C
        )
        byte = tl.load(saved + at, mask=there, other=0)
        h = act_backward(up, unpack_mask(byte, MASK_PACKING, BLOCK_P, BLOCK_C), ACT)
        return h, h
    else:
        return up, up


@triton.jit
def parts_of_unit(partial_sums, unit, parts, BLOCK_C: tl.constexpr):
    """Return the address of the partial sums of a unit."""
    return partial_sums + tl.cast(unit, tl.int64) * parts * BLOCK_C + tl.arange(0, BLOCK_C)


@triton.jit
def add_up_parts(at, parts, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr):
    """Add up the partial sums of a unit: (BLOCK_C,)."""
    t = tl.arange(0, BLOCK_T)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for t0 in range(0, parts, BLOCK_T):
        rows = at[None, :] + (t0 + t)[:, None] * BLOCK_C
        total += tl.load(rows, mask=(t0 + t < parts)[:, None], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def store_single_sample_grad(dlam, gamma, mean, s, c, C):
    """Write dlam for a batch of one sample: sum_h and sum_hz are dbeta and dgamma."""
    if dlam is not None:
        m = tl.load(mean + c, mask=c < C, other=0.0)
        gain = tl.sum(load_per_filter(gamma, c, C, 1.0), 0)
        tl.store(dlam + c, -gain * (s * m), mask=c < C)


@triton.jit
def _sum_blocks(
    g, saved, gain, bias, background, n, c0, first, steps, C, P, sn, sc, sp,
    ACT: tl.constexpr, SAVED: tl.constexpr, MASK_PACKING: tl.constexpr, GAIN_GRAD: tl.constexpr,
    EVEN_BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum h and, if GAIN_GRAD, h (z - lambda m) over `steps` blocks: (BLOCK_C,) each.

    The threads of a program read ROWS positions at once. With as many running sums, each thread
    adds up its own.
    """
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    total_hz = total
    for step in range(steps):
        p0 = first + step * BLOCK_P
        h, z = act_gradient(
            g, saved, gain, bias, background, n, c0, p0, C, P, sn, sc, sp,
            ACT, SAVED, MASK_PACKING, EVEN_BLOCKS, BLOCK_P, BLOCK_C,
        )  # fmt: skip
        total += tl.sum(tl.reshape(h, [BLOCK_P // ROWS, ROWS, BLOCK_C]), 0)
        if GAIN_GRAD:
            total_hz += tl.sum(tl.reshape(h * z, [BLOCK_P // ROWS, ROWS, BLOCK_C]), 0)
    return tl.sum(total, 0), tl.sum(total_hz, 0)


@triton.jit
def agc_sum_kernel(
    g, saved, mean, gamma, beta, lam, partial_sums, partial_sums_hz, C, P, groups, parts, steps,
    sn, sc, sp, ACT: tl.constexpr, SAVED: tl.constexpr, MASK_PACKING: tl.constexpr,
    GAIN_GRAD: tl.constexpr, EVEN_BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write partial sums of h and, if GAIN_GRAD, of h (z - lambda m).

    The forward sums z with the same kernel: it passes z as g and saves nothing.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    unit, part = program // parts, program % parts
    n, c0 = unit // groups, unit % groups * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    gain, bias, background = load_parameters(mean, gamma, beta, lam, n, c, C, SAVED)
    s, s_hz = _sum_blocks(
        g, saved, gain, bias, background, n, c0, part * steps * BLOCK_P, steps, C, P, sn, sc, sp,
        ACT, SAVED, MASK_PACKING, GAIN_GRAD, EVEN_BLOCKS, BLOCK_P, BLOCK_C, ROWS,
    )  # fmt: skip
    tl.store(parts_of_unit(partial_sums, unit, parts, BLOCK_C) + part * BLOCK_C, s)
    if GAIN_GRAD:
        tl.store(parts_of_unit(partial_sums_hz, unit, parts, BLOCK_C) + part * BLOCK_C, s_hz)


@triton.jit
def agc_filters_kernel(
    sum_h, sum_hz, mean, gamma, dgamma, dbeta, dlam, N, C,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add up the sums of all samples to the gradients of each filter's parameters."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    s = tl.arange(0, BLOCK_N)
    db = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    dl, dg = db, db
    for n0 in range(0, N, BLOCK_N):
        at = (n0 + s)[:, None] * C + c[None, :]
        there = (n0 + s < N)[:, None] & (c < C)[None, :]
        h = tl.load(sum_h + at, mask=there, other=0.0)
        db += h
        dl += h * tl.load(mean + at, mask=there, other=0.0)
        if dgamma is not None:
            dg += tl.load(sum_hz + at, mask=there, other=0.0)
    tl.store(dbeta + c, tl.sum(db, 0), mask=c < C)
    gain = tl.sum(load_per_filter(gamma, c, C, 1.0), 0)
    tl.store(dlam + c, -gain * tl.sum(dl, 0), mask=c < C)
    if dgamma is not None:
        tl.store(dgamma + c, tl.sum(dg, 0), mask=c < C)


@triton.jit
def _border(x, start, step, length, inside, BORDER: tl.constexpr, CHANNELS: tl.constexpr):
    """Sum x over `length` positions from `start`, `step` apart: (CHANNELS,)."""
    total = tl.zeros([BORDER, CHANNELS], tl.float32)
    for i0 in range(0, length, BORDER):
        i = i0 + tl.arange(0, BORDER)
        at = x[None, :] + start + i.to(tl.int64)[:, None] * step
        there = (i < length)[:, None] & inside[None, :]
        total += tl.load(at, mask=there, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def window_mean_kernel(
    x, map_sums, filters, partial_sums, C, F, height, width, total_groups, total_parts, parts,
    groups, sn, sc, sp, fo, fc, fi, fj, TOTAL_C: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_T: tl.constexpr, BORDER: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    part, unit = tl.program_id(0) % parts, tl.program_id(0) // parts
    n, f0 = unit // groups, unit % groups * BLOCK_F
    c = part * CHANNELS + tl.arange(0, CHANNELS)
    f = f0 + tl.arange(0, BLOCK_F)
    inside = c < C

    first = (tl.cast(n, tl.int64) * total_groups + c // TOTAL_C) * total_parts * TOTAL_C
    sums_at = map_sums + first + c % TOTAL_C
    sums = tl.zeros([BLOCK_T, CHANNELS], tl.float32)
    for t0 in range(0, total_parts, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        there = (t < total_parts)[:, None] & inside[None, :]
        sums += tl.load(sums_at[None, :] + t[:, None] * TOTAL_C, mask=there, other=0.0)
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
            # The upper taps do not read the bottom row, the left taps not the right column.
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
    tl.store(partial_sums + at, tl.sum(products, 1))


def sum_launches(
    z: Tensor, tiled: TiledMaps, operands: ConvOperands | None
) -> tuple[Tensor, list[Launch]]:
    """Return the partial sums of z and the launches that compute them.

    The sums are derived from the operands of a convolution if tiled.mean_known. A single-pass
    tiling needs none. The caller launches, which keeps the Python stack above a launch short.
    """
    if operands is not None and tiled.mean_known:
        launches: list[Launch] = []
        map_sums = operands.map_sums
        if map_sums is None:
            x = operands.x
            map_sums, launches = sum_launches(x, tile_maps(x, False, None, 0), None)
        partial_sums, last = window_mean_launch(operands, map_sums, tiled.tiling.block_c)
        return partial_sums, [*launches, last]
    partial_sums = tiled.empty_partial_sums(z)
    if tiled.tiling.single_pass:
        return partial_sums, []
    arguments = dict(
        g=z, saved=z, mean=None, gamma=None, beta=None, lam=None, partial_sums=partial_sums,
        partial_sums_hz=partial_sums, ACT="none", SAVED="nothing", GAIN_GRAD=False,
        **tiled.sum_arguments,
    )  # fmt: skip
    return partial_sums, [Launch(agc_sum_kernel, tiled.sum_grid, arguments)]


def window_mean_launch(
    operands: ConvOperands, map_sums: Tensor, block_f: int
) -> tuple[Tensor, Launch]:
    """Return a convolution's partial output sums and the launch that computes them.

    Args:
        map_sums: Partial sums of the maps of operands.x.
        block_f: Filters in a group of the result, (N, groups, parts, block_f).
    """
    x, filters = operands.x, operands.filters
    (n, c, height, width), f = x.shape, filters.shape[0]
    strides = map_strides(x)
    assert strides is not None  # gain_conv.derives_mean checks it first
    parts, groups = divide(c, CHANNELS), divide(f, block_f)
    partial_sums = map_sums.new_empty((n, groups, parts, block_f), dtype=torch.float32)
    geometry: dict[str, Any] = dict(zip(("sn", "sc", "sp"), strides, strict=True))
    geometry |= dict(zip(("fo", "fc", "fi", "fj"), filters.stride(), strict=True))
    arguments = dict(
        x=x, map_sums=map_sums, filters=filters, partial_sums=partial_sums, C=c, F=f,
        height=height, width=width, total_groups=map_sums.shape[1], total_parts=map_sums.shape[2],
        parts=parts, groups=groups, TOTAL_C=map_sums.shape[3], BLOCK_F=block_f,
        BLOCK_T=power_of_2(map_sums.shape[2], BORDER),
        BORDER=power_of_2(max(height, width), BORDER), CHANNELS=CHANNELS, num_warps=4, **geometry,
    )  # fmt: skip
    return partial_sums, Launch(window_mean_kernel, (n * groups * parts, 1, 1), arguments)


def empty_map_gradients(
    mean: Tensor, dgamma: Tensor | None, dbeta: Tensor, dlam: Tensor
) -> dict[str, Tensor | None]:
    """Allocate the sums per map that a backward kernel writes.

    For a single sample these are the gradients themselves, and no second kernel is needed.
    """
    if mean.shape[0] == 1:
        return dict(sum_h=dbeta, sum_hz=dgamma, dlam=dlam)
    sum_hz = None if dgamma is None else torch.empty_like(mean)
    return dict(sum_h=torch.empty_like(mean), sum_hz=sum_hz, dlam=None)


def filter_gradient_launches(
    sums: dict[str, Tensor | None],
    mean: Tensor,
    gamma: Tensor | None,
    dgamma: Tensor | None,
    dbeta: Tensor,
    dlam: Tensor,
) -> list[Launch]:
    """Return the launch that adds up map sums over samples; none for a single sample."""
    n, c = mean.shape
    if n == 1:
        return []
    block_c = power_of_2(c, 32)
    arguments = dict(
        sum_h=sums["sum_h"], sum_hz=sums["sum_hz"], mean=mean, gamma=gamma, dgamma=dgamma,
        dbeta=dbeta, dlam=dlam, N=n, C=c, BLOCK_N=power_of_2(n, 16), BLOCK_C=block_c, num_warps=1,
    )  # fmt: skip
    return [Launch(agc_filters_kernel, (divide(c, block_c), 1, 1), arguments)]
