"""Center, bias, activate and pool 2x2 in one: the end of an encoder's stage.

    y = act(v - lam * m + beta)      pooled, index = max_pool2x2(y)      m = mean of v over the map

Nobody but the pooling reads y. What its backward needs of y is where ReLU was open at the maxima,
and that the pooled map says: with g the gradient of `pooled` and h = g * act'(pooled),

    dv = place(h, index) - lam * sum(h) / P       dbeta = sum h       dlam = -sum_s m_s * sum_p h

over the P positions of v. So the whole map y is neither written nor kept: the stage keeps a quarter
of it, and a byte for each window.
"""

from typing import Any

import torch
from torch import Tensor

from . import reference
from .activation import ACTIVATIONS, get_activation
from .backend import takes_kernels
from .center import center_bias_act, forward
from .maps import check_maps, map_sum, over_maps, positions
from .pool import is_channels_last, max_pool2x2, place, run_pool
from .pool_plain import laid_out
from .pool_plain import pool as plain_pool
from .tracing import compiles_with_ops, wants_derivatives, wants_plain_ops
from .window_mean import Origin, leaves_totals


def center_bias_act_pool(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str = "relu"
) -> tuple[Tensor, Tensor]:
    """max_pool2x2(center_bias_act(v, ...)): pooled maps and their index of one byte a window.

    For relu, leaky_relu and none. SiLU and GELU need their input for the backward, so for them it
    is the two ops in turn.
    """
    act = get_activation(activation)
    check_maps(v, bias=bias, mean_scale=mean_scale)
    if act.needs == "input":
        return max_pool2x2(center_bias_act(v, bias, mean_scale, activation, overwrite=True))
    check_windows(v)
    if wants_plain_ops() or (torch.compiler.is_compiling() and not compiles_with_ops()):
        return plain_pool(reference.center_bias_act(v, bias, mean_scale, activation))
    if torch.compiler.is_compiling():
        pooled, index, _ = torch.ops.deepcontrol.center_bias_act_pool(
            v, bias, mean_scale, activation
        )
    else:
        pooled, index, _ = _CenterBiasActPool.apply(v, bias, mean_scale, activation)
    return pooled, index


def check_windows(v: Tensor) -> None:
    if v.dim() != 4 or min(v.shape[2:]) < 2:
        raise ValueError(f"expected maps (N, C, H, W) of at least 2x2, got {tuple(v.shape)}")


def forward_pool(
    v: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    activation: str,
    feeds: float = 0.0,
    origin: Origin | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """pooled, index, the means (N, C) and, where kernels leave them, the pooled maps' totals."""
    if takes_kernels(v, traced):
        from .kernels import agc_pool as kernels

        totals = kernels.empty_totals(v) if leaves_totals(v, feeds / 4) else None
        pooled, index, mean = kernels.forward(
            v, bias, mean_scale, activation, totals, origin, traced=traced
        )
        return pooled, index, mean, totals
    y, mean, *_ = forward(v, bias, mean_scale, activation, None)
    last = is_channels_last(v)
    if not traced:
        return *run_pool(y, last), mean, None
    pooled, index = plain_pool(y)
    return laid_out(pooled, last), laid_out(index, last), mean, None


def backward_pool(
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
    """dv, dbias, dmean_scale; the plain form is differentiable again: see center.py."""
    again = not traced and wants_derivatives(g, grad_mean)
    if not again and takes_kernels(g, traced):
        from .kernels import agc_pool as kernels

        return kernels.backward(
            g, pooled, index, bias, mean_scale, mean, size, activation, channels_last, traced=traced
        )
    h = ACTIVATIONS[activation].backward(g, pooled)  # type: ignore[arg-type]
    sum_h = map_sum(h)
    background = mean_scale * sum_h
    if grad_mean is not None:
        background = background - grad_mean
    wide = place(h, index, size, channels_last)
    dv = (wide - over_maps(background / positions(wide), wide)).to(g.dtype)
    dbias = sum_h.sum(0).to(bias.dtype)
    dscale = -(mean * sum_h).sum(0).to(mean_scale.dtype)
    return dv, dbias, dscale


def kept_of_pool(activation: str, pooled: Tensor) -> Tensor | None:
    return pooled if ACTIVATIONS[activation].needs == "output" else None


class _CenterBiasActPool(torch.autograd.Function):
    """Returns pooled, index and the mean; the mean for second derivatives alone."""

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        pooled, index, mean, _ = forward_pool(v, bias, mean_scale, activation)
        ctx.save_for_backward(kept_of_pool(activation, pooled), index, bias, mean_scale, mean)
        ctx.mark_non_differentiable(index)
        ctx.activation, ctx.size, ctx.last = activation, tuple(v.shape[2:]), is_channels_last(v)
        ctx.set_materialize_grads(False)
        return pooled, index, mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, _, grad_mean = grads
        kept, index, bias, mean_scale, mean = ctx.saved_tensors
        if g is None:
            g = bias.new_zeros(index.shape) if kept is None else torch.zeros_like(kept)
        of = (g, kept, index, bias, mean_scale, mean, ctx.size, ctx.activation, ctx.last, grad_mean)
        return *backward_pool(*of), None
