"""What maps a model's norms meet, and who calls its modules, seen by running it on an example."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..ops.layout import positions


def maps_met(
    model: nn.Module, norms: Iterable[nn.Module], example: Any
) -> dict[nn.Module, tuple[int, int]]:
    """(dimensions, positions) of the largest map that each norm meets, of those reached."""
    met: dict[nn.Module, tuple[int, int]] = {}

    def look(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = args[0] if args else kwargs["input"]
        met[module] = max(met.get(module, (0, 0)), (x.dim() - 2, positions(x)))

    _run(model, example, [n.register_forward_pre_hook(look, with_kwargs=True) for n in norms])
    return met


def called_only_within(
    model: nn.Module, parts: Mapping[nn.Module, nn.Module], example: Any
) -> set[nn.Module]:
    """Those of the modules that are called, and each time while their part of the model runs."""
    running: Counter[nn.Module] = Counter()
    within, outside = set[nn.Module](), set[nn.Module]()

    def enter(part: nn.Module, *_: Any) -> None:
        running[part] += 1

    def leave(part: nn.Module, *_: Any) -> None:
        running[part] -= 1

    def look(module: nn.Module, *_: Any) -> None:
        (within if running[parts[module]] else outside).add(module)

    hooks = [module.register_forward_pre_hook(look) for module in parts]
    for part in set(parts.values()):
        hooks.append(part.register_forward_pre_hook(enter, prepend=True))
        hooks.append(part.register_forward_hook(leave, always_call=True))
    _run(model, example, hooks)
    return within - outside


def _run(model: nn.Module, example: Any, hooks: Iterable[RemovableHandle]) -> None:
    """Call the model once, in eval mode and without gradients, and take the hooks away again.

    example is what it is called with: a tensor, a tuple of arguments, or a dict of keyword
    arguments. Nothing of the model changes.
    """
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


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, dict):
        return (), example
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})
