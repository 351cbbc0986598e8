"""The mean of a convolution's output, known before the output is read.

    sum of conv(x, V)[o] over the map = sum over c, k of V[o, c, k] S[c, k]

S[c, k] is the sum of x over all that tap k of the kernel sees: of a 3x3 kernel on a padded map, the
sum of the whole map less a row and a column at its borders. The kernel that wrote x has had all of
it in its registers, so it can leave the whole map's sums. Then a neuron reads its convolution's
output once, to rewrite it, where it would read it a first time for the mean. For every convolution
and in plain torch it is in convert/window_sums.py, for inference.

The sums are left with the tensor itself, in a table, and not as an argument of modules: whoever
changes a map on its way from neuron to neuron, a hook or another module, makes another tensor of it
or another version, to which the sums do not belong.

That is worth it for large maps alone, and it is for the kernels in eager mode, which a captured
step is too: plain torch takes the mean, and so do compiled models.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .backend import map_strides

WORTH = 24 << 20  # elements of a convolution's output: below, the L2 cache has them: a cheap read
HALF_TYPES = (torch.bfloat16, torch.float16)  # a TF32 convolution rounds x on its own

_left: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # a tensor: its version and its sums


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


def leaves_totals(y: Tensor, feeds: float) -> bool:
    """Whether whoever writes y should leave its maps' sums.

    feeds: how many elements the neuron that reads y writes for each that it reads.
    """
    return y.dtype in HALF_TYPES and feeds > 0 and is_worth(feeds * y.numel())


def is_worth(elements: float) -> bool:
    """Whether a convolution's output of so many is better not read for its mean."""
    return elements >= WORTH


def leave_totals(y: Tensor, totals: Tensor | None) -> None:
    """For whoever reads y next."""
    if totals is not None and not y.is_inference():  # which has no version
        _left[y] = (y._version, totals)


def totals_left(x: Tensor) -> Tensor | None:
    """The sums that were left with x, if it is still as it was then."""
    entry = _left.get(x) if len(_left) else None
    return entry[1] if entry is not None and entry[0] == x._version else None
