"""The end of an encoder's stage in Triton: Eq. 1 without gain, activation and 2x2 pooling in one.

See ops/center_pool.py for the formulas, agc_device.py for units, parts and tiles. A tile here is
of windows: of each, a program reads four positions of v, or writes four of dv.
"""

import triton
import triton.language as tl

from .agc_device import (
    _act,
    _act_backward,
    _parts,
    _per_filter,
    _single_sample,
    _sum_of_parts,
    _widened,
)


@triton.jit
def _window(q, across, width, sp):
    """Row and column of window q, and where its first position is in memory: that may be far."""
    i, j = q // across, q % across
    return i, j, (2 * i * width + 2 * j).to(tl.int64) * sp


@triton.jit
def agc_pool_forward_kernel(
    v, pooled, index, totals, mean, beta, lam, partial, C, P, groups, parts, tiles, steps,
    windows, across, width, sn, sc, sp, on, oc, op, ACT: tl.constexpr, KNOWN: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if KNOWN:
        program = tl.num_programs(0) - 1 - program
    unit, tile = program // tiles, program % tiles
    n, c0 = unit // groups, unit % groups * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    bias, scale = _per_filter(beta, c, C, 0.0), _per_filter(lam, c, C, 0.0)
    m = _sum_of_parts(_parts(partial, unit, parts, BLOCK_C), parts, BLOCK_C, BLOCK_T) / P
    if tile == 0:
        tl.store(mean + n * C + c, m, mask=c < C)
    shift = bias - scale * m[None, :]
    of_v = v + tl.cast(n, tl.int64) * sn + c.to(tl.int64)[None, :] * sc
    of_out = tl.cast(n, tl.int64) * on + c.to(tl.int64)[None, :] * oc
    total = tl.zeros([BLOCK_Q, BLOCK_C], tl.float32)
    for step in range(steps):
        q = (tile * steps + step) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        inside = (q < windows)[:, None] & (c < C)[None, :]
        _, _, start = _window(q, across, width, sp)
        corner = of_v + start[:, None]
        chosen = tl.zeros([BLOCK_Q, BLOCK_C], tl.int32)
        best = tl.zeros([BLOCK_Q, BLOCK_C], tl.float32)
        for k in tl.static_range(4):
            at = corner + ((k // 2) * width + k % 2) * sp
            u = _act(tl.load(at, mask=inside, other=0.0).to(tl.float32) + shift, ACT)
            # Rounded before they are compared, as maps in memory would be: ties must be the same.
            u = _widened(u.to(pooled.dtype.element_ty))
            if k == 0:
                best = u
            else:
                later = (u > best) | (u != u)
                best = tl.where(later, u, best)
                chosen = tl.where(later, k, chosen)
        out = of_out + q.to(tl.int64)[:, None] * op
        tl.store(pooled + out, best.to(pooled.dtype.element_ty), mask=inside)
        tl.store(index + out, chosen.to(tl.uint8), mask=inside)
        if totals is not None:
            total += tl.where(inside, best, 0.0)
    if totals is not None:
        tl.store(_parts(totals, unit, tiles, BLOCK_C) + tile * BLOCK_C, tl.sum(total, 0))


@triton.jit
def agc_pool_backward_kernel(
    g, kept, index, dv, mean, lam, sum_h, dlam, partial, C, P, groups, parts, tiles, steps,
    windows, across, down, right, height, width, sn, sc, sp, on, oc, op,
    ACT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """dv, over windows that cover the map: an odd last row or column has half a window of its own,
    in which nothing was pooled. `down` x `right` are the windows that were."""
    unit, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    n, c0 = unit // groups, unit % groups * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    scale = _per_filter(lam, c, C, 0.0)
    s = _sum_of_parts(_parts(partial, unit, parts, BLOCK_C), parts, BLOCK_C, BLOCK_T)
    if tile == 0:
        tl.store(sum_h + n * C + c, s, mask=c < C)
        _single_sample(dlam, None, mean, s, c, C)
    above = scale * (s / P)[None, :]
    of_dv = dv + tl.cast(n, tl.int64) * sn + c.to(tl.int64)[None, :] * sc
    of_pooled = tl.cast(n, tl.int64) * on + c.to(tl.int64)[None, :] * oc
    for step in range(steps):
        q = (tile * steps + step) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        inside = (q < windows)[:, None] & (c < C)[None, :]
        i, j, start = _window(q, across, width, sp)
        whole = inside & ((i < down) & (j < right))[:, None]
        at = of_pooled + (i * right + j).to(tl.int64)[:, None] * op
        h = tl.load(g + at, mask=whole, other=0.0).to(tl.float32)
        if ACT != "none":
            h = _act_backward(h, tl.load(kept + at, mask=whole, other=0.0).to(tl.float32), ACT)
        chosen = tl.load(index + at, mask=whole, other=4).to(tl.int32)
        corner = of_dv + start[:, None]
        for k in tl.static_range(4):
            there = inside & ((2 * i + k // 2 < height) & (2 * j + k % 2 < width))[:, None]
            value = tl.where(chosen == k, h, 0.0) - above
            to = corner + ((k // 2) * width + k % 2) * sp
            tl.store(to, value.to(dv.dtype.element_ty), mask=there)
