"""Eq. 1 with a mean that comes from elsewhere: from all tiles of an image, where z is one of them.

The mean (N, C) is a constant here, in the accumulation dtype. It is an inference op in plain torch.
"""

from torch import Tensor

from .activation import get_activation
from .maps import accumulate_dtype, over_maps


def agc_given_mean(
    z: Tensor, mean: Tensor, weight: Tensor | None, bias: Tensor | None, mean_scale: Tensor | None
) -> Tensor:
    """gamma * (z - lambda * m) + beta; a parameter that is None stands for 1, 0 and 1."""
    background = mean if mean_scale is None else mean_scale * mean
    y = z.to(accumulate_dtype(z.dtype)) - over_maps(background, z)
    if weight is not None:
        y = over_maps(weight, z) * y
    if bias is not None:
        y = y + over_maps(bias, z)
    return y.to(z.dtype)


def center_bias_act_given_mean(
    v: Tensor, mean: Tensor, bias: Tensor, mean_scale: Tensor, activation: str
) -> Tensor:
    """act(v - lambda * m + beta), written over v."""
    v.add_(over_maps(bias - mean_scale * mean, v))
    return get_activation(activation).apply_(v)
