"""Eq. 1 and its backward in Triton: the code that runs on the device. See agc.py for the launch.

    u = gamma (z - lam m) + beta     y = act(u)       m = mean of z over the map, (N, C)
    h = g act'(u)    dz = gamma (h - lam mean(h))     dbeta = sum h
    dgamma = sum h (z - lam m)                        dlam = -gamma sum_s m_s sum_p h

The neuron has its gain in the convolution's weights: there is no gamma for it here.

All the time is memory's, and a map is needed twice: for its mean, then to be rewritten. So the
second read must find it in a cache. A *unit*, a block of BLOCK_C maps of one sample, is cut into
tiles; one program sums a tile, waits until its unit's mean is known, and rewrites that same tile,
while the programs of the next units do their sums. What lies between the two reads is what the
running programs hold, a fraction of the L2 cache. A small map is one tile, and nobody waits.

That the programs of a unit run together is `plan`'s care and the device's, which starts them in
order. Should anything be in their way, such as another stream, a program that has waited for too
long makes the missing sums itself: nothing can hang.

Sums are partial sums added in a fixed order: results do not vary from run to run. The only atomics
count arrivals.
"""

import triton
import triton.language as tl

from ..activation import LEAKY_SLOPE

_SLOPE = tl.constexpr(LEAKY_SLOPE)


@triton.jit
def _act(u, ACT: tl.constexpr):
    if ACT == "relu":
        u = tl.where(u <= 0, 0.0, u)  # this way round a NaN stays one
    elif ACT == "leaky_relu":
        u = tl.where(u > 0, u, _SLOPE * u)
    elif ACT == "silu":
        u = u * tl.sigmoid(u)
    elif ACT == "gelu":
        u = 0.5 * u * (1.0 + tl.math.erf(0.7071067811865476 * u))
    return u


@triton.jit
def _act_backward(g, kept, ACT: tl.constexpr):
    """g act'(u), read off y for relu and leaky_relu, off u for silu and gelu."""
    if ACT == "relu":
        g = tl.where(kept <= 0, 0.0, g)
    elif ACT == "leaky_relu":
        g = tl.where(kept > 0, g, _SLOPE * g)
    elif ACT == "silu":
        s = tl.sigmoid(kept)
        g = g * (s * (1.0 + kept * (1.0 - s)))
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.math.erf(0.7071067811865476 * kept))
        g = g * (cdf + kept * 0.3989422804014327 * tl.exp(-0.5 * kept * kept))
    return g


@triton.jit
def _per_filter(of, c, C, DEFAULT: tl.constexpr):
    """A parameter of each filter of a unit in fp32, (1, BLOCK_C); DEFAULT where there is none."""
    if of is None:
        return tl.full([1, c.shape[0]], DEFAULT, tl.float32)
    else:
        return tl.load(of + c, mask=c < C, other=DEFAULT).to(tl.float32)[None, :]


@triton.jit
def _block(n, c0, p0, C, P, sn, sc, sp, EVEN: tl.constexpr, BLOCK_P: tl.constexpr,
           BLOCK_C: tl.constexpr):  # fmt: skip
    """Offsets and mask of BLOCK_P positions of a unit. Only the corner can be far: it is int64."""
    i, j = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C)
    corner = tl.cast(n, tl.int64) * sn + tl.cast(c0, tl.int64) * sc + tl.cast(p0, tl.int64) * sp
    inside = tl.full([BLOCK_P, BLOCK_C], True, tl.int1)  # a constant, which the compiler drops
    if not EVEN:
        inside = (p0 + i < P)[:, None] & (c0 + j < C)[None, :]
    return corner + (i[:, None] * sp + j[None, :] * sc), inside


@triton.jit
def _read(at, inside):
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _through_act(
    g, kept, gain, bias, background, at, inside, ACT: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """h = g act'(u) of a block, and z - lam m where z is kept (else h again, read by nobody)."""
    up = _read(g + at, inside)
    if KEPT == "input":
        centred = _read(kept + at, inside) - background
        return _act_backward(up, gain * centred + bias, ACT), centred
    elif KEPT == "output":
        h = _act_backward(up, _read(kept + at, inside), ACT)
        return h, h
    else:
        return up, up


@triton.jit
def _sums_of_tile(
    g, kept, gain, bias, background, n, c0, first, C, P, steps, sn, sc, sp,
    ACT: tl.constexpr, KEPT: tl.constexpr, TWO: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """The sums of h and, if TWO, of h (z - lam m) over a tile: (BLOCK_C,) each.

    ROWS positions are what the program's threads read in one go: with that many running sums, each
    thread adds up its own.
    """
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    total_hz = total
    for step in range(steps):
        at, inside = _block(n, c0, first + step * BLOCK_P, C, P, sn, sc, sp, EVEN, BLOCK_P, BLOCK_C)
        h, z = _through_act(g, kept, gain, bias, background, at, inside, ACT, KEPT)
        total += tl.sum(tl.reshape(h, [BLOCK_P // ROWS, ROWS, BLOCK_C]), 0)
        if TWO:
            total_hz += tl.sum(tl.reshape(h * z, [BLOCK_P // ROWS, ROWS, BLOCK_C]), 0)
    return tl.sum(total, 0), tl.sum(total_hz, 0)


@triton.jit
def _my_tile(units, tiles):
    """Which unit, and which tile of it, is this program's.

    The last unit first: it is what the convolution before has just written, and is in the cache
    still; and what the convolution after reads first is then what was written here last.
    """
    at = tl.program_id(0)
    return units - 1 - at // tiles, at % tiles


@triton.jit
def _arrive(counter):
    tl.debug_barrier()  # all of this program's threads have stored what the arrival announces
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def _look(counter):
    return tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def _partials(partial, unit, tile, tiles, BLOCK_C: tl.constexpr):
    return partial + (tl.cast(unit, tl.int64) * tiles + tile) * BLOCK_C + tl.arange(0, BLOCK_C)


@triton.jit
def _mean_of_partials(partial, unit, tiles, P, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr):
    t = tl.arange(0, BLOCK_T)
    rows = _partials(partial, unit, 0, tiles, BLOCK_C)[None, :] + t[:, None] * BLOCK_C
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for t0 in range(0, tiles, BLOCK_T):
        there = (t0 + t < tiles)[:, None]
        # Past the L1 cache, which may hold what was here before.
        total += tl.load(rows + t0 * BLOCK_C, mask=there, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0) / P


@triton.jit
def _publish(
    means, means_hz, partial, second, known, unit, n, c, C, P, tiles,
    TWO: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Make a unit's means of its partial sums, for all its programs to see."""
    m = _mean_of_partials(partial, unit, tiles, P, BLOCK_C, BLOCK_T)
    tl.store(means + n * C + c, m, mask=c < C)
    if TWO:
        m = _mean_of_partials(second, unit, tiles, P, BLOCK_C, BLOCK_T)
        tl.store(means_hz + n * C + c, m, mask=c < C)
    _arrive(known)


@triton.jit
def _unit_mean(
    g, kept, gain, bias, background, means, means_hz, partial, arrivals, known,
    unit, tile, n, c0, C, P, units, tiles, steps, sn, sc, sp, patience,
    ACT: tl.constexpr, KEPT: tl.constexpr, TWO: tl.constexpr, ALONE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """The mean of h over a unit's maps, stored for all; and whether this program was the last."""
    c = c0 + tl.arange(0, BLOCK_C)
    length = steps * BLOCK_P
    s, s_hz = _sums_of_tile(
        g, kept, gain, bias, background, n, c0, tile * length, C, P, steps, sn, sc, sp,
        ACT, KEPT, TWO, BLOCK_P, BLOCK_C, ROWS, EVEN,
    )  # fmt: skip
    if ALONE:
        tl.store(means + n * C + c, s / P, mask=c < C)
        if TWO:
            tl.store(means_hz + n * C + c, s_hz / P, mask=c < C)
        return s / P, True
    else:
        second = partial + tl.cast(units, tl.int64) * tiles * BLOCK_C  # the sums of h (z - lam m)
        tl.store(_partials(partial, unit, tile, tiles, BLOCK_C), s)
        if TWO:
            tl.store(_partials(second, unit, tile, tiles, BLOCK_C), s_hz)
        last = _arrive(arrivals + unit) == tiles - 1
        there = 0
        if last:
            there = _look(known + unit)
            if there == 0:
                _publish(
                    means, means_hz, partial, second, known + unit, unit, n, c, C, P, tiles,
                    TWO, BLOCK_C, BLOCK_T,
                )  # fmt: skip
                there = 1
        waited = 0
        while (there == 0) & (waited < patience):
            there = _look(known + unit)
            waited += 1
        # Out of patience: every tile's sum by hand. A map that is rewritten in place is whole until
        # the mean is known, so what was summed before that is right, and the same to the bit.
        t = 0
        while (there == 0) & (t < tiles):
            s, s_hz = _sums_of_tile(
                g, kept, gain, bias, background, n, c0, t * length, C, P, steps, sn, sc, sp,
                ACT, KEPT, TWO, BLOCK_P, BLOCK_C, ROWS, EVEN,
            )  # fmt: skip
            there = _look(known + unit)
            if there == 0:
                tl.store(_partials(partial, unit, t, tiles, BLOCK_C), s)
                if TWO:
                    tl.store(_partials(second, unit, t, tiles, BLOCK_C), s_hz)
            t += 1
        if there == 0:
            tl.debug_barrier()
            _publish(
                means, means_hz, partial, second, known + unit, unit, n, c, C, P, tiles,
                TWO, BLOCK_C, BLOCK_T,
            )  # fmt: skip
        tl.debug_barrier()
        return tl.load(means + n * C + c, mask=c < C, other=0.0, cache_modifier=".cg"), last


@triton.jit
def forward_kernel(
    z, y, mean, gamma, beta, lam, partial, arrivals, known, closed,
    N, C, P, units, groups, tiles, steps, sn, sc, sp, patience, ACT: tl.constexpr,
    ALONE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    unit, tile = _my_tile(units, tiles)
    n, c0 = unit // groups, unit % groups * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    m, _ = _unit_mean(
        z, z, 1.0, 0.0, 0.0, mean, mean, partial, arrivals, known,
        unit, tile, n, c0, C, P, units, tiles, steps, sn, sc, sp, patience,
        "none", "nothing", False, ALONE, BLOCK_P, BLOCK_C, BLOCK_T, ROWS, EVEN,
    )  # fmt: skip
    gain, bias = _per_filter(gamma, c, C, 1.0), _per_filter(beta, c, C, 0.0)
    background = _per_filter(lam, c, C, 0.0) * m[None, :]
    for step in range(steps):
        p0 = (tile * steps + step) * BLOCK_P
        at, inside = _block(n, c0, p0, C, P, sn, sc, sp, EVEN, BLOCK_P, BLOCK_C)
        x = _read(z + at, inside)
        if gamma is None:
            u = x + (bias - background)
        else:  # centred first: where the mean is far from 0, that rounds less
            u = gain * (x - background) + bias
        tl.store(y + at, _act(u, ACT).to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    g, kept, dz, mean, gamma, beta, lam, dgamma, dbeta, dlam, means_h, means_hz, partial,
    arrivals, known, closed, N, C, P, units, groups, tiles, steps, sn, sc, sp, patience,
    ACT: tl.constexpr, KEPT: tl.constexpr, ALONE: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    unit, tile = _my_tile(units, tiles)
    n, group = unit // groups, unit % groups
    c0 = group * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    gain, bias, background = 1.0, 0.0, 0.0
    if KEPT == "input":
        gain, bias = _per_filter(gamma, c, C, 1.0), _per_filter(beta, c, C, 0.0)
        m = tl.load(mean + n * C + c, mask=c < C, other=0.0)[None, :]
        background = _per_filter(lam, c, C, 0.0) * m
    m, last = _unit_mean(
        g, kept, gain, bias, background, means_h, means_hz, partial, arrivals, known,
        unit, tile, n, c0, C, P, units, tiles, steps, sn, sc, sp, patience,
        ACT, KEPT, dgamma is not None, ALONE, BLOCK_P, BLOCK_C, BLOCK_T, ROWS, EVEN,
    )  # fmt: skip
    above = _per_filter(lam, c, C, 0.0) * m[None, :]
    for step in range(steps):
        p0 = (tile * steps + step) * BLOCK_P
        at, inside = _block(n, c0, p0, C, P, sn, sc, sp, EVEN, BLOCK_P, BLOCK_C)
        h, _ = _through_act(g, kept, gain, bias, background, at, inside, ACT, KEPT)
        tl.store(dz + at, (gain * (h - above)).to(dz.dtype.element_ty), mask=inside)
    if last:
        _filters_backward(
            means_h, means_hz, mean, gamma, dgamma, dbeta, dlam, closed + group, c, C, N, P, BLOCK_N
        )  # fmt: skip


@triton.jit
def _filters_backward(
    means_h, means_hz, mean, gamma, dgamma, dbeta, dlam, closed, c, C, N, P, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The gradients of a group of filters, once the last of its samples has arrived."""
    if _arrive(closed) == N - 1:
        s = tl.arange(0, BLOCK_N)
        db = tl.zeros([BLOCK_N, c.shape[0]], tl.float32)
        dl, dg = db, db
        for n0 in range(0, N, BLOCK_N):
            at = (n0 + s)[:, None] * C + c[None, :]
            there = (n0 + s < N)[:, None] & (c < C)[None, :]
            h = tl.load(means_h + at, mask=there, other=0.0, cache_modifier=".cg")
            db += h
            dl += h * tl.load(mean + at, mask=there, other=0.0)
            if dgamma is not None:
                dg += tl.load(means_hz + at, mask=there, other=0.0, cache_modifier=".cg")
        tl.store(dbeta + c, tl.sum(db, 0) * P, mask=c < C)
        tl.store(
            dlam + c, -tl.sum(_per_filter(gamma, c, C, 1.0), 0) * tl.sum(dl, 0) * P, mask=c < C
        )
        if dgamma is not None:
            tl.store(dgamma + c, tl.sum(dg, 0) * P, mask=c < C)
