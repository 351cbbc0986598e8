"""The neuron and 2x2 max pooling in one: the end of an encoder stage.

    y = act(v - lambda * m + beta)      pooled, index = max_pool2x2(y)      m = mean of v, (N, C)

Only the pooling reads y. Its backward needs act' at the maxima, which follows from the
pooled map: with g the gradient of `pooled` and h = g * act'(pooled),

    dv = place(h, index) - lambda * sum(h) / P       dbeta = sum h
    dlambda = -sum_s m_s * sum_p h

over the P positions of v. So the full map y is neither saved nor, on a GPU, written. The stage
saves a quarter of it, and one byte per window.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference
from .activation import ACTIVATIONS, get_activation
from .dispatch import (
    compiles_with_ops,
    needs_differentiable_backward,
    needs_plain_ops,
    uses_kernels,
)
from .gain_conv import gain_conv, scale_function
from .layout import check_maps, is_channels_last, map_sum, over_maps, positions
from .neuron import (
    Geometry,
    NeuronConfig,
    center_bias_act,
    convolve,
    convolve_backward,
    plain_forward,
)
from .pool import as_layout, max_pool2x2, place, run_pool
from .window_mean import ConvOperands


def center_bias_act_pool(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str = "relu"
) -> tuple[Tensor, Tensor]:
    """Return max_pool2x2(center_bias_act(v, ...)) without storing the full map.

    The backward of SiLU and GELU needs their input, so for them the two ops run one after the
    other.

    Args:
        v: Feature maps (N, C, H, W) of conv(x, gamma W).
        bias: beta, (C,).
        mean_scale: lambda, (C,).
        activation: One of relu, leaky_relu, silu, gelu, none.

    Returns:
        The pooled maps (N, C, H // 2, W // 2) and their index in uint8: see max_pool2x2.
    """
    act = get_activation(activation)
    check_maps(v, bias=bias, mean_scale=mean_scale)
    if act.needs == "input":
        return max_pool2x2(center_bias_act(v, bias, mean_scale, activation, overwrite=True))
    _check_windows(v)
    if needs_plain_ops() or (torch.compiler.is_compiling() and not compiles_with_ops()):
        return reference.max_pool2x2(reference.center_bias_act(v, bias, mean_scale, activation))
    if torch.compiler.is_compiling():
        pooled, index, _ = torch.ops.deepcontrol.center_bias_act_pool(
            v, bias, mean_scale, activation
        )
    else:
        pooled, index, _ = _CenterBiasActPool.apply(v, bias, mean_scale, activation)
    return pooled, index


def _check_windows(v: Tensor) -> None:
    if v.dim() != 4 or min(v.shape[2:]) < 2:
        raise ValueError(f"expected maps (N, C, H, W) of at least 2x2, got {tuple(v.shape)}")


Forward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


def pool_forward_function(v: Tensor) -> Forward:
    """Return the forward of center_bias_act_pool for maps v, as neuron.forward_function does."""
    if uses_kernels(v):
        from .triton import agc_pool as kernels

        return kernels.forward
    return _plain_forward


def _plain_forward(
    v: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    activation: str,
    consumer_ratio: float = 0.0,
    operands: ConvOperands | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return pooled, index, the means (N, C) and None for the map sums of the kernels."""
    y, mean, *_ = plain_forward(v, bias, mean_scale, activation)
    return *run_pool(y, is_channels_last(v)), mean, None


def traced_forward(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pooled, index and the means (N, C) inside a registered op."""
    if uses_kernels(v, traced=True):
        from .triton import agc_pool as kernels

        return kernels.forward(v, bias, mean_scale, activation, traced=True)[:3]
    y, mean, *_ = plain_forward(v, bias, mean_scale, activation)
    pooled, index = reference.max_pool2x2(y)
    last = is_channels_last(v)
    return as_layout(pooled, last), as_layout(index, last), mean


def pool_backward(
    g: Tensor,
    pooled: Tensor | None,
    index: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    mean: Tensor,
    size: tuple[int, int],
    activation: str,
    channels_last: bool,
    grad_mean: Tensor | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dv, dbias, dmean_scale; the plain form is differentiable, as in neuron.backward.

    Args:
        pooled: The pooled maps, if the activation needs its output.
        size: (H, W) of v.
        channels_last: The layout of v.
    """
    plain = not traced and needs_differentiable_backward(g, grad_mean)
    if not plain and uses_kernels(g, traced):
        from .triton import agc_pool as kernels

        return kernels.backward(
            g, pooled, index, bias, mean_scale, mean, size, activation, channels_last, traced=traced
        )
    h = ACTIVATIONS[activation].backward(g, pooled)  # type: ignore[arg-type]
    sum_h = map_sum(h)
    background = mean_scale * sum_h
    if grad_mean is not None:
        background = background - grad_mean
    placed = place(h, index, size, channels_last)
    dv = (placed - over_maps(background / positions(placed), placed)).to(g.dtype)
    dbias = sum_h.sum(0).to(bias.dtype)
    dscale = -(mean * sum_h).sum(0).to(mean_scale.dtype)
    return dv, dbias, dscale


def saved_pooled(activation: str, pooled: Tensor) -> Tensor | None:
    """Return the pooled maps if the backward needs them."""
    return pooled if ACTIVATIONS[activation].needs == "output" else None


class _CenterBiasActPool(torch.autograd.Function):
    """Return pooled, index and the mean, an output only so that second derivatives reach it."""

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        pooled, index, mean, _ = pool_forward_function(v)(v, bias, mean_scale, activation)
        ctx.save_for_backward(saved_pooled(activation, pooled), index, bias, mean_scale, mean)
        ctx.mark_non_differentiable(index)
        ctx.activation, ctx.size, ctx.last = activation, tuple(v.shape[2:]), is_channels_last(v)
        ctx.set_materialize_grads(False)
        return pooled, index, mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, _, grad_mean = grads
        pooled, index, bias, mean_scale, mean = ctx.saved_tensors
        if g is None:
            g = bias.new_zeros(index.shape) if pooled is None else torch.zeros_like(pooled)
        grads_in = pool_backward(
            g, pooled, index, bias, mean_scale, mean, ctx.size, ctx.activation, ctx.last, grad_mean
        )
        return *grads_in, None


def unfused_neuron_pool(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    geometry: Geometry,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Run gain_conv and center_bias_act_pool one after the other."""
    v = gain_conv(x, weight, gain, *geometry)
    return center_bias_act_pool(v, bias, mean_scale, activation)


class FusedNeuronPool(torch.autograd.Function):
    """FusedNeuron and the pooling: (x, weight, ...) -> pooled, index, mean, map sums."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gain: Tensor,
        bias: Tensor,
        mean_scale: Tensor,
        config: NeuronConfig,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        scaled = scale_function(weight)(weight, gain, x.dtype)
        v, conv_saved, operands = convolve(ctx, x, weight, gain, scaled, config)
        check_maps(v, bias=bias, mean_scale=mean_scale)
        _check_windows(v)
        activation = config.activation
        pooled, index, mean, map_sums = pool_forward_function(v)(
            v, bias, mean_scale, activation, config.consumer_ratio, operands
        )
        ctx.mark_non_differentiable(*(a for a in (index, map_sums) if a is not None))
        saved = saved_pooled(activation, pooled)
        ctx.save_for_backward(*conv_saved, saved, index, bias, mean_scale, mean)
        ctx.activation, ctx.size, ctx.last = activation, tuple(v.shape[2:]), is_channels_last(v)
        ctx.dtype = v.dtype
        return pooled, index, mean, map_sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, _, grad_mean, _ = grads
        *conv_saved, pooled, index, bias, mean_scale, mean = ctx.saved_tensors
        if g is None:
            zeros = mean.new_zeros(index.shape, dtype=ctx.dtype)
            g = zeros if pooled is None else torch.zeros_like(pooled)
        dv, dbias, dscale = pool_backward(
            g, pooled, index, bias, mean_scale, mean, ctx.size, ctx.activation, ctx.last, grad_mean
        )
        return *convolve_backward(ctx, dv, conv_saved), dbias, dscale, None
