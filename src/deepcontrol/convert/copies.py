"""Copy a model to trace or run it, so that the model itself stays as it is.

copy.deepcopy is not enough for that. It fails as a whole if one attribute cannot be copied (a lock,
a file, a tensor of an autograd graph), and it shares functions, whose closures then still refer to
the modules of the original.
"""

import contextlib
import copy
import functools
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
_CONTAINERS = (list, tuple, set, dict, OrderedDict, defaultdict)


@dataclass(frozen=True)
class Copied:
    """A copy of a model, and the copy of each of its modules."""

    model: nn.Module
    modules: dict[nn.Module, nn.Module]

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """Protect the original while the copy runs.

        Random states are restored. If the copy calls a module of the original, through a global
        variable for instance, that module is in eval mode and updates no statistics.
        """
        training = [module for module in self.modules if module.training]
        for module in training:
            module.training = False
        try:
            with preserved_random_state():
                yield
        finally:
            for module in training:
                module.training = True

    def original(self) -> dict[nn.Module, nn.Module]:
        """Return the module of the original for each module of the copy."""
        return {copied: module for module, copied in self.modules.items()}


def copy_model(model: nn.Module, *, share_parameters: bool = False, isolate: bool = True) -> Copied:
    """Copy a model with everything that its modules hold.

    Closures, bound methods and weak references of the copy refer to its own modules. An attribute
    that cannot be copied is shared.

    Args:
        model: The model to copy.
        share_parameters: Use the same nn.Parameter objects in the copy. Buffers are copied always.
        isolate: Also copy lists and other data in the closures of functions, so that hooks of the
            copy do not write to them.
    """
    copier = _Copier(isolate)
    if share_parameters:
        copier.memo = {id(p): p for p in model.parameters()}
    with torch.no_grad():  # autograd would record the copy of a scripted module
        copied = copier.copy(model)
    names = dict(copied.named_modules(remove_duplicate=False))
    pairs = model.named_modules(remove_duplicate=False)
    return Copied(copied, {module: names[name] for name, module in pairs})


class _Uncompiled(nn.Module):
    """Stands for the wrapper of torch.compile."""

    _orig_mod: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


class _Copier:
    """Copy objects recursively, part by part where that is possible."""

    def __init__(self, isolate: bool) -> None:
        self.isolate = isolate
        self.memo: dict[int, Any] = {}
        self.alive: list[Any] = []  # an id is valid as long as its object exists

    def copy(self, value: Any) -> Any:
        if isinstance(value, _ATOMS):
            return value
        if id(value) not in self.memo:
            self.alive.append(value)
            self.memo[id(value)] = self._copy(value)
        return self.memo[id(value)]

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            return copy.deepcopy(value) if value.is_leaf else value.detach().clone()
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if kind in _CONTAINERS:
            return self._container(value)
        if kind is types.FunctionType:
            return self._function(value)
        if kind is types.MethodType:
            return types.MethodType(value.__func__, self.copy(value.__self__))
        if kind is functools.partial:
            keywords = {name: self.copy(a) for name, a in value.keywords.items()}
            return functools.partial(self.copy(value.func), *map(self.copy, value.args), **keywords)
        if kind is weakref.ref:
            target = value()
            return weakref.ref(self.copy(target)) if isinstance(target, nn.Module) else value
        if isinstance(getattr(value, "_orig_mod", None), nn.Module):
            return self._uncompiled(value)
        return self._attributes(value) if _is_plain(value) else self._deepcopy(value)

    def _deepcopy(self, value: Any) -> Any:
        trial = dict(self.memo)
        try:
            copied = copy.deepcopy(value, trial)
        except Exception:  # an object may refuse to be copied in any way
            return value
        self.memo = trial
        return copied

    def _attributes(self, value: Any) -> Any:
        kind: Any = type(value)
        copied = kind.__new__(kind)
        self.memo[id(value)] = copied
        for name, attribute in list(vars(value).items()):
            # model.compile() would run the code that was compiled for the original.
            compiled = name == "_compiled_call_impl"
            copied.__dict__[name] = None if compiled else self.copy(attribute)
        return copied

    def _uncompiled(self, compiled: Any) -> nn.Module:
        """Return an eager copy of a model of torch.compile, with the same names."""
        copied = _Uncompiled()
        self.memo[id(compiled)] = copied
        copied._orig_mod = self.copy(compiled._orig_mod)
        return copied.train(compiled.training)

    def _container(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self.copy, value))
        if isinstance(value, defaultdict):
            copied: Any = defaultdict(self.copy(value.default_factory))
        else:
            copied = type(value)()
        self.memo[id(value)] = copied
        if isinstance(value, dict):
            for key, item in list(value.items()):
                copied[self.copy(key)] = self.copy(item)
        elif isinstance(value, list):
            copied.extend(map(self.copy, value))
        else:
            copied.update(map(self.copy, value))
        return copied

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """Return a function that refers to the copies, or the same one if it refers to none."""
        if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__):
            return function
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copied = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            closure=cells if function.__closure__ else None,
        )
        self.memo[id(function)] = copied
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                content = original.cell_contents
                own = isinstance(content, (nn.Module, *_CALLABLES)) or id(content) in self.memo
                cell.cell_contents = self.copy(content) if own or self.isolate else content
        copied.__defaults__ = self.copy(function.__defaults__)
        copied.__kwdefaults__ = self.copy(function.__kwdefaults__)
        copied.__dict__.update(function.__dict__)
        return copied


def _is_plain(value: Any) -> bool:
    """Return whether an object is its attributes, and nothing else."""
    kind: Any = type(value)
    if hasattr(kind, "__deepcopy__") or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, nn.Module):
        return True
    methods = ("__new__", "__reduce_ex__", "__reduce__", "__getstate__")
    default = all(getattr(kind, method) is getattr(object, method) for method in methods)
    return default and not any("__slots__" in vars(base) for base in kind.__mro__)


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy afterwards."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    own = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(own)
            if numpy is not None:
                numpy.random.set_state(arrays)


def seed_everything(seed: int) -> None:
    """Seed torch, Python and, if it is loaded, NumPy."""
    # Not torch.manual_seed: it also seeds a CUDA device that is not initialized yet.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
