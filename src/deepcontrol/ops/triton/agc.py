"""Eq. 1 and its backward in Triton, for the layer and the neuron.

The op of the layer is agc, that of the neuron is center_bias_act.

    u = gamma (z - lambda m) + beta     y = act(u)          m = mean of z over the map, (N, C)
    h = g act'(u)                       dz = gamma (h - lambda mean(h))
    dgamma = sum h (z - lambda m)       dbeta = sum h       dlambda = -gamma sum_s m_s sum_p h

The neuron has its gain in the weights of the convolution, so it passes no gamma.

Memory bandwidth takes all the time, and a map is needed twice: for its mean, then to be rewritten.
One launch sums and one rewrites, both over the whole batch, as tiling.py describes. For small maps
one program does both and reads a map once. The mean of a large map may be known beforehand
(ops/gain_conv.py). Finer schemes that keep the second read in the L2 cache (chunks of samples,
programs that wait for one another) cost more than they saved: dev/LOG.md has the figures.

Programs sum from the last part to the first and rewrite from the first tile to the last, because
the data read last, or written last by the convolution, is still in the L2 cache. If the mean is
known without reading, they rewrite from the last tile to the first. A program that rewrites loads
the parameters of its filters before it adds up the parts, so that it waits for memory only once.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..activation import ACTIVATIONS, empty_relu_mask
from ..agc import agc_backward, agc_forward, center_backward, forward_function, saved_map
from ..dispatch import uses_kernels
from ..gain_conv import ConvOperands, derives_mean, wants_map_sums
from ..layout import accumulate_dtype, like_layout, memory_order
from .blocks import (
    act,
    act_backward,
    act_gradient,
    add_up_parts,
    agc_sum_kernel,
    block_offsets,
    empty_map_gradients,
    filter_gradient_launches,
    load_block,
    load_parameters,
    load_per_filter,
    mask_offsets,
    pack_mask,
    parts_of_unit,
    store_single_sample_grad,
    sum_launches,
    to_fp32,
)
from .launch import launch
from .tiling import Tiling, tile_maps


@triton.jit
def _write_activated(
    x, y, relu_mask, map_sums, gamma, gain, bias, background, n, c0, p0, C, P, sn, sc, sp,
    ACT: tl.constexpr, MASK_PACKING: tl.constexpr, EVEN_BLOCKS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write y and the ReLU mask of a block x of z; return the sums of y if stored.

    ROWS: see _sum_blocks.
    """
    if gamma is None:
        u = x + (bias - background)
    else:  # centered first, which rounds less if the mean is far from 0
        u = gain * (x - background) + bias
    result = act(u, ACT).to(y.dtype.element_ty)
    at, inside = block_offsets(n, c0, p0, C, P, sn, sc, sp, EVEN_BLOCKS, BLOCK_P, BLOCK_C)
    tl.store(y + at, result, mask=inside)
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    if map_sums is not None:
        written = to_fp32(result)
        if not EVEN_BLOCKS:
            written = tl.where(inside, written, 0.0)
        total = tl.sum(tl.reshape(written, [BLOCK_P // ROWS, ROWS, BLOCK_C]), 0)
    if relu_mask is not None:  # from the rounded result, as a backward that reads y would see it
        b, there = mask_offsets(
            n, c0, p0, C, P, sn, sc, sp, EVEN_BLOCKS, MASK_PACKING, BLOCK_P, BLOCK_C
        )
        positive = act_backward(1.0, to_fp32(result), ACT) == 1.0
        tl.store(relu_mask + b, pack_mask(positive, MASK_PACKING, BLOCK_P, BLOCK_C), mask=there)
    return total


@triton.jit
def agc_forward_kernel(
    z, y, relu_mask, map_sums, mean, gamma, beta, lam, partial_sums, C, P, groups, parts, tiles,
    steps, sn, sc, sp, ACT: tl.constexpr, MASK_PACKING: tl.constexpr, SINGLE_PASS: tl.constexpr,
    MEAN_KNOWN: tl.constexpr, EVEN_BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write y, the means and, if given, the ReLU mask and the sums of the tiles of y."""
    program = tl.program_id(0)
    if MEAN_KNOWN:
        program = tl.num_programs(0) - 1 - program
    unit, tile = program // tiles, program % tiles
    n, c0 = unit // groups, unit % groups * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    gain, bias = load_per_filter(gamma, c, C, 1.0), load_per_filter(beta, c, C, 0.0)
    scale = load_per_filter(lam, c, C, 0.0)
    if SINGLE_PASS:
        x = load_block(z, n, c0, 0, C, P, sn, sc, sp, EVEN_BLOCKS, BLOCK_P, BLOCK_C)
        m = tl.sum(x, 0) / P
    else:
        at = parts_of_unit(partial_sums, unit, parts, BLOCK_C)
        m = add_up_parts(at, parts, BLOCK_C, BLOCK_T) / P
    if tile == 0:
        tl.store(mean + n * C + c, m, mask=c < C)
    background = scale * m[None, :]
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    if SINGLE_PASS:
        total += _write_activated(
            x, y, relu_mask, map_sums, gamma, gain, bias, background, n, c0, 0, C, P, sn, sc, sp,
            ACT, MASK_PACKING, EVEN_BLOCKS, BLOCK_P, BLOCK_C, ROWS,
        )  # fmt: skip
    else:
        for step in range(steps):
            p0 = (tile * steps + step) * BLOCK_P
            total += _write_activated(
                load_block(z, n, c0, p0, C, P, sn, sc, sp, EVEN_BLOCKS, BLOCK_P, BLOCK_C),
                y, relu_mask, map_sums, gamma, gain, bias, background, n, c0, p0, C, P, sn, sc, sp,
                ACT, MASK_PACKING, EVEN_BLOCKS, BLOCK_P, BLOCK_C, ROWS,
            )  # fmt: skip
    if map_sums is not None:
        tl.store(parts_of_unit(map_sums, unit, tiles, BLOCK_C) + tile * BLOCK_C, tl.sum(total, 0))


@triton.jit
def agc_backward_kernel(
    g, saved, dz, mean, gamma, beta, lam, sum_h, sum_hz, dlam, partial_sums, partial_sums_hz, C, P,
    groups, parts, tiles, steps, sn, sc, sp, ACT: tl.constexpr, SAVED: tl.constexpr,
    MASK_PACKING: tl.constexpr, GAIN_GRAD: tl.constexpr, SINGLE_PASS: tl.constexpr,
    EVEN_BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write dz and, per map, the sums of h and, if GAIN_GRAD, of h (z - lambda m)."""
    unit, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    n, c0 = unit // groups, unit % groups * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    gain, bias, background = load_parameters(mean, gamma, beta, lam, n, c, C, SAVED)
    scale = load_per_filter(lam, c, C, 0.0)
    if SINGLE_PASS:
        h, centered = act_gradient(
            g, saved, gain, bias, background, n, c0, 0, C, P, sn, sc, sp,
            ACT, SAVED, MASK_PACKING, EVEN_BLOCKS, BLOCK_P, BLOCK_C,
        )  # fmt: skip
        s = tl.sum(h, 0)
    else:
        s = add_up_parts(parts_of_unit(partial_sums, unit, parts, BLOCK_C), parts, BLOCK_C, BLOCK_T)
    if tile == 0:
        tl.store(sum_h + n * C + c, s, mask=c < C)
        if GAIN_GRAD:
            if SINGLE_PASS:
                s_hz = tl.sum(h * centered, 0)
            else:
                at = parts_of_unit(partial_sums_hz, unit, parts, BLOCK_C)
                s_hz = add_up_parts(at, parts, BLOCK_C, BLOCK_T)
            tl.store(sum_hz + n * C + c, s_hz, mask=c < C)
        store_single_sample_grad(dlam, gamma, mean, s, c, C)
    above = scale * (s / P)[None, :]
    if SINGLE_PASS:
        at, inside = block_offsets(n, c0, 0, C, P, sn, sc, sp, EVEN_BLOCKS, BLOCK_P, BLOCK_C)
        tl.store(dz + at, (gain * (h - above)).to(dz.dtype.element_ty), mask=inside)
    else:
        for step in range(steps):
            p0 = (tile * steps + step) * BLOCK_P
            h, _ = act_gradient(
                g, saved, gain, bias, background, n, c0, p0, C, P, sn, sc, sp,
                ACT, SAVED, MASK_PACKING, EVEN_BLOCKS, BLOCK_P, BLOCK_C,
            )  # fmt: skip
            at, inside = block_offsets(n, c0, p0, C, P, sn, sc, sp, EVEN_BLOCKS, BLOCK_P, BLOCK_C)
            tl.store(dz + at, (gain * (h - above)).to(dz.dtype.element_ty), mask=inside)


def forward(
    z: Tensor,
    beta: Tensor,
    lam: Tensor,
    activation: str,
    out: Tensor | None = None,
    training: bool = False,
    consumer_ratio: float = 0.0,
    operands: ConvOperands | None = None,
    *,
    gamma: Tensor | None = None,
    tiling: Tiling | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return y, the means (N, C), the ReLU mask and the map sums of y.

    Args:
        out: Where to write y; may be z.
        training: Whether to write the ReLU mask, if the activation and the layout allow one.
        consumer_ratio: Output elements per input element of the consumer of y. It decides whether
            the sums of y are stored.
        operands: The operands of the convolution that computed z, from which the mean may follow.
        tiling: The tiling; None chooses one.
        traced: A compiler traces the call.
    """
    dense = like_layout(z, memory_order(z))
    if out is not None and dense is not z:  # the kernel would not write the layout of out
        y, mean, relu_mask, map_sums = forward(
            dense, beta, lam, activation, None, training, consumer_ratio, operands,
            gamma=gamma, tiling=tiling, traced=traced,
        )  # fmt: skip
        return out.copy_(y), mean, relu_mask, map_sums
    relu_mask = empty_relu_mask(z, activation) if training else None
    z = dense
    gamma = None if gamma is None else gamma.contiguous()
    beta, lam = beta.contiguous(), lam.contiguous()
    y = torch.empty_like(z) if out is None else out
    mean = z.new_empty(z.shape[:2], dtype=torch.float32)
    stores_sums = wants_map_sums(z, consumer_ratio)
    tiled = tile_maps(z, traced, tiling, 1, stores_sums, derives_mean(z, operands))
    map_sums = z.new_empty(tiled.tiles_shape, dtype=torch.float32) if stores_sums else None
    partial_sums, launches = sum_launches(z, tiled, operands)
    for each in launches:
        launch(*each, z.device, traced)
    arguments = dict(
        tiled.rewrite_arguments, z=z, y=y, relu_mask=relu_mask, map_sums=map_sums, mean=mean,
        gamma=gamma, beta=beta, lam=lam, partial_sums=partial_sums, ACT=activation,
        MEAN_KNOWN=tiled.mean_known, ROWS=tiled.rows, **tiled.add_up(partial_sums),
    )  # fmt: skip
    launch(agc_forward_kernel, tiled.rewrite_grid, arguments, z.device, traced)
    return y, mean, relu_mask, map_sums


def backward(
    g: Tensor,
    saved: Tensor | None,
    mean: Tensor,
    gamma: Tensor | None,
    beta: Tensor,
    lam: Tensor,
    activation: str,
    tiling: Tiling | None = None,
    traced: bool = False,
    sums_only: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return dz, dgamma (None without gamma), dbeta and dlam.

    Args:
        sums_only: Return the sums of h per map, (N, C), in place of dbeta, and leave dlam empty.
        saved: z, y, the ReLU mask or None. With a mask, the dimensions of g must have the same
            order in memory as those of y.
    """
    kind: str = "input" if gamma is not None else ACTIVATIONS[activation].needs
    if saved is not None and saved.dtype == torch.uint8:
        kind = "mask"
    order = memory_order(g if saved is None or kind == "mask" else saved)
    g = like_layout(g, order)
    if saved is None:
        saved = g
    elif kind != "mask":
        saved = like_layout(saved, order)
    gamma = None if gamma is None else gamma.contiguous()
    beta, lam = beta.contiguous(), lam.contiguous()
    dz, dbeta, dlam = (torch.empty_like(a) for a in (g, beta, lam))
    dgamma = None if gamma is None else torch.empty_like(gamma)
    tiled = tile_maps(g, traced, tiling, 1 if gamma is None else 2)
    sums = empty_map_gradients(mean, dgamma, dbeta, dlam)
    partial_sums = tiled.empty_partial_sums(g)
    partial_sums_hz = partial_sums if gamma is None else tiled.empty_partial_sums(g)
    common = dict(
        g=g, saved=saved, mean=mean, gamma=gamma, beta=beta, lam=lam, partial_sums=partial_sums,
        partial_sums_hz=partial_sums_hz, ACT=activation, SAVED=kind, GAIN_GRAD=gamma is not None,
    )  # fmt: skip
    if not tiled.tiling.single_pass:
        launch(agc_sum_kernel, tiled.sum_grid, {**tiled.sum_arguments, **common}, g.device, traced)
    arguments = dict(tiled.rewrite_arguments, dz=dz, **sums, **common)
    arguments |= tiled.add_up(partial_sums)
    launch(agc_backward_kernel, tiled.rewrite_grid, arguments, g.device, traced)
    if sums_only:
        assert sums["sum_h"] is not None
        return dz, dgamma, sums["sum_h"], dlam
    for each in filter_gradient_launches(sums, mean, gamma, dgamma, dbeta, dlam):
        launch(*each, g.device, traced)
    return dz, dgamma, dbeta, dlam


# The ops that torch.compile sees: kernel launches or plain PyTorch inside. Eager mode does not
# register them, because that imports the compiler.


def _center_bias_act(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, mask, _ = forward_function(v, traced=True)(
        v, bias, mean_scale, activation, None, training
    )
    return y, mean, _no_mask(v) if mask is None else mask


def _center_bias_act_backward(
    g: Tensor, saved: Tensor | None, bias: Tensor, mean_scale: Tensor, mean: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    return center_backward(g, saved, bias, mean_scale, mean, activation, traced=True)


def _agc(z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor) -> tuple[Tensor, Tensor]:
    return agc_forward(z, weight, bias, mean_scale, traced=True)


def _agc_backward(
    g: Tensor, z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return agc_backward(g, z, weight, bias, mean_scale, mean, traced=True)


def _fake_center_bias_act(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kernels = training and uses_kernels(v, traced=True)
    mask = empty_relu_mask(v, activation) if kernels else None
    return torch.empty_like(v), _means(v), _no_mask(v) if mask is None else mask


def _fake_center_bias_act_backward(
    g: Tensor, saved: Tensor | None, bias: Tensor, mean_scale: Tensor, mean: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(g), torch.empty_like(bias), torch.empty_like(mean_scale)


def _fake_agc(z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(z), _means(z)


def _fake_agc_backward(
    g: Tensor, z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dz, dweight, dbias, dscale = (torch.empty_like(a) for a in (g, weight, bias, mean_scale))
    return dz, dweight, dbias, dscale


def _means(z: Tensor) -> Tensor:
    return z.new_empty(z.shape[:2], dtype=accumulate_dtype(z.dtype))


def _no_mask(v: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=v.device)  # an op cannot return None


def _save_neuron(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    v, bias, mean_scale, activation, _ = inputs
    y, mean, mask = output
    saved = saved_map(activation, v, y, mask if len(mask) else None)
    ctx.save_for_backward(saved, bias, mean_scale, mean)
    ctx.activation, ctx.order = activation, memory_order(y)


def _neuron_backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    g = like_layout(g, ctx.order)
    op = torch.ops.deepcontrol.center_bias_act_backward
    return *op(g, *ctx.saved_tensors, ctx.activation), None, None


def _save_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, mean = output
    ctx.save_for_backward(*inputs, mean)
    ctx.order = memory_order(y)


def _layer_backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.deepcontrol.agc_backward(like_layout(g, ctx.order), *ctx.saved_tensors)


@functools.cache
def register() -> None:
    """Register the ops with torch.library."""
    op: Any = triton_op("deepcontrol::center_bias_act", _center_bias_act, mutates_args=())
    op.register_fake(_fake_center_bias_act)
    op.register_autograd(_neuron_backward, setup_context=_save_neuron)
    op = triton_op(
        "deepcontrol::center_bias_act_backward", _center_bias_act_backward, mutates_args=()
    )
    op.register_fake(_fake_center_bias_act_backward)
    op = triton_op("deepcontrol::agc", _agc, mutates_args=())
    op.register_fake(_fake_agc)
    op.register_autograd(_layer_backward, setup_context=_save_layer)
    op = triton_op("deepcontrol::agc_backward", _agc_backward, mutates_args=())
    op.register_fake(_fake_agc_backward)
