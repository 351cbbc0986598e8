"""Put new layers in the place of old ones, wherever a model refers to them."""

import functools
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from .dataflow import HOOKS
from .start import computes_parameter

_OWN_DICTS = ("_modules", "_parameters", "_buffers")
_MAX_ITEMS = 1000  # longer containers hold data
_MAX_DEPTH = 4
# Methods that fold BatchNorms into convolutions: ultralytics, timm, RepVGG and its successors.
_FUSERS = ("fuse", "reparameterize", "switch_to_deploy")


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules wherever they are registered or referred to, in place.

    Besides the registered children these are references in attributes: lists, dicts, tuples,
    sets, plain objects, bound methods, partial functions, and closures and defaults of functions.
    Forward and backward hooks move to the new module, where their handles still remove them.

    Returns:
        The model, or its replacement if the model itself is replaced.
    """
    if not replacements:
        return model
    references = _References(replacements)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]
        for name, value in list(vars(parent).items()):
            if name not in _OWN_DICTS:
                replaced = references.replaced(value)
                if replaced is not value:
                    vars(parent)[name] = replaced
    for old, new in replacements.items():
        move_hooks(old, new)
    return replacements.get(model, model)


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give a module the hooks of the module that it replaces."""
    for name in HOOKS:
        hooks = getattr(old, name)
        for key in [k for k, hook in hooks.items() if computes_parameter(hook)]:
            del hooks[key]
        if hooks:
            # The dicts themselves, because the handles of the hooks refer to them.
            setattr(new, name, hooks)
            for more in (f"{name}_with_kwargs", f"{name}_always_called"):
                if hasattr(old, more):
                    setattr(new, more, getattr(old, more))


def disable_fusers(model: nn.Module, layers: Iterable[nn.Module]) -> list[str]:
    """Make methods that fold BatchNorms leave modules with AGC layers as they are.

    Such a method reads the running statistics of the BatchNorms and builds convolutions with a
    constant bias. AGC has no statistics, and its mean depends on the sample. The method is replaced
    on the instance by one that returns the module, which is what callers expect of it.

    Args:
        model: The converted model.
        layers: Its AGC layers.

    Returns:
        The names of the methods.
    """
    converted = set(layers)
    disabled = []
    for name, module in model.named_modules():
        fusers = [fuser for fuser in _FUSERS if _is_fuser(getattr(type(module), fuser, None))]
        if fusers and not converted.isdisjoint(module.modules()):
            for fuser in fusers:
                setattr(module, fuser, functools.partial(_unchanged, module))
                disabled.append(f"{name}.{fuser}".lstrip("."))
    return disabled


def _is_fuser(method: Any) -> bool:
    """Return whether a method can be called without arguments, as fusers are."""
    if not inspect.isfunction(method):
        return False
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters
    )


def _unchanged(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Return a module that is not fused."""
    return module


class _References:
    """Replace modules inside of attributes, in place if possible."""

    def __init__(self, replacements: Mapping[nn.Module, nn.Module]) -> None:
        self.replacements = replacements
        self.seen = set[int]()

    def replaced(self, value: Any, depth: int = 0) -> Any:
        """Return the value itself, or what stands in its place."""
        if isinstance(value, nn.Module):
            return self.replacements.get(value, value)
        if isinstance(value, types.MethodType):
            return self._method(value)
        if isinstance(value, functools.partial):
            return self._partial(value, depth)
        if isinstance(value, tuple):
            return self._tuple(value, depth)
        if id(value) not in self.seen and depth < _MAX_DEPTH:
            self.seen.add(id(value))
            self._replace_inside(value, depth + 1)
        return value

    def _method(self, method: types.MethodType) -> Any:
        new = self.replaced(method.__self__)
        return method if new is method.__self__ else getattr(new, method.__func__.__name__)

    def _partial(self, value: Any, depth: int) -> Any:
        old = (value.func, value.args, value.keywords)
        function, args, keywords = (self.replaced(a, depth) for a in old)
        if (function, args) == old[:2]:
            return value  # keywords are replaced in place
        return functools.partial(function, *args, **keywords)

    def _tuple(self, value: tuple[Any, ...], depth: int) -> Any:
        if len(value) > _MAX_ITEMS:
            return value
        items = [self.replaced(item, depth + 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    def _replace_inside(self, value: Any, depth: int) -> None:
        if isinstance(value, (list, dict)):
            if len(value) <= _MAX_ITEMS:
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in list(pairs):
                    new = self.replaced(item, depth)
                    if new is not item:
                        value[key] = new
        elif isinstance(value, set):
            if any(isinstance(item, nn.Module) for item in value):
                items = [self.replaced(item, depth) for item in value]
                value.clear()
                value.update(items)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                try:
                    content = cell.cell_contents
                except ValueError:  # an empty cell
                    continue
                new = self.replaced(content, depth)
                if new is not content:
                    cell.cell_contents = new
            defaults = self.replaced(value.__defaults__, depth)
            if defaults is not value.__defaults__:
                value.__defaults__ = defaults
            self.replaced(value.__kwdefaults__, depth)
        elif not isinstance(value, (type, types.ModuleType, Tensor)) and hasattr(value, "__dict__"):
            self.replaced(vars(value), depth)
