"""Eq. 1 as an op of its own, for the layer that stands where BatchNorm stands.

    y = gamma * (z - lam * m) + beta                  m = mean of z over the map, (N, C)

With g the gradient of y, and all sums over positions p and samples s:

    dz = gamma * (g - lam * mean(g))       dbeta = sum g
    dgamma = sum g * (z - lam * m)         dlam = -gamma * sum_s m_s * sum_p g

It keeps z, as BatchNorm does. The neuron (center.py, made in the same way) need not.
"""

from typing import Any

import torch
from torch import Tensor

from . import reference
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
from .tracing import compiles_with_ops, wants_derivatives, wants_plain_ops


def agc(
    z: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean_scale: Tensor | None = None,
) -> Tensor:
    """AGC (automatic gain control), Eq. 1: gamma * (z - lambda * mean(z)) + beta.

    z is (N, C, *); weight (gamma), bias (beta) and mean_scale (lambda) are (C,), and stand for
    1, 0 and 1 where they are None. The mean runs over the positions * of each sample and filter,
    in fp32 for half types. The result has z's dtype and layout.

    >>> z = torch.tensor([[[1.0, 2.0, 6.0]]])
    >>> agc(z, weight=torch.tensor([2.0]), mean_scale=torch.tensor([1.0]))
    tensor([[[-4., -2.,  6.]]])
    """
    check_maps(z, weight=weight, bias=bias, mean_scale=mean_scale)
    gamma = z.new_ones(z.shape[1]) if weight is None else weight
    beta = z.new_zeros(z.shape[1]) if bias is None else bias
    lam = z.new_ones(z.shape[1]) if mean_scale is None else mean_scale
    if wants_plain_ops():
        return reference.agc(z, gamma, beta, lam)
    if torch.compiler.is_compiling():
        if not compiles_with_ops():
            return reference.agc(z, gamma, beta, lam)
        y, _ = torch.ops.deepcontrol.agc(z, gamma, beta, lam)
    else:
        y, _ = _AGC.apply(z, gamma, beta, lam)
    return y


def forward(
    z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor, traced: bool = False
) -> tuple[Tensor, Tensor]:
    """y and the means (N, C)."""
    if takes_kernels(z, traced):
        from .kernels import agc as kernels

        return kernels.forward(z, weight, bias, mean_scale, "none", traced=traced)
    mean = map_mean(z)
    y = torch.empty_like(z)
    # For fp32 and fp64 the centered map is written straight into y; half types round only once.
    exact = y.dtype == mean.dtype
    centered = torch.sub(z, over_maps(mean_scale * mean, z), out=y if exact else None)
    torch.addcmul(over_maps(bias, z), centered, over_maps(weight, z), out=y)
    return y, mean


def backward(
    g: Tensor,
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    mean: Tensor,
    grad_mean: Tensor | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dz, dweight, dbias, dmean_scale; the plain form is differentiable again: see center.py."""
    again = not traced and wants_derivatives(g, grad_mean)
    if not again and takes_kernels(g, traced) and takes_kernels(z, traced):
        from .kernels import agc as kernels

        dz, dweight, dbias, dscale = kernels.backward(
            g, z, mean, weight, bias, mean_scale, "none", traced=traced
        )
        assert dweight is not None
        return dz, dweight, dbias, dscale
    sum_g = map_sum(g)
    dz = (g - over_maps(mean_scale * sum_g / positions(z), g)) * over_maps(weight, g)
    if grad_mean is not None:
        dz = dz + over_maps(grad_mean / positions(z), g)
    centered = z - over_maps(mean_scale * mean, z)
    dweight = map_sum(g * centered).sum(0).to(weight.dtype)
    dbias = sum_g.sum(0).to(bias.dtype)
    dscale = (-weight * (mean * sum_g).sum(0)).to(mean_scale.dtype)
    return dz.to(z.dtype), dweight, dbias, dscale


class _AGC(torch.autograd.Function):
    """Returns y and the mean; the mean for second derivatives alone, which pass through it."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        y, mean = forward(z, weight, bias, mean_scale)
        ctx.save_for_backward(z, weight, bias, mean_scale, mean)
        ctx.order = memory_order(y)
        ctx.set_materialize_grads(False)  # a mean's gradient of zeros would cost a pass
        return y, mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, grad_mean = grads
        z, weight, bias, mean_scale, mean = ctx.saved_tensors
        g = torch.zeros_like(z) if g is None else like_layout(g, ctx.order)
        return backward(g, z, weight, bias, mean_scale, mean, grad_mean)
