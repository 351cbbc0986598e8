"""Centre, bias, activate: what is left of the neuron once its gain is in the weights.

    y = act(u)      u = v - lam * m + beta            m = mean of v over the map, (N, C)

With g the gradient of y, h = g * act'(u), and sums over positions p and samples s:

    dv = h - lam * mean(h)       dbeta = sum h       dlam = -sum_s m_s * sum_p h

For ReLU and leaky ReLU act' is read off y, the next convolution's input, which is kept anyway.
So a neuron keeps N x C means and no map of its own: the memory of no normalisation.

Device kernels join with `@_center_bias_act.register_kernel("cuda")`; without one, this runs.
"""

import torch
from torch import Tensor

from . import reference
from .activation import ACTIVATIONS, get_activation
from .maps import (
    accumulate_dtype,
    check_maps,
    like_layout,
    map_mean,
    map_sum,
    memory_order,
    over_maps,
    positions,
)
from .tracing import wants_plain_ops


def center_bias_act(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str = "relu"
) -> Tensor:
    """act(v - lambda * mean(v) + beta) for maps v (N, C, *); bias and mean_scale are (C,)."""
    get_activation(activation)
    check_maps(v, bias=bias, mean_scale=mean_scale)
    if wants_plain_ops():
        return reference.center_bias_act(v, bias, mean_scale, activation)
    y, _ = _center_bias_act(v, bias, mean_scale, activation)
    return y


def _shift(mean: Tensor, bias: Tensor, mean_scale: Tensor) -> Tensor:
    """beta - lam * m, (N, C): all that a neuron adds to the convolution's output."""
    return torch.addcmul(bias, mean_scale, mean, value=-1)


@torch.library.custom_op("deepcontrol::center_bias_act", mutates_args=())
def _center_bias_act(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    mean = map_mean(v)
    y = torch.empty_like(v)
    torch.add(v, over_maps(_shift(mean, bias, mean_scale), v), out=y)
    return ACTIVATIONS[activation].apply_(y), mean


@_center_bias_act.register_fake
def _(v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    mean = v.new_empty(v.shape[:2], dtype=accumulate_dtype(v.dtype))
    return torch.empty_like(v), mean


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    v, bias, mean_scale, activation = inputs
    y, mean = output
    ctx.activation = ACTIVATIONS[activation]
    kept = {"nothing": None, "output": y, "input": v}[ctx.activation.needs]
    ctx.save_for_backward(kept, bias, mean_scale, mean)
    ctx.order, ctx.shape, ctx.dtype = memory_order(y), y.shape, y.dtype
    ctx.set_materialize_grads(False)  # a mean's gradient of zeros would only cost time


def _backward(ctx, grad, grad_mean):  # type: ignore[no-untyped-def]
    # Plain differentiable torch, so that a second derivative is this function's own autograd.
    # The mean is an output for that reason alone: a second derivative reaches v through it, and
    # at first order grad_mean is None.
    kept, bias, mean_scale, mean = ctx.saved_tensors
    needs_v, needs_bias, needs_scale, _ = ctx.needs_input_grad
    if ctx.activation.needs == "input":
        kept = kept + over_maps(_shift(mean, bias, mean_scale), kept)
    g = mean.new_zeros(ctx.shape, dtype=ctx.dtype) if grad is None else grad
    g = like_layout(g, ctx.order)
    h = ctx.activation.backward(g, kept)
    sum_h = map_sum(h)
    dv = dbias = dscale = None
    if needs_v:
        background = mean_scale * sum_h
        if grad_mean is not None:
            background = background - grad_mean
        dv = (h - over_maps(background / positions(h), h)).to(ctx.dtype)
    if needs_bias:
        dbias = sum_h.sum(0).to(bias.dtype)
    if needs_scale:
        dscale = -(mean * sum_h).sum(0).to(mean_scale.dtype)
    return dv, dbias, dscale, None


_center_bias_act.register_autograd(_backward, setup_context=_setup_context)
