"""The neuron and 2x2 max pooling in one pass in Triton (op center_bias_act_pool).

The formulas are in ops/pool.py; tiling.py explains units, parts and tiles. A tile here
consists of windows: for each, a program reads four positions of v or writes four of dv.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..activation import ACTIVATIONS
from ..gain_conv import ConvOperands, derives_mean, wants_map_sums
from ..layout import accumulate_dtype, is_channels_last, like_layout, map_strides, memory_order
from ..pool import pool_backward, saved_pooled, traced_forward
from .blocks import (
    act,
    act_backward,
    add_up_parts,
    agc_sum_kernel,
    empty_map_gradients,
    filter_gradient_launches,
    load_per_filter,
    parts_of_unit,
    store_single_sample_grad,
    sum_launches,
    to_fp32,
)
from .launch import launch
from .pool import empty_maps
from .tiling import TiledMaps, divide, power_of_2, tile_maps

BLOCK = 2048  # windows, of four positions each, that a program reads at once over its maps
STEPS = 4  # blocks per program


@triton.jit
def _window(q, across, width, sp):
    """Return row and column of window q, and the int64 offset of its first position."""
    i, j = q // across, q % across
    return i, j, (2 * i * width + 2 * j).to(tl.int64) * sp


@triton.jit
def agc_pool_forward_kernel(
    v, pooled, index, map_sums, mean, beta, lam, partial_sums, C, P, groups, parts, tiles, steps,
    windows, across, width, sn, sc, sp, on, oc, op, ACT: tl.constexpr, MEAN_KNOWN: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write pooled maps, index, means and, if given, the sums of the pooled tiles."""
    program = tl.program_id(0)
    if MEAN_KNOWN:
        program = tl.num_programs(0) - 1 - program
    unit, tile = program // tiles, program % tiles
    n, c0 = unit // groups, unit % groups * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    bias, scale = load_per_filter(beta, c, C, 0.0), load_per_filter(lam, c, C, 0.0)
    m = add_up_parts(parts_of_unit(partial_sums, unit, parts, BLOCK_C), parts, BLOCK_C, BLOCK_T) / P
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
            u = act(tl.load(at, mask=inside, other=0.0).to(tl.float32) + shift, ACT)
            # Rounded before the comparison, as maps in memory are, so that ties are the same.
            u = to_fp32(u.to(pooled.dtype.element_ty))
            if k == 0:
                best = u
            else:
                later = (u > best) | (u != u)
                best = tl.where(later, u, best)
                chosen = tl.where(later, k, chosen)
        out = of_out + q.to(tl.int64)[:, None] * op
        tl.store(pooled + out, best.to(pooled.dtype.element_ty), mask=inside)
        tl.store(index + out, chosen.to(tl.uint8), mask=inside)
        if map_sums is not None:
            total += tl.where(inside, best, 0.0)
    if map_sums is not None:
        tl.store(parts_of_unit(map_sums, unit, tiles, BLOCK_C) + tile * BLOCK_C, tl.sum(total, 0))


@triton.jit
def agc_pool_backward_kernel(
    g, saved, index, dv, mean, lam, sum_h, dlam, partial_sums, C, P, groups, parts, tiles, steps,
    windows, across, down, right, height, width, sn, sc, sp, on, oc, op,
    ACT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write dv over the windows that cover the map, and per map the sum of h.

    `down` x `right` windows were pooled. An odd last row or column adds half windows, in which
    nothing was pooled.
    """
    unit, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    n, c0 = unit // groups, unit % groups * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    scale = load_per_filter(lam, c, C, 0.0)
    s = add_up_parts(parts_of_unit(partial_sums, unit, parts, BLOCK_C), parts, BLOCK_C, BLOCK_T)
    if tile == 0:
        tl.store(sum_h + n * C + c, s, mask=c < C)
        store_single_sample_grad(dlam, None, mean, s, c, C)
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
            h = act_backward(h, tl.load(saved + at, mask=whole, other=0.0).to(tl.float32), ACT)
        chosen = tl.load(index + at, mask=whole, other=4).to(tl.int32)
        corner = of_dv + start[:, None]
        for k in tl.static_range(4):
            there = inside & ((2 * i + k // 2 < height) & (2 * j + k % 2 < width))[:, None]
            value = tl.where(chosen == k, h, 0.0) - above
            to = corner + ((k // 2) * width + k % 2) * sp
            tl.store(to, value.to(dv.dtype.element_ty), mask=there)


def forward(
    v: Tensor,
    beta: Tensor,
    lam: Tensor,
    activation: str,
    consumer_ratio: float = 0.0,
    operands: ConvOperands | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return pooled, index, the means (N, C) of v, and the sums of the pooled maps.

    v is (N, C, H, W). The arguments are those of agc.forward.
    """
    v = like_layout(v, memory_order(v))
    beta, lam = beta.contiguous(), lam.contiguous()
    n, c, height, width = v.shape
    shape, last = (n, c, height // 2, width // 2), is_channels_last(v)
    pooled = empty_maps(v, shape, v.dtype, last)
    index = empty_maps(v, shape, torch.uint8, last)
    mean = v.new_empty((n, c), dtype=torch.float32)
    tiled = tile_maps(v, traced, None, 0, False, derives_mean(v, operands))
    partial_sums, launches = sum_launches(v, tiled, operands)
    for each in launches:
        launch(*each, v.device, traced)
    stores_sums = wants_map_sums(v, consumer_ratio / 4)  # a quarter of the elements is pooled
    windows = shape[2] * shape[3]
    tiles, geometry = _window_tiles(tiled, n, c, windows, stores_sums)
    map_sums = None
    if stores_sums:
        map_sums_shape = (n, tiled.groups, tiles, tiled.tiling.block_c)
        map_sums = v.new_empty(map_sums_shape, dtype=torch.float32)
    arguments = dict(
        geometry, v=v, pooled=pooled, index=index, map_sums=map_sums, mean=mean, beta=beta,
        lam=lam, partial_sums=partial_sums, P=height * width, windows=windows, across=shape[3],
        width=width, ACT=activation, MEAN_KNOWN=tiled.mean_known, **tiled.add_up(partial_sums),
        **_strides(v, "s"), **_strides(pooled, "o"),
    )  # fmt: skip
    launch(agc_pool_forward_kernel, (tiled.units * tiles, 1, 1), arguments, v.device, traced)
    return pooled, index, mean, map_sums


def backward(
    g: Tensor,
    pooled: Tensor | None,
    index: Tensor,
    beta: Tensor,
    lam: Tensor,
    mean: Tensor,
    size: tuple[int, int],
    activation: str,
    channels_last: bool,
    traced: bool = False,
    sums_only: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dv, dbeta and dlam; see ops/pool.py, and agc.backward for sums_only."""
    order = memory_order(index)
    g = like_layout(g, order)
    saved = g if pooled is None else like_layout(pooled, order)
    beta, lam = beta.contiguous(), lam.contiguous()
    (n, c), (height, width) = g.shape[:2], size
    dv = empty_maps(g, (n, c, height, width), g.dtype, channels_last)
    dbeta, dlam = torch.empty_like(beta), torch.empty_like(lam)
    tiled = tile_maps(g, traced, None, 0)
    sums = empty_map_gradients(mean, None, dbeta, dlam)
    partial_sums = tiled.empty_partial_sums(g)
    arguments = dict(
        tiled.sum_arguments, g=g, saved=saved, mean=mean, gamma=None, beta=beta, lam=lam,
        partial_sums=partial_sums, partial_sums_hz=partial_sums, ACT=activation,
        SAVED=ACTIVATIONS[activation].needs, GAIN_GRAD=False,
    )  # fmt: skip
    launch(agc_sum_kernel, tiled.sum_grid, arguments, g.device, traced)
    across = divide(width, 2)
    windows = divide(height, 2) * across
    tiles, geometry = _window_tiles(tiled, n, c, windows)
    arguments = dict(
        geometry, g=g, saved=saved, index=index, dv=dv, mean=mean, lam=lam,
        partial_sums=partial_sums, P=height * width, windows=windows, across=across,
        down=height // 2, right=width // 2, height=height, width=width, ACT=activation,
        sum_h=sums["sum_h"], dlam=sums["dlam"], **tiled.add_up(partial_sums),
        **_strides(dv, "s"), **_strides(g, "o"),
    )  # fmt: skip
    launch(agc_pool_backward_kernel, (tiled.units * tiles, 1, 1), arguments, g.device, traced)
    if sums_only:
        assert sums["sum_h"] is not None
        return dv, sums["sum_h"], dlam
    for each in filter_gradient_launches(sums, mean, None, None, dbeta, dlam):
        launch(*each, g.device, traced)
    return dv, dbeta, dlam


def _window_tiles(
    tiled: TiledMaps, n: int, c: int, windows: int, stores_sums: bool = False
) -> tuple[int, dict[str, Any]]:
    """Return a unit's number of window tiles, and both kernels' arguments for it."""
    block_c = tiled.tiling.block_c
    block, steps = BLOCK, STEPS
    if n * c * windows < BLOCK * STEPS * tiled.multiprocessors:
        block, steps = BLOCK // 2, STEPS // 2  # or some multiprocessors would be idle
    elif stores_sums:
        block, steps = BLOCK // 2, STEPS * 2  # the sums need registers
    block_q = power_of_2(windows, block // block_c)
    tiles = divide(windows, steps * block_q)
    return tiles, dict(
        C=c, groups=tiled.groups, tiles=tiles, steps=steps,
        BLOCK_Q=block_q, BLOCK_C=block_c, num_warps=max(1, min(8, 4 * block_q * block_c // 1024)),
    )  # fmt: skip


def _strides(maps: Tensor, prefix: str) -> dict[str, int]:
    strides = map_strides(maps)
    assert strides is not None  # both layouts of empty_maps have one stride between positions
    return {f"{prefix}{name}": stride for name, stride in zip("ncp", strides, strict=True)}


# The ops that torch.compile sees: kernel launches or plain PyTorch inside. Eager mode does not
# register them, because that imports the compiler.


def _traced_backward(
    g: Tensor,
    pooled: Tensor | None,
    index: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    mean: Tensor,
    height: int,
    width: int,
    activation: str,
    channels_last: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    size = (height, width)
    return pool_backward(
        g, pooled, index, bias, mean_scale, mean, size, activation, channels_last, traced=True
    )


def _fake_forward(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    n, c, height, width = v.shape
    shape, last = (n, c, height // 2, width // 2), is_channels_last(v)
    mean = v.new_empty((n, c), dtype=accumulate_dtype(v.dtype))
    return empty_maps(v, shape, v.dtype, last), empty_maps(v, shape, torch.uint8, last), mean


def _fake_backward(
    g: Tensor,
    pooled: Tensor | None,
    index: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    mean: Tensor,
    height: int,
    width: int,
    activation: str,
    channels_last: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dv = empty_maps(g, (*g.shape[:2], height, width), g.dtype, channels_last)
    return dv, torch.empty_like(bias), torch.empty_like(mean_scale)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    v, bias, mean_scale, ctx.activation = inputs
    pooled, index, mean = output
    ctx.save_for_backward(saved_pooled(ctx.activation, pooled), index, bias, mean_scale, mean)
    ctx.size, ctx.last = v.shape[2:], is_channels_last(v)


def _backward(ctx: Any, g: Tensor, _: Any, __: Tensor) -> tuple[Tensor | None, ...]:
    op = torch.ops.deepcontrol.center_bias_act_pool_backward
    return *op(g, *ctx.saved_tensors, *ctx.size, ctx.activation, ctx.last), None


@functools.cache
def register() -> None:
    """Register the ops with torch.library."""
    op: Any = triton_op("deepcontrol::center_bias_act_pool", traced_forward, mutates_args=())
    op.register_fake(_fake_forward)
    op.register_autograd(_backward, setup_context=_save)
    op = triton_op("deepcontrol::center_bias_act_pool_backward", _traced_backward, mutates_args=())
    op.register_fake(_fake_backward)
