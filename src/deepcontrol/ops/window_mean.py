"""The mean of a convolution's output, computed before the output is read.

    sum over the map of conv(x, V)[o] = sum over c, k of V[o, c, k] S[c, k]

S[c, k] is the sum of x over the positions that tap k of the kernel reads. For a 3x3 kernel on a map
padded by 1, it is the sum of the whole map less a row and a column at its borders. The kernel that
wrote x had all of x in registers, so it can store the sums of its maps. A neuron then reads the
output of its convolution once, to rewrite it, without a first read for the mean. `convert.fold`
does the same at inference, for every convolution and in plain PyTorch.

Map sums are stored in a table keyed by the tensor and its version, not passed between modules. A
hook or a module that changes a map on its way makes a new tensor or a new version, and the sums no
longer apply.

This pays off for large maps only, and only the kernels in eager mode (a captured step included)
use it. Plain PyTorch and compiled models read the maps.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .layout import map_strides

MIN_ELEMENTS = 24 << 20  # of a convolution's output: a smaller one is read from the L2 cache
HALF_TYPES = (torch.bfloat16, torch.float16)  # a TF32 convolution rounds x internally

_stored: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> (version, map sums)


class ConvOperands(NamedTuple):
    """The operands of a 3x3 convolution with padding 1, stride 1 and one group.

    Attributes:
        x: Input (N, C, H, W).
        filters: Filters (F, C, 3, 3), gain included.
        map_sums: Partial sums of the maps of x, (N, groups, parts, channels of a group), stored
            by the kernel that wrote x; or None.
    """

    x: Tensor
    filters: Tensor
    map_sums: Tensor | None


def derives_mean(v: Tensor, operands: ConvOperands | None) -> bool:
    """Return whether the mean of v is cheaper to derive from its operands than to read from v."""
    if operands is None or v.dtype not in HALF_TYPES or v.numel() < MIN_ELEMENTS:
        return False
    # Without stored sums, maps are worth reading if they are few, as those of an image are.
    has_sums = operands.map_sums is not None or 4 * operands.x.shape[1] <= v.shape[1]
    return has_sums and map_strides(operands.x) is not None


def wants_map_sums(y: Tensor, consumer_ratio: float) -> bool:
    """Return whether the kernel that writes y should store the sums of its maps.

    Args:
        consumer_ratio: Output elements per input element of the consumer of y; 0 if unknown.
    """
    large = consumer_ratio > 0 and consumer_ratio * y.numel() >= MIN_ELEMENTS
    return y.dtype in HALF_TYPES and large


def store_map_sums(y: Tensor, map_sums: Tensor | None) -> None:
    """Store the map sums of y for its consumer."""
    if map_sums is not None and not y.is_inference():  # inference tensors have no version
        _stored[y] = (y._version, map_sums)


def stored_map_sums(x: Tensor) -> Tensor | None:
    """Return the stored map sums of x, or None if there are none or x has changed."""
    entry = _stored.get(x) if len(_stored) else None
    return entry[1] if entry is not None and entry[0] == x._version else None
