"""The tree of a model's modules: who refers to a module, and putting another in its place."""

import warnings
from collections import defaultdict
from collections.abc import Mapping

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def parents(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """For each module below model, the modules that hold it: several where it is shared."""
    found = defaultdict(list)
    for parent in model.modules():
        for child in parent._modules.values():
            if child is not None:
                found[child].append(parent)
    return found


def swap(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put each replacement wherever its module stands, in place; returns the model or its own."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]
    return replacements.get(model, model)


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def warn_of_hooks(name: str, module: nn.Module) -> None:
    """A hook was written for the module that goes, so it is not moved to the one that comes."""
    if has_hooks(module):
        warnings.warn(
            f"the hooks on {name or 'the model'} ({type(module).__name__}) go with it: register "
            "them again on what took its place",
            stacklevel=3,  # past this function and the public one that calls it
        )
