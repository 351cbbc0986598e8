"""Center, bias, activate: what is left of the neuron once its gain is in the weights.

    y = act(u)      u = v - lam * m + beta            m = mean of v over the map, (N, C)

With g the gradient of y, h = g * act'(u), and sums over positions p and samples s:

    dv = h - lam * mean(h)       dbeta = sum h       dlam = -sum_s m_s * sum_p h

For ReLU and leaky ReLU act' is read off y, the next convolution's input, which is kept anyway.
So a neuron keeps N x C means and no map of its own: the memory of no normalization. The kernels
keep y's signs besides, a bit each: see open_bits.py.

Two ways lead to the same arithmetic: an autograd.Function, which costs eager mode the least time in
Python and can write over v, and an op that torch.compile sees through (kernels/agc_ops.py).
"""

from typing import Any

import torch
from torch import Tensor

from . import reference
from .activation import ACTIVATIONS, get_activation
from .backend import takes_kernels
from .maps import (
    check_maps,
    like_layout,
    map_mean,
    map_sum,
    memory_order,
    over_maps,
    positions,
)
from .open_bits import empty_bits, unpack
from .tracing import compiles_with_ops, wants_derivatives, wants_plain_ops
from .window_mean import Origin, leaves_totals


def center_bias_act(
    v: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    activation: str = "relu",
    *,
    overwrite: bool = False,
) -> Tensor:
    """act(v - lambda * mean(v) + beta) for maps v (N, C, *); bias and mean_scale are (C,).

    overwrite: nobody needs v any more, so the result may take its memory. It does in eager mode,
    unless the backward needs v (SiLU, GELU).
    """
    get_activation(activation)
    check_maps(v, bias=bias, mean_scale=mean_scale)
    if wants_plain_ops() or (torch.compiler.is_compiling() and not compiles_with_ops()):
        return reference.center_bias_act(v, bias, mean_scale, activation)
    if torch.compiler.is_compiling():
        training = torch.is_grad_enabled()
        y, *_ = torch.ops.deepcontrol.center_bias_act(v, bias, mean_scale, activation, training)
    else:
        y, _ = _CenterBiasAct.apply(v, bias, mean_scale, activation, overwrite)
    return y


def forward(
    v: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    activation: str,
    y: Tensor | None,
    training: bool = False,
    feeds: float = 0.0,
    origin: Origin | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """y, the means (N, C) and, where kernels make them, what they leave: bits and totals.

    y is written where it is given, which may be v. The bits of open_bits.py are for training, the
    totals for whom the neuron `feeds`: window_mean.py.
    """
    if takes_kernels(v, traced):
        from .kernels import agc as kernels

        bits = empty_bits(v, activation) if training else None
        totals = kernels.empty_totals(v) if leaves_totals(v, feeds) else None
        y, mean = kernels.forward(
            v, None, bias, mean_scale, activation, y, bits, totals, origin, traced=traced
        )
        return y, mean, bits, totals
    mean = map_mean(v)
    y = torch.empty_like(v) if y is None else y
    torch.add(v, over_maps(_shift(mean, bias, mean_scale), v), out=y)
    return ACTIVATIONS[activation].apply_(y), mean, None, None


def backward(
    g: Tensor,
    kept: Tensor | None,
    bias: Tensor,
    mean_scale: Tensor,
    mean: Tensor,
    activation: str,
    grad_mean: Tensor | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dv, dbias, dmean_scale; `kept` is what kept() chose.

    The plain form is differentiable: a second derivative is its own autograd. That one reaches v
    through the mean, which has a gradient then, grad_mean.
    """
    again = not traced and wants_derivatives(g, grad_mean)
    bits = kept is not None and kept.dtype == torch.uint8
    takes = kept is None or bits or takes_kernels(kept, traced)
    if not again and takes_kernels(g, traced) and takes:
        from .kernels import agc as kernels

        dv, _, dbias, dscale = kernels.backward(
            g, kept, mean, None, bias, mean_scale, activation, traced=traced
        )
        return dv, dbias, dscale
    act = ACTIVATIONS[activation]
    if kept is not None and bits:
        kept = unpack(kept, g)
    elif kept is not None and act.needs == "input":
        kept = kept + over_maps(_shift(mean, bias, mean_scale), kept)
    h = act.backward(g, kept)  # type: ignore[arg-type]
    sum_h = map_sum(h)
    background = mean_scale * sum_h
    if grad_mean is not None:
        background = background - grad_mean
    dv = (h - over_maps(background / positions(h), h)).to(g.dtype)
    dbias = sum_h.sum(0).to(bias.dtype)
    dscale = -(mean * sum_h).sum(0).to(mean_scale.dtype)
    return dv, dbias, dscale


def _shift(mean: Tensor, bias: Tensor, mean_scale: Tensor) -> Tensor:
    """beta - lam * m, (N, C): all that a neuron adds to the convolution's output."""
    return torch.addcmul(bias, mean_scale, mean, value=-1)


def kept(activation: str, v: Tensor, y: Tensor, bits: Tensor | None) -> Tensor | None:
    """What the backward needs of the maps."""
    output = y if bits is None else bits
    return {"nothing": None, "output": output, "input": v}[ACTIVATIONS[activation].needs]


class _CenterBiasAct(torch.autograd.Function):
    """Returns y and the mean; the mean for second derivatives alone, which pass through it."""

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str, overwrite: bool
    ) -> tuple[Tensor, Tensor]:
        training = any(ctx.needs_input_grad)
        overwrite = overwrite and not (training and ACTIVATIONS[activation].needs == "input")
        out = v if overwrite else None
        y, mean, bits, _ = forward(v, bias, mean_scale, activation, out, training)
        if overwrite:
            ctx.mark_dirty(v)
        ctx.save_for_backward(kept(activation, v, y, bits), bias, mean_scale, mean)
        ctx.activation = activation
        ctx.order, ctx.shape, ctx.dtype = memory_order(y), y.shape, y.dtype
        ctx.set_materialize_grads(False)  # a mean's gradient of zeros would only cost time
        return y, mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, grad_mean = grads
        of_maps, bias, mean_scale, mean = ctx.saved_tensors
        g = mean.new_zeros(ctx.shape, dtype=ctx.dtype) if g is None else g
        g = like_layout(g, ctx.order)
        of = (g, of_maps, bias, mean_scale, mean, ctx.activation, grad_mean)
        return *backward(*of), None, None
