"""How many bytes a model keeps for its backward: the memory that decides the largest batch."""

from typing import Any

import torch
from torch import Tensor, nn


def saved_bytes(model: nn.Module, *inputs: Any) -> int:
    """Bytes that autograd keeps between model(*inputs) and its backward, the model's own apart.

    Each storage counts once, however many layers keep it: a layer's output that is also the next
    layer's input costs nothing more.

    >>> from deepcontrol import AGCConv2d
    >>> x = torch.randn(1, 3, 10, 10)
    >>> saved_bytes(AGCConv2d(3, 8, 3, activation="none"), x) == x.nbytes + 8 * 4  # and 8 means
    True
    """
    own = {_storage(a) for a in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(a: Tensor) -> Tensor:
        if _storage(a) not in own:
            saved[_storage(a)] = a  # kept alive here, so that no storage takes another's place
        return a

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda a: a):
        model(*inputs)
    return sum(a.untyped_storage().nbytes() for a in saved.values())


def _storage(a: Tensor) -> int:
    return a.untyped_storage()._cdata  # unlike data_ptr, also told apart on meta
