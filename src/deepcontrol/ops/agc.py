"""Eq. 1 as an op of its own, for the layer that stands where BatchNorm stands.

    y = gamma * (z - lam * m) + beta                  m = mean of z over the map, (N, C)

With g the gradient of y, and all sums over positions p and samples s:

    dz = gamma * (g - lam * mean(g))       dbeta = sum g
    dgamma = sum g * (z - lam * m)         dlam = -gamma * sum_s m_s * sum_p g

It keeps z, as BatchNorm does. The neuron (center.py) is the one that need not.

Device kernels join with `@_agc.register_kernel("cuda")`; without one, this runs.
"""

import torch
from torch import Tensor

from . import reference
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
    y, _ = _agc(z, gamma, beta, lam)
    return y


@torch.library.custom_op("deepcontrol::agc", mutates_args=())
def _agc(z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor) -> tuple[Tensor, Tensor]:
    mean = map_mean(z)
    y = torch.empty_like(z)
    # For fp32 and fp64 the centred map is written straight into y; half types round only once.
    exact = y.dtype == mean.dtype
    centred = torch.sub(z, over_maps(mean_scale * mean, z), out=y if exact else None)
    torch.addcmul(over_maps(bias, z), centred, over_maps(weight, z), out=y)
    return y, mean


@_agc.register_fake
def _(z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor) -> tuple[Tensor, Tensor]:
    mean = z.new_empty(z.shape[:2], dtype=accumulate_dtype(z.dtype))
    return torch.empty_like(z), mean


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    z, weight, bias, mean_scale = inputs
    y, mean = output
    ctx.save_for_backward(z, weight, mean_scale, mean)
    ctx.order = memory_order(y)
    ctx.bias_dtype = bias.dtype
    ctx.set_materialize_grads(False)  # a mean's gradient of zeros would cost a pass


def _backward(ctx, grad, grad_mean):  # type: ignore[no-untyped-def]
    # Plain differentiable torch, so that a second derivative is this function's own autograd.
    # The mean is an output for that reason alone: a second derivative reaches z through it, and
    # at first order grad_mean is None.
    z, weight, mean_scale, mean = ctx.saved_tensors
    needs_z, needs_weight, needs_bias, needs_scale = ctx.needs_input_grad
    dz = dweight = dbias = dscale = None
    g = torch.zeros_like(z) if grad is None else like_layout(grad, ctx.order)
    sum_g = map_sum(g)
    if needs_z:
        dz = (g - over_maps(mean_scale * sum_g / positions(z), g)) * over_maps(weight, g)
        if grad_mean is not None:
            dz = dz + over_maps(grad_mean / positions(z), g)
        dz = dz.to(z.dtype)
    if needs_weight:
        centred = z - over_maps(mean_scale * mean, z)
        dweight = map_sum(g * centred).sum(0).to(weight.dtype)
    if needs_bias:
        dbias = sum_g.sum(0).to(ctx.bias_dtype)
    if needs_scale:
        dscale = (-weight * (mean * sum_g).sum(0)).to(mean_scale.dtype)
    return dz, dweight, dbias, dscale


_agc.register_autograd(_backward, setup_context=_setup_context)
