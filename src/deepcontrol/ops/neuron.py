"""The paper's neuron in one: the convolution with its gain, then center, bias, activate; or pool.

It is gain_conv.py and center.py, or center_pool.py, in turn. In eager mode it is one step of
autograd where those are two: at small batches a training step's time is Python's. And it knows what
its convolution was made of, from which the mean can be had: window_mean.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import center, center_pool
from .activation import get_activation
from .gain_conv import backward as conv_backward
from .gain_conv import checked_input, gain_conv, scale
from .maps import check_maps, like_layout, memory_order
from .pool import is_channels_last
from .tracing import wants_plain_ops
from .window_mean import HALF_TYPES, Origin, leave_totals, totals_left


class Geometry(NamedTuple):
    """How a convolution moves its kernel."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


class Parameters(NamedTuple):
    weight: Tensor
    gain: Tensor
    bias: Tensor
    mean_scale: Tensor


class How(NamedTuple):
    """All that a neuron is told besides what it is differentiated by.

    feeds: how many elements the neuron that reads the result writes for each that it reads, if that
    is known: decides whether the sums of the maps are left to it. totals: the sums that were left
    with the input. Nothing is differentiated through them: however it is had, the mean is v's.
    """

    geometry: Geometry
    activation: str
    feeds: float
    totals: Tensor | None


def neuron(
    x: Tensor, parameters: Parameters, geometry: Geometry, activation: str, feeds: float = 0.0
) -> Tensor:
    """act(v - lambda * mean(v) + beta) of v = conv(x, gamma W); feeds: see How."""
    weight, gain, bias, mean_scale = parameters
    if _in_turn(activation):
        v = gain_conv(x, weight, gain, *geometry)
        return center.center_bias_act(v, bias, mean_scale, activation, overwrite=True)
    x = checked_input(x, weight, gain, geometry.groups)
    how = How(geometry, activation, feeds, totals_left(x))
    y, _, left = _Neuron.apply(x, *parameters, how)
    leave_totals(y, left)
    return y


def neuron_pool(
    x: Tensor, parameters: Parameters, geometry: Geometry, activation: str, feeds: float = 0.0
) -> tuple[Tensor, Tensor]:
    """max_pool2x2 of a neuron's maps, which need not be written; feeds: see How."""
    weight, gain, bias, mean_scale = parameters
    if _in_turn(activation):
        v = gain_conv(x, weight, gain, *geometry)
        return center_pool.center_bias_act_pool(v, bias, mean_scale, activation)
    x = checked_input(x, weight, gain, geometry.groups)
    how = How(geometry, activation, feeds, totals_left(x))
    pooled, index, _, left = _NeuronPool.apply(x, *parameters, how)
    leave_totals(pooled, left)
    return pooled, index


def _in_turn(activation: str) -> bool:
    """Whether it is two ops in turn: in plain torch, for a compiler, and if the backward needs v
    (SiLU, GELU)."""
    if wants_plain_ops() or torch.compiler.is_compiling():
        return True
    return get_activation(activation).needs == "input"


def _origin(x: Tensor, scaled: Tensor, how: How) -> Origin | None:
    """What window_mean.py may know the mean from, or None."""
    ones = all(tuple(a) == (1, 1) for a in how.geometry[:3]) and how.geometry.groups == 1
    if x.dtype not in HALF_TYPES or not ones or scaled.shape[2:] != (3, 3):
        return None
    return Origin(x, scaled, how.totals)


class _Neuron(torch.autograd.Function):
    """Returns y, the mean and what it leaves; the mean for second derivatives, which pass it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        parameters, how = Parameters(*rest[:-1]), rest[-1]
        bias, mean_scale, activation = parameters.bias, parameters.mean_scale, how.activation
        v, of_conv, origin = _convolve(ctx, x, parameters, how)
        training = any(ctx.needs_input_grad)
        y, mean, bits, left = center.forward(
            v, bias, mean_scale, activation, v, training, how.feeds, origin
        )
        if left is not None:
            ctx.mark_non_differentiable(left)
        kept = center.kept(activation, v, y, bits)
        ctx.save_for_backward(*of_conv, kept, bias, mean_scale, mean)
        ctx.activation = activation
        ctx.order, ctx.shape, ctx.dtype = memory_order(y), y.shape, y.dtype
        return y, mean, left

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, grad_mean, _ = grads
        *of_conv, of_maps, bias, mean_scale, mean = ctx.saved_tensors
        g = mean.new_zeros(ctx.shape, dtype=ctx.dtype) if g is None else g
        g = like_layout(g, ctx.order)
        dv, *of_center = center.backward(
            g, of_maps, bias, mean_scale, mean, ctx.activation, grad_mean
        )
        return *_convolve_backward(ctx, dv, of_conv), *of_center, None


class _NeuronPool(torch.autograd.Function):
    """Returns pooled, index, the mean and what it leaves: see _Neuron."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        parameters, how = Parameters(*rest[:-1]), rest[-1]
        bias, mean_scale, activation = parameters.bias, parameters.mean_scale, how.activation
        v, of_conv, origin = _convolve(ctx, x, parameters, how)
        center_pool.check_windows(v)
        pooled, index, mean, left = center_pool.forward_pool(
            v, bias, mean_scale, activation, how.feeds, origin
        )
        ctx.mark_non_differentiable(*(a for a in (index, left) if a is not None))
        kept = center_pool.kept_of_pool(activation, pooled)
        ctx.save_for_backward(*of_conv, kept, index, bias, mean_scale, mean)
        ctx.activation, ctx.size, ctx.last = activation, tuple(v.shape[2:]), is_channels_last(v)
        ctx.dtype = v.dtype
        return pooled, index, mean, left

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, _, grad_mean, _ = grads
        *of_conv, kept, index, bias, mean_scale, mean = ctx.saved_tensors
        if g is None:
            zeros = mean.new_zeros(index.shape, dtype=ctx.dtype)
            g = zeros if kept is None else torch.zeros_like(kept)
        of = (g, kept, index, bias, mean_scale, mean, ctx.size, ctx.activation, ctx.last, grad_mean)
        dv, *of_center = center_pool.backward_pool(*of)
        return *_convolve_backward(ctx, dv, of_conv), *of_center, None


def _convolve(
    ctx: Any, x: Tensor, parameters: Parameters, how: How
) -> tuple[Tensor, tuple[Tensor | None, ...], Origin | None]:
    """The convolution's output, what its backward needs, and what the output's mean is made of."""
    weight, gain, bias, mean_scale = parameters
    scaled = scale(weight, gain, x.dtype)
    stride, padding, dilation, groups = how.geometry
    ctx.geometry = (stride, padding, dilation, False, [0] * len(stride), groups)
    ctx.set_materialize_grads(False)  # a mean's gradient of zeros would only cost time
    v = torch.convolution(x, scaled, None, *ctx.geometry)
    check_maps(v, bias=bias, mean_scale=mean_scale)
    of_conv: tuple[Tensor | None, ...] = (None, None, None, None)
    if any(ctx.needs_input_grad[:3]):
        of_conv = (x, weight, gain, scaled if x.dtype != weight.dtype else None)
    return v, of_conv, _origin(x, scaled, how)


def _convolve_backward(
    ctx: Any, dv: Tensor, of_conv: Sequence[Any]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight, gain, scaled = of_conv
    if x is None:
        return None, None, None
    return conv_backward(dv, x, weight, gain, scaled, ctx.geometry, ctx.needs_input_grad[:3])
