"""Eq. 1 with a sliding-window mean in Triton: one pass over maps per dimension.

    forward     t = window means of z along the last dimension, ..., then along the first one:
                y = act( gamma * (z - lambda * b) + beta )
    backward    the same with windows of h / count, h = g act'(u), and at the end
                dz = gamma * (h - lambda * a)

A pass views the maps as (outer, length, inner) and sums windows along `length`, which the forward
divides by the number of positions in each window, and the adjoint divides beforehand. The last pass
applies Eq. 1 where it has the sums in registers. In channels_last, a pass along W has rows as
`outer` and channels as `inner`; a pass along H has samples as `outer` and the W x C elements of a
row as `inner`. Both read and write whole cache lines.

A program takes BLOCK_I inner elements and walks along `length` in blocks of BLOCK_L positions. The
window sum of position p is that of p - 1, plus the element that enters, less the one that leaves:

    sum(p) = sum(p0 - 1) + cumsum over the block of x[p + after] - x[p - before - 1]

so the cost does not depend on the window. The second read hits the cache. Each program starts from
a direct sum, and rounding errors of one program do not reach another.

Between passes the sums are stored in the dtype of the maps: as means, with a rounding error that is
smaller than that of the maps themselves.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import empty_relu_mask
from ..layout import accumulate_dtype, is_laid_out, like_layout, memory_order
from . import tiling
from .blocks import act, act_backward, load_per_filter, pack_mask, to_fp32, unpack_mask
from .launch import launch
from .tiling import divide, power_of_2

BLOCK = 2048  # elements of a block
WARPS = 4
PROGRAMS = 8  # per multiprocessor, if the maps have so many segments

Spans = tuple[tuple[int, int], ...]


class Pass(NamedTuple):
    """Maps viewed as (outer, length, inner) with strides so, sl, si.

    The channel of element (outer o, inner i) is (o * inner + i) // run % C.
    """

    outer: int
    length: int
    inner: int
    so: int
    sl: int
    si: int
    run: int


@triton.jit
def _count(p, before, after, length):
    """Return the number of positions of clipped windows; 1 outside of the map."""
    n = tl.minimum(p + after, length - 1) - tl.maximum(p - before, 0) + 1
    return tl.maximum(n, 1).to(tl.float32)


@triton.jit
def _load(x, corner, p, i, length, inner, sl, si):
    """Load elements (p, i) in fp32; 0 outside of the maps."""
    inside = ((p >= 0) & (p < length))[:, None] & (i < inner)[None, :]
    return to_fp32(tl.load(x + corner + (p[:, None] * sl + i[None, :] * si), inside, other=0.0))


@triton.jit
def _load_gradient(
    g, saved, corner, p, i0, length, inner, sl, si, ACT: tl.constexpr, SAVED: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Load h = g act'(u) at positions p."""
    i = i0 + tl.arange(0, BLOCK_I)
    h = _load(g, corner, p, i, length, inner, sl, si)
    if SAVED == "output":
        h = act_backward(h, _load(saved, corner, p, i, length, inner, sl, si), ACT)
    elif SAVED == "mask":
        j = tl.arange(0, BLOCK_I // 8)
        inside = ((p >= 0) & (p < length))[:, None] & (i0 + 8 * j < inner)[None, :]
        at = corner // 8 + (p[:, None] * (sl // 8) + (i0 // 8 + j)[None, :])
        byte = tl.load(saved + at, inside, other=0)
        h = act_backward(h, unpack_mask(byte, "channels", BLOCK_L, BLOCK_I), ACT)
    return h


@triton.jit
def _load_entering(
    x, saved, corner, p, i0, length, inner, sl, si, before, after, ACT: tl.constexpr,
    SAVED: tl.constexpr, FIRST: tl.constexpr, ADJOINT: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Load the terms of the window sums at positions p."""
    if FIRST and ADJOINT:
        term = _load_gradient(
            x, saved, corner, p, i0, length, inner, sl, si, ACT, SAVED, BLOCK_L, BLOCK_I
        )  # fmt: skip
    else:
        term = _load(x, corner, p, i0 + tl.arange(0, BLOCK_I), length, inner, sl, si)
    if ADJOINT:
        term = term * (1.0 / _count(p, before, after, length))[:, None]
    return term


@triton.jit
def running_window_kernel(
    x, maps, g, saved, out, relu_mask, gamma, beta, lam, sums, length, inner, C, run, segments,
    steps, so, sl, si, before, after, ACT: tl.constexpr, SAVED: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, ADJOINT: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Write window means or their adjoint along a dimension; y or dz if LAST.

    x: The terms, from the maps or from the pass before.
    maps: z, for y and for the sums; None in a backward that needs no sums with z.
    g: The gradient of y, for the last pass of the backward.
    sums: (1, 2 or 3, outer, segments, inner): sums of h, z a and z h over the positions.
    """
    blocks = tl.cdiv(inner, BLOCK_I)
    program = tl.program_id(0)
    block, part, o = program % blocks, program // blocks % segments, program // blocks // segments
    i0 = block * BLOCK_I
    i = i0 + tl.arange(0, BLOCK_I)
    corner = tl.cast(o, tl.int64) * so
    r = tl.arange(0, BLOCK_L)
    back, ahead = before, after  # the reach of a sum: that of the window, or its mirror image
    if ADJOINT:
        back, ahead = after, before
    first = part * steps * BLOCK_L
    carry = tl.zeros([BLOCK_I], tl.float32)
    start, stop = tl.maximum(first - 1 - back, 0), tl.minimum(first + ahead, length)
    for p0 in range(start, stop, BLOCK_L):
        term = _load_entering(
            x, saved, corner, p0 + r, i0, length, inner, sl, si, before, after,
            ACT, SAVED, FIRST, ADJOINT, BLOCK_L, BLOCK_I,
        )  # fmt: skip
        carry += tl.sum(tl.where((p0 + r < stop)[:, None], term, 0.0), 0)
    if LAST:
        channel = tl.where(i < inner, (o * inner + i) // run % C, C)
        gain, bias = load_per_filter(gamma, channel, C, 1.0), load_per_filter(beta, channel, C, 0.0)
        scale = load_per_filter(lam, channel, C, 1.0)
        total_h = tl.zeros([BLOCK_I], tl.float32)
        total_za, total_zh = total_h, total_h
    for step in range(steps):
        p = first + step * BLOCK_L + r
        entering = _load_entering(
            x, saved, corner, p + ahead, i0, length, inner, sl, si, before, after,
            ACT, SAVED, FIRST, ADJOINT, BLOCK_L, BLOCK_I,
        )  # fmt: skip
        leaving = _load_entering(
            x, saved, corner, p - back - 1, i0, length, inner, sl, si, before, after,
            ACT, SAVED, FIRST, ADJOINT, BLOCK_L, BLOCK_I,
        )  # fmt: skip
        # All loads come before the barriers of the running sum.
        if LAST and ADJOINT:
            h = _load_gradient(
                g, saved, corner, p, i0, length, inner, sl, si, ACT, SAVED, BLOCK_L, BLOCK_I
            )  # fmt: skip
        if LAST and maps is not None:
            z = _load(maps, corner, p, i, length, inner, sl, si)
        change = entering - leaving
        window = carry[None, :] + tl.cumsum(change, 0)
        carry += tl.sum(change, 0)
        if not ADJOINT:
            window = window * (1.0 / _count(p, before, after, length))[:, None]
        inside = (p < length)[:, None] & (i < inner)[None, :]
        at = corner + (p[:, None] * sl + i[None, :] * si)
        if not LAST:
            result = window
        elif ADJOINT:
            result = gain * (h - scale * window)
            if sums is not None:
                total_h += tl.sum(h, 0)
                if maps is not None:
                    total_za += tl.sum(z * tl.where(inside, window, 0.0), 0)
                    total_zh += tl.sum(z * h, 0)
        else:
            result = act(gain * (z - scale * window) + bias, ACT)
        written = result.to(out.dtype.element_ty)
        tl.store(out + at, written, inside)
        if relu_mask is not None:  # from the rounded result, as a backward that reads y sees it
            j = tl.arange(0, BLOCK_I // 8)
            there = (p < length)[:, None] & (i0 + 8 * j < inner)[None, :]
            to = corner // 8 + (p[:, None] * (sl // 8) + (i0 // 8 + j)[None, :])
            positive = act_backward(1.0, to_fp32(written), ACT) == 1.0
            tl.store(relu_mask + to, pack_mask(positive, "channels", BLOCK_L, BLOCK_I), there)
    if LAST and sums is not None:
        row = (tl.cast(o, tl.int64) * segments + part) * inner + i
        rows = tl.cast(tl.num_programs(0) // blocks, tl.int64) * inner  # outer * segments * inner
        tl.store(sums + row, total_h, i < inner)
        if maps is not None:
            tl.store(sums + rows + row, total_za, i < inner)
            if gamma is not None:
                tl.store(sums + 2 * rows + row, total_zh, i < inner)


def forward(
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_scale: Tensor | None,
    spans: Spans,
    activation: str,
    training: bool,
    segments: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return y and the ReLU mask.

    The mask is None unless `training` and in channels_last.
    """
    z, last = _dense(z)
    y = torch.empty_like(z)
    mask = empty_relu_mask(z, activation) if training and last else None
    x = z
    for is_first, is_last, view, span in _passes(z, last, spans):
        out = y if is_last else torch.empty_like(z)
        more = dict(maps=z, relu_mask=mask, gamma=weight, beta=bias, lam=mean_scale, ACT=activation)
        more = more if is_last else {}
        _launch(view, span, segments, x=x, out=out, FIRST=is_first, LAST=is_last, **more)
        x = out
    return y, mask


def backward(
    g: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_scale: Tensor | None,
    saved: Tensor | None,
    spans: Spans,
    activation: str,
    segments: int | None = None,
) -> tuple[Tensor | None, ...]:
    """Return dz, dweight, dbias and dmean_scale; see background.window_backward."""
    kind = "nothing" if saved is None else "mask" if saved.dtype == torch.uint8 else "output"
    g, last = _dense(g)
    order = memory_order(g)
    if saved is not None and kind == "output":
        saved = like_layout(saved, order)
    z = None if z is None else like_layout(z, order)
    dz = torch.empty_like(g)
    kinds = 1 if z is None else 2 if weight is None else 3
    sums: Tensor | None = None
    x = g
    for is_first, is_last, view, span in _passes(g, last, spans):
        out = dz if is_last else torch.empty_like(g)
        more: dict[str, Any] = dict(saved=saved, ACT=activation, SAVED=kind) if is_first else {}
        if is_last:
            count = _blocks(view, span, segments, g.device)["segments"]
            shape = (kinds, view.outer, count, view.inner)
            if bias is not None or z is not None:
                sums = g.new_empty(shape, dtype=torch.float32)
            more = dict(
                maps=z, g=g, saved=saved, gamma=weight, lam=mean_scale, sums=sums,
                ACT=activation, SAVED=kind,
            )  # fmt: skip
        _launch(
            view, span, segments, x=x, out=out, FIRST=is_first, LAST=is_last, ADJOINT=True, **more
        )
        x = out
    if sums is None:
        return dz, None, None, None
    n, c = g.shape[:2]
    # (kinds, C): channels are innermost, or each has several sums per sample.
    innermost = last or g.dim() == 3
    totals = sums.view(kinds, -1, c).sum(1) if innermost else sums.view(kinds, n, c, -1).sum((1, 3))
    dbias = None if bias is None else totals[0].to(bias.dtype)
    dweight = dscale = None
    if z is not None:
        za = totals[1]
        if weight is not None:
            left = za if mean_scale is None else mean_scale * za
            dweight = (totals[2] - left).to(weight.dtype)
            za = weight * za
        if mean_scale is not None:
            dscale = (-za).to(mean_scale.dtype)
    return dz, dweight, dbias, dscale


def window_mean(z: Tensor, spans: Spans, adjoint: bool, segments: int | None = None) -> Tensor:
    """Return the window means of z or their adjoint, in fp32."""
    x, last = _dense(z)
    for is_first, is_last, view, span in _passes(x, last, spans):
        dtype = accumulate_dtype(z.dtype) if is_last else z.dtype
        out = torch.empty_like(x, dtype=dtype)
        _launch(view, span, segments, x=x, out=out, FIRST=is_first, LAST=False, ADJOINT=adjoint)
        x = out
    return x


def _dense(z: Tensor) -> tuple[Tensor, bool]:
    """Return z contiguous or in channels_last, and whether it is in channels_last."""
    dims = range(2, z.dim())
    if z.shape[1] > 1 and is_laid_out(z, (0, *dims, 1)):
        return z, True
    return like_layout(z, tuple(range(z.dim()))), False


def _passes(
    z: Tensor, channels_last: bool, spans: Spans
) -> list[tuple[bool, bool, Pass, tuple[int, int]]]:
    """Return whether a pass is the first and the last, its view and its window."""
    (n, c), sizes = z.shape[:2], z.shape[2:]
    found = []
    for j in reversed(range(len(sizes))):
        length, around, within = sizes[j], _product(sizes[:j]), _product(sizes[j + 1 :])
        if channels_last:
            inner = within * c
            view = Pass(n * around, length, inner, length * inner, inner, 1, 1)
        elif within > 1 or j < len(sizes) - 1:
            run = within * around
            view = Pass(n * c * around, length, within, length * within, within, 1, run)
        else:  # the positions are contiguous, so rows are taken side by side
            view = Pass(1, length, n * c * around, 0, 1, length, around)
        span = tuple(min(s, length - 1) for s in spans[j])
        found.append((j == len(sizes) - 1, j == 0, view, span))
    return found  # type: ignore[return-value]


def _product(sizes: torch.Size) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _blocks(
    view: Pass, span: tuple[int, int], segments: int | None, device: torch.device
) -> dict[str, int]:
    """Choose the blocks of a pass and the segments that its length is cut into."""
    # Unaligned elements are addressed one by one, which takes twice as many registers.
    row = view.inner if view.si == 1 else view.length
    block = BLOCK if row % 8 == 0 else BLOCK // 2
    if view.si == 1:
        block_i = max(8, power_of_2(view.inner, 64))
        block_l = power_of_2(view.length, block // block_i)
    else:
        block_l = power_of_2(view.length, 128)
        block_i = max(8, power_of_2(view.inner, block // block_l))
    blocks = divide(view.length, block_l)
    if segments is None:
        programs = view.outer * divide(view.inner, block_i)
        wanted = divide(PROGRAMS * tiling.multiprocessors(device), programs)
        # The direct sum at the start of a segment should be shorter than the segment.
        longest = view.length // (2 * max(block_l, sum(span) + 1))
        segments = max(1, min(wanted, longest))
    steps = divide(blocks, min(segments, blocks))
    return dict(segments=divide(blocks, steps), steps=steps, BLOCK_L=block_l, BLOCK_I=block_i)


def _launch(
    view: Pass, span: tuple[int, int], segments: int | None, *, x: Tensor, out: Tensor, **more: Any
) -> None:
    blocks = _blocks(view, span, segments, x.device)
    arguments: dict[str, Any] = dict(
        x=x, out=out, maps=None, g=None, saved=None, relu_mask=None, gamma=None, beta=None,
        lam=None, sums=None, length=view.length, inner=view.inner, C=out.shape[1], run=view.run,
        so=view.so, sl=view.sl, si=view.si, before=span[0], after=span[1], ACT="none",
        SAVED="nothing", ADJOINT=False, num_warps=WARPS, **blocks,
    )  # fmt: skip
    arguments |= more
    for name in ("gamma", "beta", "lam"):
        if arguments[name] is not None:
            arguments[name] = arguments[name].contiguous()
    grid = (view.outer * divide(view.inner, blocks["BLOCK_I"]) * blocks["segments"], 1, 1)
    launch(running_window_kernel, grid, arguments, x.device)
