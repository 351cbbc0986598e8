"""The paper's neuron: the convolution, Eq. 1 and the activation, and 2x2 max pooling if it follows.

    v = conv(x, gamma W)      u = v - lambda * m + beta      y = act(u)      m = mean of v, (N, C)

With a filter_norm c, the filters are gamma c W / |W|.

There are two forms of the same arithmetic:

- `FusedNeuron` and `FusedNeuronPool`, the whole neuron as one autograd.Function, for eager mode. At
  small batches Python dominates the time of a training step, and one Function costs less than two.
  It also has the operands of the convolution, from which the mean can be derived (gain_conv.py).
- `unfused_neuron` and `unfused_neuron_pool`, the ops one after the other, for everything else.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .activation import get_activation
from .agc import center_backward, center_bias_act, forward_function, saved_map
from .dispatch import needs_plain_ops
from .gain_conv import HALF_TYPES, ConvOperands, gain_conv, scale_function
from .gain_conv import backward as conv_backward
from .layout import check_maps, is_channels_last, like_layout, memory_order
from .pool import (
    center_bias_act_pool,
    check_windows,
    pool_backward,
    pool_forward_function,
    saved_pooled,
)


class Geometry(NamedTuple):
    """Stride, padding and dilation per spatial dimension, and the groups of a convolution."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


class NeuronConfig(NamedTuple):
    """The arguments of a neuron that are not differentiated.

    Attributes:
        consumer_ratio: Output elements per input element of the consumer of y; 0 if unknown. It
            decides whether the kernel stores the sums of its maps.
        map_sums: The sums stored with x. No gradient flows through them: the mean is that of v,
            however it is computed.
        filter_norm: Norm that each filter is scaled to before the gain, or None.
    """

    geometry: Geometry
    activation: str
    consumer_ratio: float
    map_sums: Tensor | None
    filter_norm: float | None = None


def runs_fused(activation: str) -> bool:
    """Return whether a neuron runs as a FusedNeuron now.

    It does in eager mode, unless the backward needs v (SiLU, GELU).
    """
    if needs_plain_ops() or torch.compiler.is_compiling():
        return False
    return get_activation(activation).needs != "input"


def unfused_neuron(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    geometry: Geometry,
    activation: str,
    filter_norm: float | None = None,
) -> Tensor:
    """Run gain_conv and center_bias_act one after the other."""
    v = gain_conv(x, weight, gain, *geometry, filter_norm)
    return center_bias_act(v, bias, mean_scale, activation, overwrite=True)


def unfused_neuron_pool(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    geometry: Geometry,
    activation: str,
    filter_norm: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run gain_conv and center_bias_act_pool one after the other."""
    v = gain_conv(x, weight, gain, *geometry, filter_norm)
    return center_bias_act_pool(v, bias, mean_scale, activation)


class FusedNeuron(torch.autograd.Function):
    """The whole neuron: (x, weight, gain, bias, mean_scale, config) -> y, mean, map sums.

    x is the result of `gain_conv.cast_input`. The mean is an output only so that second
    derivatives reach it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gain: Tensor,
        bias: Tensor,
        mean_scale: Tensor,
        config: NeuronConfig,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        scaled = scale_function(weight)(weight, gain, x.dtype, config.filter_norm)
        v, conv_saved, operands = convolve(ctx, x, weight, gain, scaled, config)
        check_maps(v, bias=bias, mean_scale=mean_scale)
        activation, training = config.activation, any(ctx.needs_input_grad)
        y, mean, mask, map_sums = forward_function(v)(
            v, bias, mean_scale, activation, v, training, config.consumer_ratio, operands
        )
        if map_sums is not None:
            ctx.mark_non_differentiable(map_sums)
        saved = saved_map(activation, v, y, mask)
        ctx.save_for_backward(*conv_saved, saved, bias, mean_scale, mean)
        ctx.activation = activation
        ctx.order, ctx.shape, ctx.dtype = memory_order(y), y.shape, y.dtype
        return y, mean, map_sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, grad_mean, _ = grads
        *conv_saved, saved, bias, mean_scale, mean = ctx.saved_tensors
        g = mean.new_zeros(ctx.shape, dtype=ctx.dtype) if g is None else g
        g = like_layout(g, ctx.order)
        dv, dbias, dscale = center_backward(
            g, saved, bias, mean_scale, mean, ctx.activation, grad_mean
        )
        return *convolve_backward(ctx, dv, conv_saved), dbias, dscale, None


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
        scaled = scale_function(weight)(weight, gain, x.dtype, config.filter_norm)
        v, conv_saved, operands = convolve(ctx, x, weight, gain, scaled, config)
        check_maps(v, bias=bias, mean_scale=mean_scale)
        check_windows(v)
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


def convolve(
    ctx: Any, x: Tensor, weight: Tensor, gain: Tensor, scaled: Tensor, config: NeuronConfig
) -> tuple[Tensor, tuple[Tensor | None, ...], ConvOperands | None]:
    """Return v = conv(x, scaled), the tensors to save, and the operands if they give the mean."""
    stride, padding, dilation, groups = config.geometry
    ctx.geometry = (stride, padding, dilation, False, [0] * len(stride), groups)
    ctx.filter_norm = config.filter_norm
    ctx.set_materialize_grads(False)  # a zero gradient of the mean would only cost time
    v = torch.convolution(x, scaled, None, *ctx.geometry)
    saved: tuple[Tensor | None, ...] = (None, None, None, None)
    if any(ctx.needs_input_grad[:3]):
        saved = (x, weight, gain, scaled if x.dtype != weight.dtype else None)
    ones = all(tuple(a) == (1, 1) for a in (stride, padding, dilation)) and groups == 1
    if x.dtype not in HALF_TYPES or not ones or scaled.shape[2:] != (3, 3):
        return v, saved, None
    return v, saved, ConvOperands(x, scaled, config.map_sums)


def convolve_backward(
    ctx: Any, dv: Tensor, saved: Sequence[Any]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dW and dgamma, with None for those not needed."""
    x, weight, gain, scaled = saved
    if x is None:
        return None, None, None
    needs = ctx.needs_input_grad[:3]
    return conv_backward(dv, x, weight, gain, scaled, ctx.geometry, ctx.filter_norm, needs)
