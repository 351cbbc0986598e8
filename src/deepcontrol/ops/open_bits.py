"""Where an activation was open: a bit for each element of a map, for the kernels' backward.

All that ReLU's backward needs of the output y is where it is above 0. Kernels would read g and y
twice, once for the mean and once to rewrite: with what they write, five passes over maps. With y's
signs in bits, a sixteenth of a bf16 map, these are three and an eighth. So the forward kernel
leaves the bits, and they are kept beside y, which is the next convolution's and stays in any case.

Bit k of byte b is the element at offset 8 b + k in memory, whatever the layout.
"""

from typing import Literal

import torch
from torch import Tensor

from .activation import ACTIVATIONS
from .backend import map_strides
from .maps import like_layout, memory_order, positions

Packing = Literal["channels", "positions", "none"]


def packing(maps: Tensor) -> Packing:
    """Along which dimension of dense maps (N, C, *) eight elements share a byte, if they can.

    >>> packing(torch.empty(2, 16, 3, 3).to(memory_format=torch.channels_last))
    'channels'
    >>> packing(torch.empty(2, 16, 3, 3))
    'none'
    """
    strides = map_strides(maps)
    if strides is not None and strides[1] == 1 and maps.shape[1] % 8 == 0:
        return "channels"
    if strides is not None and strides[2] == 1 and positions(maps) % 8 == 0:
        return "positions"
    return "none"


def empty_bits(v: Tensor, activation: str) -> Tensor | None:
    """Room for the bits of maps v, or None where there are none to be had."""
    if ACTIVATIONS[activation].needs != "output" or packing(v) == "none":
        return None
    return torch.empty(v.numel() // 8, dtype=torch.uint8, device=v.device)


def unpack(bits: Tensor, like: Tensor) -> Tensor:
    """1 where open and 0 elsewhere, for dense maps laid out as `like`."""
    each = bits[:, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    like = like_layout(like, memory_order(like))
    return each.reshape(-1).as_strided(like.shape, like.stride()).to(like.dtype)
