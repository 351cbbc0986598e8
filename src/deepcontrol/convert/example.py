"""What maps a model's norms meet, seen by running it on an example."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.maps import positions


def maps_met(
    model: nn.Module, norms: Iterable[nn.Module], example: Any
) -> dict[nn.Module, tuple[int, int]]:
    """(dimensions, positions) of the largest map that each norm meets; without those not reached.

    example is what the model is called with: a tensor, a tuple of arguments, or a dict of keyword
    arguments. The model runs once, in eval mode and without gradients: nothing of it changes.
    """
    met: dict[nn.Module, tuple[int, int]] = {}

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        met[module] = max(met.get(module, (0, 0)), (x.dim() - 2, positions(x)))

    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    training = [module for module in model.modules() if module.training]
    args, kwargs = _arguments(example)
    try:
        model.eval()
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    return met


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, dict):
        return (), example
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})
