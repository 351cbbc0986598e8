"""Eq. 1 of the paper in plain torch: the specification that every fast path is held to.

    y = gamma * (z - lam * mean(z)) + beta            mean over the map, per sample and filter

Nothing here is clever, and nothing here is registered anywhere: autograd differentiates it to any
order, torch.export traces it, and in fp64 it is the oracle of the tests.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .activation import get_activation
from .maps import accumulate_dtype, map_mean, over_maps


def agc(z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor) -> Tensor:
    """Eq. 1 on maps z (N, C, *); weight (gamma), bias (beta) and mean_scale (lambda) are (C,)."""
    gamma, beta, lam = weight, bias, mean_scale
    centered = z.to(accumulate_dtype(z.dtype)) - over_maps(lam * map_mean(z), z)
    return (over_maps(gamma, z) * centered + over_maps(beta, z)).to(z.dtype)


def center_bias_act(v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str) -> Tensor:
    """act(v - lam * mean(v) + beta): Eq. 1 with the gain in the weights, v = conv(x, gamma W)."""
    beta, lam = bias, mean_scale
    centered = v.to(accumulate_dtype(v.dtype)) - over_maps(lam * map_mean(v), v)
    return get_activation(activation).apply(centered + over_maps(beta, v)).to(v.dtype)


def gain_conv(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """conv(x, gamma W): a convolution of 1 to 3 dimensions whose filters carry their gain."""
    return conv(x, gained(weight, gain, x.dtype), stride, padding, dilation, groups)


def conv(
    x: Tensor,
    filters: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """torch's convolution of 1 to 3 dimensions, without a bias."""
    none = [0] * len(stride)
    return torch.convolution(x, filters, None, stride, padding, dilation, False, none, groups)


def gained(weight: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    """gamma W, rounded once to the dtype that the convolution runs in."""
    return (weight * gain.reshape(-1, *(1,) * (weight.dim() - 1))).to(dtype)
