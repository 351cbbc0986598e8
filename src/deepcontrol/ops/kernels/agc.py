"""Eq. 1 and its backward as Triton kernels, for the neuron and for the drop-in layer alike.

    u = gamma (z - lam m) + beta     y = act(u)       m = mean of z over the map, (N, C)
    h = g act'(u)    dz = gamma (h - lam mean(h))     dbeta = sum h
    dgamma = sum h (z - lam m)                        dlam = -gamma sum_s m_s sum_p h

The neuron has its gain in the convolution's weights: there is no gamma for it here.

All the time is memory's, and a map is needed twice: for its sum, then to be rewritten. So the
second read must find it in a cache. A *unit*, a block of BLOCK_C maps of one sample, is cut into
tiles; one program sums a tile, waits until its unit's sum is known, and rewrites that same tile,
while the programs of the next units do their sums. What is between the two reads is what the
running programs hold, a fraction of the L2 cache. A small map is one tile, and nobody waits.

Programs take their tiles in order from a ticket counter. Those of a unit wait for each other, so as
many must fit on the device at once: `plan` sees to it with room to spare for other streams, and
larger units take two launches, SUM and APPLY, which wait for nothing.

Sums are partial sums added in a fixed order: results do not vary from run to run. The only atomics
count tickets and arrivals.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from ..activation import ACTIVATIONS, LEAKY_SLOPE
from ..backend import map_strides
from ..maps import like_layout, memory_order, positions

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
def _block(n, c0, p0, C, P, sn, sc, sp, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Offsets and mask of BLOCK_P positions of a unit. Only the corner can be far: it is int64."""
    i, j = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C)
    corner = tl.cast(n, tl.int64) * sn + tl.cast(c0, tl.int64) * sc + tl.cast(p0, tl.int64) * sp
    inside = (p0 + i < P)[:, None] & (c0 + j < C)[None, :]
    return corner + (i[:, None] * sp + j[None, :] * sc), inside


@triton.jit
def _arrive(counter):
    tl.debug_barrier()  # all of this program's threads have stored what the arrival announces
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def _partials(partial, unit, tile, tiles, BLOCK_C: tl.constexpr):
    return partial + (tl.cast(unit, tl.int64) * tiles + tile) * BLOCK_C + tl.arange(0, BLOCK_C)


@triton.jit
def _sum_of_partials(partial, unit, tiles, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr):
    t = tl.arange(0, BLOCK_T)
    rows = _partials(partial, unit, 0, tiles, BLOCK_C)[None, :] + t[:, None] * BLOCK_C
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for t0 in range(0, tiles, BLOCK_T):
        there = (t0 + t < tiles)[:, None]
        # Past the L1 cache, which may hold what was here before.
        total += tl.load(rows + t0 * BLOCK_C, mask=there, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def _my_tile(tickets, tiles, ALONE: tl.constexpr, TICKETS: tl.constexpr):
    """The next unit and tile of it that nobody has taken."""
    if ALONE:
        return tl.program_id(0), 0
    if TICKETS:
        ticket = tl.atomic_add(tickets, 1)
    else:
        ticket = tl.program_id(0)
    return ticket // tiles, ticket % tiles


@triton.jit
def _wait(arrivals, tiles):
    """Until the last of a unit's programs has announced the sum: it arrives twice."""
    while tl.atomic_add(arrivals, 0, sem="acquire") <= tiles:
        pass


@triton.jit
def _forward(
    z, y, mean, gamma, beta, lam, partial, tickets, arrivals, closed, N, C, P, units, groups, tiles,
    steps, sn, sc, sp, ACT: tl.constexpr, SUM: tl.constexpr, APPLY: tl.constexpr, ALONE: tl.constexpr,
    TICKETS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    unit, tile = _my_tile(tickets, tiles, ALONE, TICKETS)
    n, c0, first = unit // groups, unit % groups * BLOCK_C, tile * steps * BLOCK_P
    c = c0 + tl.arange(0, BLOCK_C)
    if SUM:
        total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
        for step in range(steps):
            at, inside = _block(n, c0, first + step * BLOCK_P, C, P, sn, sc, sp, BLOCK_P, BLOCK_C)
            total += tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        m = tl.sum(total, 0)
        if ALONE:
            m = m / P
            tl.store(mean + n * C + c, m, mask=c < C)
        else:
            tl.store(_partials(partial, unit, tile, tiles, BLOCK_C), m)
            if _arrive(arrivals + unit) == tiles - 1:  # the last to arrive makes the unit's mean
                m = _sum_of_partials(partial, unit, tiles, BLOCK_C, BLOCK_T) / P
                tl.store(mean + n * C + c, m, mask=c < C)
                _arrive(arrivals + unit)
    if APPLY:
        if not ALONE:
            if SUM:
                _wait(arrivals + unit, tiles)
            m = tl.load(mean + n * C + c, mask=c < C, other=0.0, cache_modifier=".cg")
        background = _per_filter(lam, c, C, 0.0) * m[None, :]
        gain, bias = _per_filter(gamma, c, C, 1.0), _per_filter(beta, c, C, 0.0)
        for step in range(steps):
            at, inside = _block(n, c0, first + step * BLOCK_P, C, P, sn, sc, sp, BLOCK_P, BLOCK_C)
            x = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
            u = _act(gain * (x - background) + bias, ACT)
            tl.store(y + at, u.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _through_act(
    g, kept, gain, bias, background, at, inside, ACT: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """h = g act'(u) of a block, and z - lam m where z is kept (else h again, read by nobody)."""
    up = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    if KEPT == "input":
        centred = tl.load(kept + at, mask=inside, other=0.0).to(tl.float32) - background
        return _act_backward(up, gain * centred + bias, ACT), centred
    elif KEPT == "output":
        h = _act_backward(up, tl.load(kept + at, mask=inside, other=0.0).to(tl.float32), ACT)
        return h, h
    else:
        return up, up


@triton.jit
def _close_unit(
    sum_h, sum_hz, mean, gamma, dgamma, dbeta, dlam, closed, n, c, C, N, hz_sum,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The last sample of a group of filters makes their gradients of all samples' sums."""
    if dgamma is not None:
        tl.store(sum_hz + n * C + c, hz_sum, mask=c < C)
    if _arrive(closed) == N - 1:
        s = tl.arange(0, BLOCK_N)
        db = tl.zeros([BLOCK_N, c.shape[0]], tl.float32)
        dl, dg = db, db
        for n0 in range(0, N, BLOCK_N):
            at = (n0 + s)[:, None] * C + c[None, :]
            there = (n0 + s < N)[:, None] & (c < C)[None, :]
            h = tl.load(sum_h + at, mask=there, other=0.0, cache_modifier=".cg")
            db += h
            dl += h * tl.load(mean + at, mask=there, other=0.0)
            if dgamma is not None:
                dg += tl.load(sum_hz + at, mask=there, other=0.0, cache_modifier=".cg")
        tl.store(dbeta + c, tl.sum(db, 0), mask=c < C)
        gain = tl.sum(_per_filter(gamma, c, C, 1.0), 0)
        tl.store(dlam + c, -gain * tl.sum(dl, 0), mask=c < C)
        if dgamma is not None:
            tl.store(dgamma + c, tl.sum(dg, 0), mask=c < C)


@triton.jit
def _backward(
    g, kept, dz, mean, gamma, beta, lam, dgamma, dbeta, dlam, sum_h, sum_hz, partial, tickets,
    arrivals, closed, N, C, P, units, groups, tiles, steps, sn, sc, sp, ACT: tl.constexpr,
    KEPT: tl.constexpr, SUM: tl.constexpr, APPLY: tl.constexpr, ALONE: tl.constexpr,
    TICKETS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    unit, tile = _my_tile(tickets, tiles, ALONE, TICKETS)
    n, group, first = unit // groups, unit % groups, tile * steps * BLOCK_P
    c0 = group * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    lam_ = _per_filter(lam, c, C, 0.0)
    gain, bias = _per_filter(gamma, c, C, 1.0), _per_filter(beta, c, C, 0.0)
    background = lam_
    if KEPT == "input":
        background *= tl.load(mean + n * C + c, mask=c < C, other=0.0)[None, :]
    if SUM:
        h_total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
        hz_total = h_total
        for step in range(steps):
            at, inside = _block(n, c0, first + step * BLOCK_P, C, P, sn, sc, sp, BLOCK_P, BLOCK_C)
            h, z = _through_act(g, kept, gain, bias, background, at, inside, ACT, KEPT)
            h_total += h
            if dgamma is not None:
                hz_total += h * z
        h_sum, hz_sum = tl.sum(h_total, 0), tl.sum(hz_total, 0)
        if ALONE:
            tl.store(sum_h + n * C + c, h_sum, mask=c < C)
            _close_unit(
                sum_h, sum_hz, mean, gamma, dgamma, dbeta, dlam, closed + group, n, c, C, N,
                hz_sum, BLOCK_N,
            )  # fmt: skip
        else:
            second = partial + tl.cast(units, tl.int64) * tiles * BLOCK_C  # the sums of h z
            tl.store(_partials(partial, unit, tile, tiles, BLOCK_C), h_sum)
            if dgamma is not None:
                tl.store(_partials(second, unit, tile, tiles, BLOCK_C), hz_sum)
            if _arrive(arrivals + unit) == tiles - 1:
                h_sum = _sum_of_partials(partial, unit, tiles, BLOCK_C, BLOCK_T)
                if dgamma is not None:
                    hz_sum = _sum_of_partials(second, unit, tiles, BLOCK_C, BLOCK_T)
                tl.store(sum_h + n * C + c, h_sum, mask=c < C)
                _arrive(arrivals + unit)
                _close_unit(
                    sum_h, sum_hz, mean, gamma, dgamma, dbeta, dlam, closed + group, n, c, C, N,
                    hz_sum, BLOCK_N,
                )  # fmt: skip
    if APPLY:
        if not ALONE:
            if SUM:
                _wait(arrivals + unit, tiles)
            h_sum = tl.load(sum_h + n * C + c, mask=c < C, other=0.0, cache_modifier=".cg")
        h_mean = lam_ * (h_sum / P)[None, :]
        for step in range(steps):
            at, inside = _block(n, c0, first + step * BLOCK_P, C, P, sn, sc, sp, BLOCK_P, BLOCK_C)
            h, z = _through_act(g, kept, gain, bias, background, at, inside, ACT, KEPT)
            tl.store(dz + at, (gain * (h - h_mean)).to(dz.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Plan:
    """How a launch cuts its maps: see the module's docstring."""

    block_c: int  # maps in a unit
    block_p: int  # positions that a program reads at once
    steps: int  # how often it does, for one tile
    warps: int = 4
    launches: int = 1
    tickets: bool = True


def plan(z: Tensor) -> Plan:
    """The cut for maps z (N, C, *)."""
    c, p = z.shape[1], positions(z)
    _, sc, _ = strides(z)
    block_c = min(triton.next_power_of_2(c), 32) if sc == 1 else 1
    block_p = min(triton.next_power_of_2(p), 4096 // block_c)
    if sc != 1:
        block_c = min(triton.next_power_of_2(c), 4096 // block_p)
    steps = min(triton.cdiv(p, block_p), 4)
    fits = triton.cdiv(p, steps * block_p) <= _room(z.device)
    return Plan(block_c, block_p, steps, launches=1 if fits else 2)


@functools.cache
def _room(device: torch.device) -> int:
    """How many programs of a unit may wait for each other.

    Half of what runs at once with four programs of four warps on a multiprocessor, so that two
    streams can do it. In Triton's interpreter programs run one after the other: none may wait.
    """
    if device.type != "cuda":
        return 1
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def strides(z: Tensor) -> tuple[int, int, int]:
    found = map_strides(z)
    if found is None:
        raise ValueError(f"no kernel for maps of strides {z.stride()}")  # backend.py asks first
    return found


def forward(
    z: Tensor,
    gamma: Tensor | None,
    beta: Tensor,
    lam: Tensor,
    activation: str,
    out: Tensor | None = None,
    cut: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """y and the means (N, C); y is written to `out` where given, which may be z itself."""
    z = like_layout(z, memory_order(z))
    y = torch.empty_like(z) if out is None else out
    mean = z.new_empty(z.shape[:2], dtype=torch.float32)
    _launch(
        _forward, z, cut or plan(z), sums=1, z=z, y=y, mean=mean, gamma=gamma,
        beta=beta, lam=lam, ACT=activation,
    )  # fmt: skip
    return y, mean


def backward(
    g: Tensor,
    kept: Tensor | None,
    mean: Tensor,
    gamma: Tensor | None,
    beta: Tensor,
    lam: Tensor,
    activation: str,
    cut: Plan | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """dz, dgamma (None without gamma), dbeta, dlam; `kept` is z, y or nothing: see KEPT."""
    kind = "input" if gamma is not None else ACTIVATIONS[activation].needs
    layout = memory_order(g if kept is None else kept)
    g = like_layout(g, layout)
    kept = g if kept is None else like_layout(kept, layout)
    dz, dbeta, dlam, sum_h = (torch.empty_like(a) for a in (g, beta, lam, mean))
    dgamma, sum_hz = (
        (None, None) if gamma is None else (torch.empty_like(gamma), torch.empty_like(mean))
    )
    _launch(
        _backward, g, cut or plan(g), sums=1 if gamma is None else 2, g=g, kept=kept,
        dz=dz, mean=mean, gamma=gamma, beta=beta, lam=lam, dgamma=dgamma, dbeta=dbeta, dlam=dlam,
        sum_h=sum_h, sum_hz=sum_hz, ACT=activation, KEPT=kind,
        BLOCK_N=min(triton.next_power_of_2(g.shape[0]), 16),
    )  # fmt: skip
    return dz, dgamma, dbeta, dlam


def _launch(kernel: Any, maps: Tensor, cut: Plan, *, sums: int, **arguments: Any) -> None:
    """Run a kernel that takes `sums` sums of each of the maps (N, C, *)."""
    n, c, p = maps.shape[0], maps.shape[1], positions(maps)
    groups = triton.cdiv(c, cut.block_c)
    units, tiles = n * groups, triton.cdiv(p, cut.steps * cut.block_p)
    sn, sc, sp = strides(maps)
    alone = bool(tiles == 1)
    counters = maps.new_zeros(2 + units + groups, dtype=torch.int32)
    partial = maps.new_empty(
        1 if alone else sums * units * tiles * cut.block_c, dtype=torch.float32
    )
    launches = 1 if alone else cut.launches
    for launch in range(launches):
        wrap_triton(kernel)[(units * tiles,)](
            **arguments,
            partial=partial,
            tickets=counters[launch:],
            arrivals=counters[2:],
            closed=counters[2 + units :],
            N=n,
            C=c,
            P=p,
            units=units,
            groups=groups,
            tiles=tiles,
            steps=cut.steps,
            sn=sn,
            sc=sc,
            sp=sp,
            SUM=launch == 0,
            APPLY=launch == launches - 1,
            ALONE=alone,
            TICKETS=cut.tickets,
            BLOCK_P=cut.block_p,
            BLOCK_C=cut.block_c,
            BLOCK_T=min(triton.next_power_of_2(tiles), max(1, 4096 // cut.block_c)),
            num_warps=cut.warps,
        )
