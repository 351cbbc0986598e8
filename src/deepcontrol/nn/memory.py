"""Measure the saved tensors of a model: the memory that limits the batch size."""

from typing import Any

import torch
from torch import Tensor, nn


def saved_bytes(model: nn.Module, *inputs: Any, **keywords: Any) -> int:
    """Return the bytes that autograd saves for the backward of model(*inputs, **keywords).

    Parameters and buffers of the model are not counted. Each storage is counted once, even if
    several layers save it: an output that is also the next layer's input adds nothing. Meta tensors
    work too.

    Args:
        model: The model to run.
        *inputs: Its inputs.
        **keywords: Its keyword arguments.

    Returns:
        The number of bytes.

    >>> from deepcontrol import AGCConv2d
    >>> x = torch.randn(1, 3, 10, 10)
    >>> saved_bytes(AGCConv2d(3, 8, 3, activation="none"), x) == x.nbytes + 8 * 4  # plus 8 means
    True
    """
    own = {_storage(a) for a in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(a: Tensor) -> Tensor:
        if _storage(a) not in own:
            saved[_storage(a)] = a  # keeps the storage alive, so that no other one gets its address
        return a

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda a: a):
        model(*inputs, **keywords)
    return sum(a.untyped_storage().nbytes() for a in saved.values())


def _storage(a: Tensor) -> int:
    return a.untyped_storage()._cdata  # unlike data_ptr, distinct for meta tensors too
