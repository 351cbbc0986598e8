"""Measure the saved tensors of a model: the memory that limits the batch size."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


def saved_bytes(model: nn.Module, *inputs: Any, **keywords: Any) -> int:
    """Return the bytes autograd saves for backward of model(*inputs, **keywords).

    Parameters and buffers of the model are not counted. Each storage is counted once, even if
    several layers save it: an output that is also the next layer's input adds nothing. Meta tensors
    work too.

    Args:
        model: The model to run.
        *inputs: Inputs of the model.
        **keywords: Keyword arguments of the model.

    Returns:
        The number of bytes.

    >>> from deepcontrol import AGCConv2d
    >>> x = torch.randn(1, 3, 10, 10)
    >>> saved_bytes(AGCConv2d(3, 8, 3, activation="none"), x) == x.nbytes + 8 * 4  # plus 8 means
    True
    """
    return saved_bytes_by_layer(model, (), *inputs, **keywords)[0]


def saved_bytes_by_layer(
    model: nn.Module, layers: Iterable[nn.Module], *inputs: Any, **keywords: Any
) -> tuple[int, dict[nn.Module, int]]:
    """Return the saved bytes of a model, and the bytes that only each layer saves.

    A tensor that another layer saves too would be kept without the layer, so it does not count for
    it. Neither does the input of a convolution, which every convolution saves.

    Args:
        model: The model to run.
        layers: Layers of the model.
        *inputs: Inputs of the model.
        **keywords: Keyword arguments of the model.

    Returns:
        The bytes of the model as in saved_bytes, and the bytes of each layer.
    """
    own = {_storage(a) for a in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}
    owners: dict[int, set[nn.Module | None]] = {}
    running: list[nn.Module | None] = [None]
    given: set[int] = set()  # inputs of convolutions

    def pack(a: Tensor) -> Tensor:
        storage = _storage(a)
        if storage not in own:
            saved[storage] = a  # keeps the storage alive, so that no other one gets its address
            owners.setdefault(storage, set()).add(running[-1])
        return a

    def enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(layer)
        x = args[0] if args else kwargs.get("input")
        if isinstance(layer, _ConvNd) and isinstance(x, Tensor):
            given.add(_storage(x))

    def leave(*_: Any) -> None:
        running.pop()

    hooks = []
    for layer in set(layers):
        hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(layer.register_forward_hook(leave, always_call=True))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda a: a):
            model(*inputs, **keywords)
    finally:
        for hook in hooks:
            hook.remove()
    sizes = {storage: a.untyped_storage().nbytes() for storage, a in saved.items()}
    alone = {
        layer: sum(sizes[s] for s, them in owners.items() if them == {layer} and s not in given)
        for layer in set(layers)
    }
    return sum(sizes.values()), alone


def _storage(a: Tensor) -> int:
    return a.untyped_storage()._cdata  # unlike data_ptr, distinct for meta tensors too
