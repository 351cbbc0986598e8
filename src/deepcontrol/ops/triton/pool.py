"""2x2 max pooling in Triton (ops max_pool2x2, pick2x2, place2x2).

A program processes a tile of windows, [ROWS, INNER]. The inner dimension is contiguous in memory:
the channels of a pixel (channels_last) or the windows of a line (contiguous). A row is everything
else, flattened:

    channels_last:  row = (n, i, j), inner = c          contiguous:  row = (n, c, i), inner = j

One thread writes each element, so results are deterministic. Values are moved, not computed with,
so they are exact.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from .. import reference
from ..dispatch import fallback_reason
from ..layout import is_channels_last
from ..pool import as_layout
from .launch import launch
from .tiling import divide

TILE = 1024  # windows: eight per thread of four warps, 16 bytes of a half type


@triton.jit
def _row_offset(row, size1, size2, stride0, stride1, stride2, ALIGN: tl.constexpr):
    """Return the int64 offset of a row = (., of size1, of size2).

    Maps may exceed 2^31 elements.
    """
    rest = row // size2
    offset = (rest // size1).to(tl.int64) * stride0 + (rest % size1).to(tl.int64) * stride1
    return (offset + (row % size2).to(tl.int64) * stride2) * ALIGN


@triton.jit
def pool_kernel(
    x, pooled, index, rows, inner, size1, size2,
    x_stride0, x_stride1, x_stride2, x_inner, x_down, x_right,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Write the maximum of each window and its index."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * INNER + tl.arange(0, INNER)
    inner = inner * ALIGN
    inside = (row < rows)[:, None] & (i < inner)[None, :]
    start = _row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2, ALIGN)
    corner = x + start[:, None] + (i * x_inner)[None, :]
    best = tl.load(corner, mask=inside)
    chosen = tl.zeros([ROWS, INNER], tl.int32)
    for k in tl.static_range(1, 4):
        step = (k // 2) * x_down * ALIGN + (k % 2) * x_right * ALIGN
        value = tl.load(corner + step, mask=inside)
        exact = value.to(tl.float32)
        later = (exact > best.to(tl.float32)) | (exact != exact)
        best = tl.where(later, value, best)
        chosen = tl.where(later, k, chosen)
    out = row.to(tl.int64)[:, None] * inner + i[None, :]
    tl.store(pooled + out, best, mask=inside)
    tl.store(index + out, chosen.to(tl.uint8), mask=inside)


@triton.jit
def pick_kernel(
    x, index, picked, rows, inner, size1, size2,
    x_stride0, x_stride1, x_stride2, x_inner, x_down, x_right,
    index_stride0, index_stride1, index_stride2, index_inner,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Write the element of each window at its index."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * INNER + tl.arange(0, INNER)
    inner = inner * ALIGN
    inside = (row < rows)[:, None] & (i < inner)[None, :]
    start = _row_offset(row, size1, size2, index_stride0, index_stride1, index_stride2, ALIGN)
    chosen = tl.load(index + start[:, None] + (i * index_inner)[None, :], mask=inside)
    start = _row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2, ALIGN)
    corner = x + start[:, None] + (i * x_inner)[None, :]
    # Load all four and select: a gather of single elements touches the same memory in more loads.
    best = tl.load(corner, mask=inside)
    for k in tl.static_range(1, 4):
        step = (k // 2) * x_down * ALIGN + (k % 2) * x_right * ALIGN
        best = tl.where(chosen == k, tl.load(corner + step, mask=inside), best)
    tl.store(picked + row.to(tl.int64)[:, None] * inner + i[None, :], best, mask=inside)


@triton.jit
def place_kernel(
    values, index, placed, rows, inner, size1, size2, height, width,
    values_stride0, values_stride1, values_stride2, values_inner,
    index_stride0, index_stride1, index_stride2, index_inner,
    placed_stride0, placed_stride1, placed_stride2, placed_inner, placed_down, placed_right,
    CHANNELS_LAST: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Write each value at its index, else zeros, over windows that cover the map."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * INNER + tl.arange(0, INNER)
    inside = (row < rows)[:, None] & (i < inner * ALIGN)[None, :]
    # The last window of an odd map is half outside, and its elements are zero.
    if CHANNELS_LAST:
        y = 2 * ((row // size2) % size1)[:, None]
        x = 2 * (row % size2)[:, None]
    else:
        y = 2 * (row % size2)[:, None]
        x = 2 * i[None, :]
    whole = inside & (y + 1 < height) & (x + 1 < width)
    start = _row_offset(row, size1, size2, index_stride0, index_stride1, index_stride2, ALIGN)
    chosen = tl.load(index + start[:, None] + (i * index_inner)[None, :], mask=whole, other=0)
    start = _row_offset(row, size1, size2, values_stride0, values_stride1, values_stride2, ALIGN)
    value = tl.load(values + start[:, None] + (i * values_inner)[None, :], mask=whole, other=0)
    start = _row_offset(row, size1, size2, placed_stride0, placed_stride1, placed_stride2, ALIGN)
    corner = placed + start[:, None] + (i * placed_inner)[None, :]
    zero = tl.zeros_like(value)
    for k in tl.static_range(4):
        step = (k // 2) * placed_down * ALIGN + (k % 2) * placed_right * ALIGN
        there = inside & (y + k // 2 < height) & (x + k % 2 < width)
        tl.store(corner + step, tl.where(chosen == k, value, zero), mask=there)


def pool(x: Tensor, channels_last: bool, traced: bool = False) -> tuple[Tensor, Tensor]:
    """Return (pooled, index) of x (N, C, H, W). traced: see launch."""
    n, c, height, width = x.shape
    shape = (n, c, height // 2, width // 2)
    pooled = empty_maps(x, shape, x.dtype, channels_last)
    index = empty_maps(x, shape, torch.uint8, channels_last)
    align = _alignment(channels_last, c, x)
    grid, tile = _tiling(shape, channels_last, align)
    strides = _strides("x", x, channels_last, align, 2)
    arguments = dict(x=x, pooled=pooled, index=index, **tile, **strides)
    launch(pool_kernel, grid, arguments, x.device, traced)
    return pooled, index


def pick(x: Tensor, index: Tensor, channels_last: bool, traced: bool = False) -> Tensor:
    """Return x (N, C, H, W) at index (N, C, H // 2, W // 2)."""
    picked = empty_maps(x, index.shape, x.dtype, channels_last)
    align = _alignment(channels_last, x.shape[1], x, index)
    grid, tile = _tiling(index.shape, channels_last, align)
    arguments = dict(
        x=x, index=index, picked=picked, **tile,
        **_strides("x", x, channels_last, align, 2),
        **_strides("index", index, channels_last, align),
    )  # fmt: skip
    launch(pick_kernel, grid, arguments, x.device, traced)
    return picked


def place(
    values: Tensor, index: Tensor, size: Sequence[int], channels_last: bool, traced: bool = False
) -> Tensor:
    """Return values at index in zeros (N, C, *size).

    Writes every element, the odd edge too.
    """
    n, c = index.shape[:2]
    height, width = size
    placed = empty_maps(values, (n, c, height, width), values.dtype, channels_last)
    align = _alignment(channels_last, c, values, index)
    covering = (n, c, (height + 1) // 2, (width + 1) // 2)
    grid, tile = _tiling(covering, channels_last, align)
    arguments = dict(
        values=values, index=index, placed=placed, height=height, width=width,
        CHANNELS_LAST=channels_last, **tile,
        **_strides("values", values, channels_last, align),
        **_strides("index", index, channels_last, align),
        **_strides("placed", placed, channels_last, align, 2),
    )  # fmt: skip
    launch(place_kernel, grid, arguments, values.device, traced)
    return placed


def empty_maps(
    like: Tensor, shape: Sequence[int], dtype: torch.dtype, channels_last: bool
) -> Tensor:
    """Allocate maps (N, C, H, W) on the device of `like`."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=memory_format)


def _alignment(channels_last: bool, channels: int, *maps: Tensor) -> int:
    """Return 8 if every pixel starts at a multiple of 8 elements, else 1.

    The channels of a pixel must also follow each other. Triton detects by itself that a stride is a
    multiple of 16, but not of 8. So strides are passed divided by this number and multiplied again
    in the kernel, which proves 16-byte accesses.
    """
    if not channels_last or channels % 8:
        return 1
    steps = [s for a in maps for d, s in enumerate(a.stride()) if d != 1]
    return 8 if all(a.stride(1) == 1 for a in maps) and all(s % 8 == 0 for s in steps) else 1


def _tiling(
    shape: Sequence[int], channels_last: bool, align: int
) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Return the grid over windows of shape (N, C, h, w), and the kernel arguments."""
    n, c, h, w = shape
    sizes = (n, h, w, c) if channels_last else (n, c, h, w)
    rows, inner = sizes[0] * sizes[1] * sizes[2], sizes[3]
    # Comparisons instead of the next power of two, so that a size may stay dynamic.
    breadth = next((b for b in (8, 16, 32, 64) if inner <= b), 128)
    height = TILE // breadth
    tile = {
        "rows": rows,
        "inner": inner // align,
        "size1": sizes[1],
        "size2": sizes[2],
        "ALIGN": align,
        "ROWS": height,
        "INNER": breadth,
    }
    return (divide(rows, height), divide(inner, breadth), 1), tile


def _strides(
    name: str, a: Tensor, channels_last: bool, align: int, window: int = 1
) -> dict[str, Any]:
    """Return the strides of a between windows, and within them if window is 2.

    The result has the kernel's arguments by name.
    """
    sample, channel, down, right = a.stride()
    i, j = window * down, window * right
    strides = (sample, i, j, channel) if channels_last else (sample, channel, i, j)
    named = {f"{name}_stride{d}": strides[d] // align for d in range(3)}
    named[f"{name}_inner"] = strides[3]
    if window == 2:
        named |= {f"{name}_down": down // align, f"{name}_right": right // align}
    return named


# The ops that torch.compile sees: kernel launches or plain PyTorch inside. Eager mode does not
# register them, because that imports the compiler.


def _traced_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    last = is_channels_last(x)
    if fallback_reason(x) is None:
        return pool(x, last, traced=True)
    pooled, index = reference.max_pool2x2(x)
    return as_layout(pooled, last), as_layout(index, last)


def _traced_pick(x: Tensor, index: Tensor, channels_last: bool) -> Tensor:
    if fallback_reason(x) is None:
        return pick(x, index, channels_last, traced=True)
    return as_layout(reference.pick2x2(x, index), channels_last)


def _traced_place(
    values: Tensor, index: Tensor, height: int, width: int, channels_last: bool
) -> Tensor:
    if fallback_reason(values) is None:
        return place(values, index, (height, width), channels_last, traced=True)
    return as_layout(reference.place2x2(values, index, (height, width)), channels_last)


def _fake_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2)
    last = is_channels_last(x)
    return empty_maps(x, shape, x.dtype, last), empty_maps(x, shape, torch.uint8, last)


def _fake_pick(x: Tensor, index: Tensor, channels_last: bool) -> Tensor:
    return empty_maps(x, index.shape, x.dtype, channels_last)


def _fake_place(
    values: Tensor, index: Tensor, height: int, width: int, channels_last: bool
) -> Tensor:
    return empty_maps(values, (*index.shape[:2], height, width), values.dtype, channels_last)


def _save_pool(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    (x,) = inputs
    ctx.save_for_backward(output[1])
    ctx.size, ctx.last = x.shape[2:], is_channels_last(x)
    ctx.set_materialize_grads(False)  # the index would get a map of zeros


def _pool_backward(ctx: Any, grad: Tensor | None, _: None) -> Tensor | None:
    if grad is None:
        return None
    return torch.ops.deepcontrol.place2x2(grad, *ctx.saved_tensors, *ctx.size, ctx.last)


def _save_pick(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index, _ = inputs
    ctx.save_for_backward(index)
    ctx.size, ctx.last = x.shape[2:], is_channels_last(x)


def _pick_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.deepcontrol.place2x2(grad, *ctx.saved_tensors, *ctx.size, ctx.last), None, None


def _save_place(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, index, *_ = inputs
    ctx.save_for_backward(index)
    ctx.last = is_channels_last(values)


def _place_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.deepcontrol.pick2x2(grad, *ctx.saved_tensors, ctx.last), None, None, None, None


@functools.cache
def register() -> None:
    """Register the ops with torch.library."""
    op: Any = triton_op("deepcontrol::max_pool2x2", _traced_pool, mutates_args=())
    op.register_fake(_fake_pool)
    op.register_autograd(_pool_backward, setup_context=_save_pool)
    op = triton_op("deepcontrol::pick2x2", _traced_pick, mutates_args=())
    op.register_fake(_fake_pick)
    op.register_autograd(_pick_backward, setup_context=_save_pick)
    op = triton_op("deepcontrol::place2x2", _traced_place, mutates_args=())
    op.register_fake(_fake_place)
    op.register_autograd(_place_backward, setup_context=_save_place)
