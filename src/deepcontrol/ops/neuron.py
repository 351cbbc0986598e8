"""The paper's neuron: center, bias and activate, alone or fused with the convolution before it.

    v = conv(x, gamma W)      u = v - lambda * m + beta      y = act(u)      m = mean of v, (N, C)

With g the gradient of y, h = g * act'(u), and sums over positions p and samples s:

    dv = h - lambda * mean(h)       dbeta = sum h       dlambda = -sum_s m_s * sum_p h

For ReLU and leaky ReLU, act' follows from y, which the next convolution saves as its input. So a
neuron saves N x C means and no map, as little as a layer without normalization. The kernels also
save the signs of y, one bit each (`activation.empty_relu_mask`).

There are three forms of the same arithmetic:

- `center_bias_act`, an op on v. It is an autograd.Function in eager mode, which can write over v,
  and a torch.library op under torch.compile (triton/agc.py).
- `FusedNeuron`, the whole neuron as one autograd.Function, for eager mode. At small batches Python
  dominates the time of a training step, and one Function costs less than two. It also has the
  operands of the convolution, from which the mean can be derived (window_mean.py).
- `unfused_neuron`, gain_conv and center_bias_act one after the other, for everything else.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .activation import ACTIVATIONS, get_activation, unpack_relu_mask
from .dispatch import (
    compiles_with_ops,
    needs_differentiable_backward,
    needs_plain_ops,
    uses_kernels,
)
from .gain_conv import backward as conv_backward
from .gain_conv import gain_conv, scale_function
from .layout import (
    check_maps,
    like_layout,
    map_mean,
    map_sum,
    memory_order,
    over_maps,
    positions,
)
from .window_mean import HALF_TYPES, ConvOperands


def center_bias_act(
    v: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    activation: str = "relu",
    *,
    overwrite: bool = False,
) -> Tensor:
    """Return act(v - lambda * mean(v) + beta): a neuron after its convolution.

    Args:
        v: Feature maps (N, C, *) of conv(x, gamma W).
        bias: beta, (C,).
        mean_scale: lambda, (C,).
        activation: One of relu, leaky_relu, silu, gelu, none.
        overwrite: Allow the result to reuse the memory of v. This happens in eager mode, unless
            the backward needs v (SiLU, GELU).
    """
    get_activation(activation)
    check_maps(v, bias=bias, mean_scale=mean_scale)
    if needs_plain_ops() or (torch.compiler.is_compiling() and not compiles_with_ops()):
        return reference.center_bias_act(v, bias, mean_scale, activation)
    if torch.compiler.is_compiling():
        training = torch.is_grad_enabled()
        y, *_ = torch.ops.deepcontrol.center_bias_act(v, bias, mean_scale, activation, training)
    else:
        y, _ = _CenterBiasAct.apply(v, bias, mean_scale, activation, overwrite)
    return y


def center_bias_act_given_mean(
    v: Tensor, mean: Tensor, bias: Tensor, mean_scale: Tensor, activation: str
) -> Tensor:
    """Return act(v - lambda * m + beta) for a given mean (N, C), written over v.

    For inference on tiles that share the mean of their image.
    """
    v.add_(over_maps(bias - mean_scale * mean, v))
    return get_activation(activation).apply_(v)


Forward = Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None]]


def forward_function(v: Tensor, traced: bool = False) -> Forward:
    """Return the forward of center_bias_act for maps v: the kernels' or `plain_forward`.

    Both have the arguments of `plain_forward`. Returning the function instead of calling it keeps
    the Python stack above a launch short.
    """
    if uses_kernels(v, traced):
        from .triton import agc as kernels

        return functools.partial(kernels.forward, traced=True) if traced else kernels.forward
    return plain_forward


def plain_forward(
    v: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    activation: str,
    out: Tensor | None = None,
    training: bool = False,
    consumer_ratio: float = 0.0,
    operands: ConvOperands | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run the forward in plain PyTorch.

    Args:
        out: Where to write y; may be v.
        training: Whether a backward follows.
        consumer_ratio: Output elements per input element of the consumer of y; 0 if unknown.
        operands: The operands of the convolution that computed v, if the mean can be derived.

    Returns:
        y, the means (N, C), the ReLU mask and the map sums. The last two are for the kernels: here
        they are None, and the arguments that concern them have no effect.
    """
    mean = map_mean(v)
    y = torch.empty_like(v) if out is None else out
    torch.add(v, over_maps(_shift(mean, bias, mean_scale), v), out=y)
    return ACTIVATIONS[activation].apply_(y), mean, None, None


def backward(
    g: Tensor,
    saved: Tensor | None,
    bias: Tensor,
    mean_scale: Tensor,
    mean: Tensor,
    activation: str,
    grad_mean: Tensor | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dv, dbias, dmean_scale.

    The plain form is differentiable. Its second derivative reaches v through the mean, which then
    has the gradient grad_mean.

    Args:
        saved: The result of `saved_map`.
    """
    plain = not traced and needs_differentiable_backward(g, grad_mean)
    is_mask = saved is not None and saved.dtype == torch.uint8
    supported = saved is None or is_mask or uses_kernels(saved, traced)
    if not plain and uses_kernels(g, traced) and supported:
        from .triton import agc as kernels

        dv, _, dbias, dscale = kernels.backward(
            g, saved, mean, None, bias, mean_scale, activation, traced=traced
        )
        return dv, dbias, dscale
    act = ACTIVATIONS[activation]
    if saved is not None and is_mask:
        saved = unpack_relu_mask(saved, g)
    elif saved is not None and act.needs == "input":
        saved = saved + over_maps(_shift(mean, bias, mean_scale), saved)
    h = act.backward(g, saved)  # type: ignore[arg-type]
    sum_h = map_sum(h)
    background = mean_scale * sum_h
    if grad_mean is not None:
        background = background - grad_mean
    dv = (h - over_maps(background / positions(h), h)).to(g.dtype)
    dbias = sum_h.sum(0).to(bias.dtype)
    dscale = -(mean * sum_h).sum(0).to(mean_scale.dtype)
    return dv, dbias, dscale


def _shift(mean: Tensor, bias: Tensor, mean_scale: Tensor) -> Tensor:
    """Return beta - lambda * m, (N, C): the number that a neuron adds to each map of v."""
    return torch.addcmul(bias, mean_scale, mean, value=-1)


def saved_map(activation: str, v: Tensor, y: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return the map that the backward needs: v, y, the ReLU mask or None."""
    output = y if mask is None else mask
    return {"nothing": None, "output": output, "input": v}[ACTIVATIONS[activation].needs]


class _CenterBiasAct(torch.autograd.Function):
    """Return y and the mean, which is an output only so that second derivatives reach it."""

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str, overwrite: bool
    ) -> tuple[Tensor, Tensor]:
        training = any(ctx.needs_input_grad)
        overwrite = overwrite and not (training and ACTIVATIONS[activation].needs == "input")
        out = v if overwrite else None
        y, mean, mask, _ = forward_function(v)(v, bias, mean_scale, activation, out, training)
        if overwrite:
            ctx.mark_dirty(v)
        ctx.save_for_backward(saved_map(activation, v, y, mask), bias, mean_scale, mean)
        ctx.activation = activation
        ctx.order, ctx.shape, ctx.dtype = memory_order(y), y.shape, y.dtype
        ctx.set_materialize_grads(False)  # a zero gradient of the mean would only cost time
        return y, mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, grad_mean = grads
        saved, bias, mean_scale, mean = ctx.saved_tensors
        g = mean.new_zeros(ctx.shape, dtype=ctx.dtype) if g is None else g
        g = like_layout(g, ctx.order)
        grads_in = backward(g, saved, bias, mean_scale, mean, ctx.activation, grad_mean)
        return *grads_in, None, None


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
    """

    geometry: Geometry
    activation: str
    consumer_ratio: float
    map_sums: Tensor | None


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
) -> Tensor:
    """Run gain_conv and center_bias_act one after the other."""
    v = gain_conv(x, weight, gain, *geometry)
    return center_bias_act(v, bias, mean_scale, activation, overwrite=True)


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
        scaled = scale_function(weight)(weight, gain, x.dtype)
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
        dv, dbias, dscale = backward(g, saved, bias, mean_scale, mean, ctx.activation, grad_mean)
        return *convolve_backward(ctx, dv, conv_saved), dbias, dscale, None


def convolve(
    ctx: Any, x: Tensor, weight: Tensor, gain: Tensor, scaled: Tensor, config: NeuronConfig
) -> tuple[Tensor, tuple[Tensor | None, ...], ConvOperands | None]:
    """Return v = conv(x, scaled), the tensors to save, and the operands if they give the mean."""
    stride, padding, dilation, groups = config.geometry
    ctx.geometry = (stride, padding, dilation, False, [0] * len(stride), groups)
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
    return conv_backward(dv, x, weight, gain, scaled, ctx.geometry, ctx.needs_input_grad[:3])
