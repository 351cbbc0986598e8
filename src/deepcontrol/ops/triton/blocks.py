"""Device functions that the AGC kernels share: load blocks of maps, activate, add up parts.

Maps (N, C, *) are viewed as (N, C, P) with strides sn, sc and sp. A block is BLOCK_P positions of
BLOCK_C maps of sample n, from position p0 and channel c0, as a tensor [BLOCK_P, BLOCK_C].
"""

import triton
import triton.language as tl

from ..reference import LEAKY_SLOPE

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
    """Return g act'(u), where `saved` is y for relu and leaky_relu, and u for silu and gelu."""
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
    """Load a parameter of each filter of a unit in fp32, (1, BLOCK_C); DEFAULT if it is None."""
    if parameter is None:
        return tl.full([1, c.shape[0]], DEFAULT, tl.float32)
    else:
        return tl.load(parameter + c, mask=c < C, other=DEFAULT).to(tl.float32)[None, :]


@triton.jit
def block_offsets(
    n, c0, p0, C, P, sn, sc, sp,
    EVEN_BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return offsets and mask of BLOCK_P positions of a unit; only the corner may exceed int32."""
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
    """Load gamma, beta and lambda m if u is recomputed from z; otherwise they are not used."""
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
    """Return h = g act'(u) of a block, and z - lambda m if z is saved (otherwise h, not used)."""
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
    """Write dlam for a batch of one sample, where sum_h and sum_hz are dbeta and dgamma."""
    if dlam is not None:
        m = tl.load(mean + c, mask=c < C, other=0.0)
        gain = tl.sum(load_per_filter(gamma, c, C, 1.0), 0)
        tl.store(dlam + c, -gain * (s * m), mask=c < C)
