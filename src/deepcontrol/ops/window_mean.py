"""The mean of a convolution's output, known before the output is read.

    sum of conv(x, V)[o] over the map = sum over c, k of V[o, c, k] S[c, k]

S[c, k] is the sum of x over all that tap k of the kernel sees: of a 3x3 kernel on a padded map, the
sum of the whole map less a row and a column at its borders. The kernel that wrote x has had all of
it in its registers, so it can leave the whole map's sums. Then a neuron reads its convolution's
output once, to rewrite it, where it would read it a first time for the mean.

That is worth it for large maps alone, and it is for the kernels: plain torch takes the mean.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .backend import map_strides

WORTH = 24 << 20  # elements of a convolution's output: below, the L2 cache has them: a cheap read
HALF_TYPES = (torch.bfloat16, torch.float16)  # a TF32 convolution rounds x on its own


class Origin(NamedTuple):
    """What a convolution's output was made of; the convolution is 3x3, padded by 1, of one group.

    totals: sums over the maps of x in parts, (N, groups, parts, channels of a group), as the kernel
    that wrote x has left them; or None.
    """

    x: Tensor
    filters: Tensor
    totals: Tensor | None


def serves(v: Tensor, origin: Origin | None) -> bool:
    """Whether the mean of v is cheaper to have from where it comes from."""
    if origin is None or v.dtype not in HALF_TYPES or not is_worth(v.numel()):
        return False
    # Maps whose sums nobody has left are worth a read where they are few: an image's.
    has_sums = origin.totals is not None or 4 * origin.x.shape[1] <= v.shape[1]
    return has_sums and map_strides(origin.x) is not None


def is_worth(elements: int) -> bool:
    """Whether a convolution's output of so many is better not read for its mean."""
    return elements >= max(WORTH, 1)


def leaves_totals(y: Tensor) -> bool:
    """Whether maps like y can be left with their sums."""
    return y.dtype in HALF_TYPES
