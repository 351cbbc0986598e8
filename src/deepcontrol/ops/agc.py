"""Eq. 1 as a separate op, for the layer that replaces BatchNorm.

    y = gamma * (z - lambda * m) + beta               m = mean of z over the map, (N, C)

With g the gradient of y, and sums over positions p and samples s:

    dz = gamma * (g - lambda * mean(g))    dbeta = sum g
    dgamma = sum g * (z - lambda * m)      dlambda = -gamma * sum_s m_s * sum_p g

The op saves z for backward, as BatchNorm does. The fused neuron (neuron.py) does not.
"""

from typing import Any

import torch
from torch import Tensor

from . import reference
from .dispatch import (
    compiles_with_ops,
    needs_differentiable_backward,
    needs_plain_ops,
    uses_kernels,
)
from .layout import (
    accumulate_dtype,
    check_maps,
    like_layout,
    map_mean,
    map_sum,
    memory_order,
    over_maps,
    positions,
)


def agc(
    z: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean_scale: Tensor | None = None,
) -> Tensor:
    """Apply AGC (automatic gain control), Eq. 1 of the paper.

        y = gamma * (z - lambda * mean(z)) + beta

    The mean runs over the positions * of each sample and channel, in fp32 for half types.

    Args:
        z: Feature maps (N, C, *).
        weight: gamma, (C,); None means 1.
        bias: beta, (C,); None means 0.
        mean_scale: lambda, (C,); None means 1.

    Returns:
        y, with the shape, dtype and memory layout of z.

    >>> z = torch.tensor([[[1.0, 2.0, 6.0]]])
    >>> agc(z, weight=torch.tensor([2.0]), mean_scale=torch.tensor([1.0]))
    tensor([[[-4., -2.,  6.]]])
    """
    check_maps(z, weight=weight, bias=bias, mean_scale=mean_scale)
    gamma = z.new_ones(z.shape[1]) if weight is None else weight
    beta = z.new_zeros(z.shape[1]) if bias is None else bias
    lam = z.new_ones(z.shape[1]) if mean_scale is None else mean_scale
    if needs_plain_ops():
        return reference.agc(z, gamma, beta, lam)
    if torch.compiler.is_compiling():
        if not compiles_with_ops():
            return reference.agc(z, gamma, beta, lam)
        y, _ = torch.ops.deepcontrol.agc(z, gamma, beta, lam)
    else:
        y, _ = _AGC.apply(z, gamma, beta, lam)
    return y


def agc_given_mean(
    z: Tensor, mean: Tensor, weight: Tensor | None, bias: Tensor | None, mean_scale: Tensor | None
) -> Tensor:
    """Apply Eq. 1 with a constant mean (N, C): gamma * (z - lambda * m) + beta.

    For inference on tiles that share the mean of their image. None means 1, 0 and 1.
    """
    background = mean if mean_scale is None else mean_scale * mean
    y = z.to(accumulate_dtype(z.dtype)) - over_maps(background, z)
    if weight is not None:
        y = over_maps(weight, z) * y
    if bias is not None:
        y = y + over_maps(bias, z)
    return y.to(z.dtype)


def forward(
    z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor, traced: bool = False
) -> tuple[Tensor, Tensor]:
    """Return y and the means (N, C)."""
    if uses_kernels(z, traced):
        from .triton import agc as kernels

        return kernels.forward(z, bias, mean_scale, "none", gamma=weight, traced=traced)[:2]
    mean = map_mean(z)
    y = torch.empty_like(z)
    # In fp32 and fp64 the centered map is written straight into y. Half types round only once.
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
    """Return dz, dweight, dbias, dmean_scale.

    The plain form is differentiable. Its second derivative reaches z through the mean, which then
    has the gradient grad_mean.
    """
    plain = not traced and needs_differentiable_backward(g, grad_mean)
    if not plain and uses_kernels(g, traced) and uses_kernels(z, traced):
        from .triton import agc as kernels

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
    """Return y and the mean, which is an output only so that second derivatives reach it."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        y, mean = forward(z, weight, bias, mean_scale)
        ctx.save_for_backward(z, weight, bias, mean_scale, mean)
        ctx.order = memory_order(y)
        ctx.set_materialize_grads(False)  # a zero gradient of the mean would cost a pass
        return y, mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, grad_mean = grads
        z, weight, bias, mean_scale, mean = ctx.saved_tensors
        g = torch.zeros_like(z) if g is None else like_layout(g, ctx.order)
        return backward(g, z, weight, bias, mean_scale, mean, grad_mean)
