"""Eq. 1 and its backward in Triton: the code that runs on the device. See agc.py for the launches.

    u = gamma (z - lam m) + beta     y = act(u)       m = mean of z over the map, (N, C)
    h = g act'(u)    dz = gamma (h - lam mean(h))     dbeta = sum h
    dgamma = sum h (z - lam m)                        dlam = -gamma sum_s m_s sum_p h

The neuron has its gain in the convolution's weights: there is no gamma for it here.

A *unit* is a block of BLOCK_C maps of one sample. Its positions are cut into parts, which programs
sum (`agc_sum_kernel`), and then into tiles, which programs rewrite after adding up the parts' sums
(`agc_forward_kernel`, `agc_backward_kernel`). Where maps are small, one program does both, ALONE:
it holds the unit in its registers, as one block, and reads it once.

Sums are partial sums added in a fixed order, and there are no atomics: results do not vary from run
to run.

Programs sum from the last part to the first and rewrite from the first tile to the last: what was
read last, or written last by the convolution before, is in the L2 cache still. Where the mean is
known without reading (window_mean.py), they rewrite from the last tile to the first.

A program that rewrites asks for its filters' parameters before it adds up the parts, so as not to
wait for memory twice: of small maps the time is all waiting.
"""

import triton
import triton.language as tl

from ..activation import LEAKY_SLOPE

_SLOPE = tl.constexpr(LEAKY_SLOPE)


@triton.jit
def _widened(a):
    """a in fp32. A bf16 number is the upper half of one, and to shift it there lets the compiler
    round two numbers by one instruction before; with a cast it takes one for each, and registers.
    """
    if a.dtype == tl.bfloat16:
        return (a.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return a.to(tl.float32)


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
def _block(
    n, c0, p0, C, P, sn, sc, sp,
    EVEN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Offsets and mask of BLOCK_P positions of a unit. Only the corner can be far: it is int64."""
    i, j = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C)
    corner = tl.cast(n, tl.int64) * sn + tl.cast(c0, tl.int64) * sc + tl.cast(p0, tl.int64) * sp
    inside = tl.full([BLOCK_P, BLOCK_C], True, tl.int1)  # a constant, which the compiler drops
    if not EVEN:
        inside = (p0 + i < P)[:, None] & (c0 + j < C)[None, :]
    return corner + (i[:, None] * sp + j[None, :] * sc), inside


@triton.jit
def _bytes(
    n, c0, p0, C, P, sn, sc, sp, EVEN: tl.constexpr, PACK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Offsets and mask of the bytes that hold a bit for each element of a block: open_bits.py."""
    corner = tl.cast(n, tl.int64) * sn + tl.cast(c0, tl.int64) * sc + tl.cast(p0, tl.int64) * sp
    if PACK == "channels":
        i, j = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C // 8)
        at = corner // 8 + (i[:, None] * (sp // 8) + j[None, :])
        j *= 8
    else:
        i, j = tl.arange(0, BLOCK_P // 8), tl.arange(0, BLOCK_C)
        at = corner // 8 + (i[:, None] + j[None, :] * (sc // 8))
        i *= 8
    inside = tl.full([i.shape[0], j.shape[0]], True, tl.int1)
    if not EVEN:
        inside = (p0 + i < P)[:, None] & (c0 + j < C)[None, :]
    return at, inside


@triton.jit
def _pack(is_open, PACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    k = tl.arange(0, 8)
    if PACK == "channels":
        bits = tl.reshape(is_open.to(tl.int32), [BLOCK_P, BLOCK_C // 8, 8]) << k[None, None, :]
        byte = tl.sum(bits, 2)
    else:
        bits = tl.reshape(is_open.to(tl.int32), [BLOCK_P // 8, 8, BLOCK_C]) << k[None, :, None]
        byte = tl.sum(bits, 1)
    return byte.to(tl.uint8)


@triton.jit
def _unpack(byte, PACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    k = tl.arange(0, 8)
    if PACK == "channels":
        bits = (byte.to(tl.int32)[:, :, None] >> k[None, None, :]) & 1
    else:
        bits = (byte.to(tl.int32)[:, None, :] >> k[None, :, None]) & 1
    return tl.reshape(bits, [BLOCK_P, BLOCK_C])


@triton.jit
def _kept_parameters(mean, gamma, beta, lam, n, c, C, KEPT: tl.constexpr):
    """gamma, beta and lam m, where z is kept and u is made of it again; else nobody reads them."""
    if KEPT == "input":
        m = tl.load(mean + n * C + c, mask=c < C, other=0.0)[None, :]
        gain, bias = _per_filter(gamma, c, C, 1.0), _per_filter(beta, c, C, 0.0)
        return gain, bias, _per_filter(lam, c, C, 0.0) * m
    else:
        return 1.0, 0.0, 0.0


@triton.jit
def _read(
    of, n, c0, p0, C, P, sn, sc, sp,
    EVEN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A block of maps in fp32."""
    at, inside = _block(n, c0, p0, C, P, sn, sc, sp, EVEN, BLOCK_P, BLOCK_C)
    return tl.load(of + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _through_act(
    g, kept, gain, bias, background, n, c0, p0, C, P, sn, sc, sp,
    ACT: tl.constexpr, KEPT: tl.constexpr, PACK: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """h = g act'(u) of a block, and z - lam m where z is kept (else h again, read by nobody)."""
    up = _read(g, n, c0, p0, C, P, sn, sc, sp, EVEN, BLOCK_P, BLOCK_C)
    if KEPT == "input":
        z = _read(kept, n, c0, p0, C, P, sn, sc, sp, EVEN, BLOCK_P, BLOCK_C)
        centered = z - background
        return _act_backward(up, gain * centered + bias, ACT), centered
    elif KEPT == "output":
        y = _read(kept, n, c0, p0, C, P, sn, sc, sp, EVEN, BLOCK_P, BLOCK_C)
        h = _act_backward(up, y, ACT)
        return h, h
    elif KEPT == "bits":
        at, there = _bytes(n, c0, p0, C, P, sn, sc, sp, EVEN, PACK, BLOCK_P, BLOCK_C)
        byte = tl.load(kept + at, mask=there, other=0)
        h = _act_backward(up, _unpack(byte, PACK, BLOCK_P, BLOCK_C), ACT)
        return h, h
    else:
        return up, up


@triton.jit
def _sums(
    g, kept, gain, bias, background, n, c0, first, steps, C, P, sn, sc, sp,
    ACT: tl.constexpr, KEPT: tl.constexpr, PACK: tl.constexpr, TWO: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sums of h and, if TWO, of h (z - lam m), over `steps` blocks: (BLOCK_C,) each.

    ROWS positions are what the program's threads read in one go: with that many running sums, each
    thread adds up its own.
    """
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    total_hz = total
    for step in range(steps):
        p0 = first + step * BLOCK_P
        h, z = _through_act(
            g, kept, gain, bias, background, n, c0, p0, C, P, sn, sc, sp,
            ACT, KEPT, PACK, EVEN, BLOCK_P, BLOCK_C,
        )  # fmt: skip
        total += tl.sum(tl.reshape(h, [BLOCK_P // ROWS, ROWS, BLOCK_C]), 0)
        if TWO:
            total_hz += tl.sum(tl.reshape(h * z, [BLOCK_P // ROWS, ROWS, BLOCK_C]), 0)
    return tl.sum(total, 0), tl.sum(total_hz, 0)


@triton.jit
def _parts(partial, unit, parts, BLOCK_C: tl.constexpr):
    """Where the partial sums of a unit begin."""
    return partial + tl.cast(unit, tl.int64) * parts * BLOCK_C + tl.arange(0, BLOCK_C)


@triton.jit
def _sum_of_parts(at, parts, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr):
    t = tl.arange(0, BLOCK_T)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for t0 in range(0, parts, BLOCK_T):
        rows = at[None, :] + (t0 + t)[:, None] * BLOCK_C
        total += tl.load(rows, mask=(t0 + t < parts)[:, None], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def agc_sum_kernel(
    g, kept, mean, gamma, beta, lam, partial, partial_hz, C, P, groups, parts, steps,
    sn, sc, sp, ACT: tl.constexpr, KEPT: tl.constexpr, PACK: tl.constexpr, TWO: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Part sums of h (forward: of z, as g with nothing kept) and of h (z - lam m)."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    unit, part = program // parts, program % parts
    n, c0 = unit // groups, unit % groups * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    gain, bias, background = _kept_parameters(mean, gamma, beta, lam, n, c, C, KEPT)
    s, s_hz = _sums(
        g, kept, gain, bias, background, n, c0, part * steps * BLOCK_P, steps, C, P, sn, sc, sp,
        ACT, KEPT, PACK, TWO, EVEN, BLOCK_P, BLOCK_C, ROWS,
    )  # fmt: skip
    tl.store(_parts(partial, unit, parts, BLOCK_C) + part * BLOCK_C, s)
    if TWO:
        tl.store(_parts(partial_hz, unit, parts, BLOCK_C) + part * BLOCK_C, s_hz)


@triton.jit
def _write_activated(
    x, y, bits, totals, gamma, gain, bias, background, n, c0, p0, C, P, sn, sc, sp,
    ACT: tl.constexpr, PACK: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y of a block x of z, and where it is open; returns the sums of what it wrote, if there are
    totals to add them to. ROWS: see _sums."""
    if gamma is None:
        u = x + (bias - background)
    else:  # centered first: where the mean is far from 0, that rounds less
        u = gain * (x - background) + bias
    result = _act(u, ACT).to(y.dtype.element_ty)
    at, inside = _block(n, c0, p0, C, P, sn, sc, sp, EVEN, BLOCK_P, BLOCK_C)
    tl.store(y + at, result, mask=inside)
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    if totals is not None:
        written = _widened(result)
        if not EVEN:
            written = tl.where(inside, written, 0.0)
        total = tl.sum(tl.reshape(written, [BLOCK_P // ROWS, ROWS, BLOCK_C]), 0)
    if bits is not None:  # read off the rounded result, as they would be off y itself
        b, there = _bytes(n, c0, p0, C, P, sn, sc, sp, EVEN, PACK, BLOCK_P, BLOCK_C)
        is_open = _act_backward(1.0, _widened(result), ACT) == 1.0
        tl.store(bits + b, _pack(is_open, PACK, BLOCK_P, BLOCK_C), mask=there)
    return total


@triton.jit
def agc_forward_kernel(
    z, y, bits, totals, mean, gamma, beta, lam, partial, C, P, groups, parts, tiles, steps,
    sn, sc, sp, ACT: tl.constexpr, PACK: tl.constexpr, ALONE: tl.constexpr, KNOWN: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """y, the means, and where wanted the bits of open_bits.py and the sums of y's tiles."""
    program = tl.program_id(0)
    if KNOWN:
        program = tl.num_programs(0) - 1 - program
    unit, tile = program // tiles, program % tiles
    n, c0 = unit // groups, unit % groups * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    gain, bias = _per_filter(gamma, c, C, 1.0), _per_filter(beta, c, C, 0.0)
    scale = _per_filter(lam, c, C, 0.0)
    if ALONE:
        x = _read(z, n, c0, 0, C, P, sn, sc, sp, EVEN, BLOCK_P, BLOCK_C)
        m = tl.sum(x, 0) / P
    else:
        m = _sum_of_parts(_parts(partial, unit, parts, BLOCK_C), parts, BLOCK_C, BLOCK_T) / P
    if tile == 0:
        tl.store(mean + n * C + c, m, mask=c < C)
    background = scale * m[None, :]
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    if ALONE:
        total += _write_activated(
            x, y, bits, totals, gamma, gain, bias, background, n, c0, 0, C, P, sn, sc, sp,
            ACT, PACK, EVEN, BLOCK_P, BLOCK_C, ROWS,
        )  # fmt: skip
    else:
        for step in range(steps):
            p0 = (tile * steps + step) * BLOCK_P
            total += _write_activated(
                _read(z, n, c0, p0, C, P, sn, sc, sp, EVEN, BLOCK_P, BLOCK_C), y, bits, totals,
                gamma, gain, bias, background, n, c0, p0, C, P, sn, sc, sp,
                ACT, PACK, EVEN, BLOCK_P, BLOCK_C, ROWS,
            )  # fmt: skip
    if totals is not None:
        tl.store(_parts(totals, unit, tiles, BLOCK_C) + tile * BLOCK_C, tl.sum(total, 0))


@triton.jit
def _single_sample(dlam, gamma, mean, s, c, C):
    """dlam, where the sample is the only one: sum_h and sum_hz are dbeta and dgamma then."""
    if dlam is not None:
        m = tl.load(mean + c, mask=c < C, other=0.0)
        gain = tl.sum(_per_filter(gamma, c, C, 1.0), 0)
        tl.store(dlam + c, -gain * (s * m), mask=c < C)


@triton.jit
def agc_backward_kernel(
    g, kept, dz, mean, gamma, beta, lam, sum_h, sum_hz, dlam, partial, partial_hz, C, P,
    groups, parts, tiles, steps, sn, sc, sp, ACT: tl.constexpr, KEPT: tl.constexpr,
    PACK: tl.constexpr, TWO: tl.constexpr, ALONE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    unit, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    n, c0 = unit // groups, unit % groups * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    gain, bias, background = _kept_parameters(mean, gamma, beta, lam, n, c, C, KEPT)
    scale = _per_filter(lam, c, C, 0.0)
    if ALONE:
        h, centered = _through_act(
            g, kept, gain, bias, background, n, c0, 0, C, P, sn, sc, sp,
            ACT, KEPT, PACK, EVEN, BLOCK_P, BLOCK_C,
        )  # fmt: skip
        s = tl.sum(h, 0)
    else:
        s = _sum_of_parts(_parts(partial, unit, parts, BLOCK_C), parts, BLOCK_C, BLOCK_T)
    if tile == 0:
        tl.store(sum_h + n * C + c, s, mask=c < C)
        if TWO:
            if ALONE:
                s_hz = tl.sum(h * centered, 0)
            else:
                at = _parts(partial_hz, unit, parts, BLOCK_C)
                s_hz = _sum_of_parts(at, parts, BLOCK_C, BLOCK_T)
            tl.store(sum_hz + n * C + c, s_hz, mask=c < C)
        _single_sample(dlam, gamma, mean, s, c, C)
    above = scale * (s / P)[None, :]
    if ALONE:
        at, inside = _block(n, c0, 0, C, P, sn, sc, sp, EVEN, BLOCK_P, BLOCK_C)
        tl.store(dz + at, (gain * (h - above)).to(dz.dtype.element_ty), mask=inside)
    else:
        for step in range(steps):
            p0 = (tile * steps + step) * BLOCK_P
            h, _ = _through_act(
                g, kept, gain, bias, background, n, c0, p0, C, P, sn, sc, sp,
                ACT, KEPT, PACK, EVEN, BLOCK_P, BLOCK_C,
            )  # fmt: skip
            at, inside = _block(n, c0, p0, C, P, sn, sc, sp, EVEN, BLOCK_P, BLOCK_C)
            tl.store(dz + at, (gain * (h - above)).to(dz.dtype.element_ty), mask=inside)


@triton.jit
def agc_filters_kernel(
    sum_h, sum_hz, mean, gamma, dgamma, dbeta, dlam, N, C,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradients of the filters' parameters, from the sums of all samples."""
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
    gain = tl.sum(_per_filter(gamma, c, C, 1.0), 0)
    tl.store(dlam + c, -gain * tl.sum(dl, 0), mask=c < C)
    if dgamma is not None:
        tl.store(dgamma + c, tl.sum(dg, 0), mask=c < C)
