"""Run a copy of a model on an example, and record the run.

The model itself does not change. copy.deepcopy is not enough for that. It fails as a whole if one
attribute cannot be copied (a lock, a file, a tensor of an autograd graph), and it shares functions,
whose closures then still refer to the modules of the original.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import random
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
_CONTAINERS = (list, tuple, set, dict, OrderedDict, defaultdict)
_SAMPLES = 512  # elements of each tensor that are compared
_MAX_DEPTH = 5
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


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
    """Eager replacement for the wrapper of torch.compile."""

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
        """Return a function that refers to the copies, or the same if it refers to none."""
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
    """Return whether an object consists only of its attributes."""
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


def example_arguments(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of an example.

    A list is one input, as detection models take it. A dict is one input if forward does not accept
    its keys as keyword arguments.
    """
    if isinstance(example, tuple):
        return example, {}
    if isinstance(example, dict) and accepts_keywords(model, example):
        return (), example
    return (example,), {}


def accepts_keywords(model: nn.Module, keywords: Mapping[str, Any]) -> bool:
    """Return whether forward accepts these keyword arguments."""
    try:
        inspect.signature(model.forward).bind(**keywords)
    except TypeError:
        return False
    return True


def run_example(copied: Copied, example: Any, hooks: Iterable[RemovableHandle]) -> Any:
    """Run a copy of a model in eval mode without gradients; then remove the hooks.

    Returns:
        The output of the model.
    """
    args, kwargs = example_arguments(copied.model, example)
    try:
        with torch.no_grad(), copied.isolated():
            return copied.model.eval()(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Record:
    """A run of a model.

    Attributes:
        events: The name of each module that returned, with samples of its inputs and outputs.
        calls: Number of calls of each module.
        outputs: Samples of the model's outputs.
        kept: Samples of the tensors that modules hold afterwards, by the name of the attribute.
        error: Why the run failed, or None.
    """

    events: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    calls: Counter[nn.Module] = field(default_factory=Counter)
    outputs: list[Tensor] = field(default_factory=list)
    kept: dict[str, list[Tensor]] = field(default_factory=dict)
    error: Exception | None = None

    def difference(self, other: "Record", tolerance: float) -> str | None:
        """Return where another run differs first, or None."""
        for (name, samples), (name_there, samples_there) in zip(
            self.events, other.events, strict=False
        ):
            if name != name_there:
                return f"{name_there or 'the model'} is called instead of {name or 'the model'}"
            if not _close(samples, samples_there, tolerance):
                return f"the values at {name or 'the model'} differ"
        if other.error is not None:
            return f"it raises {type(other.error).__name__}: {other.error}"
        if len(self.events) != len(other.events):
            return "the number of calls differs"
        for name, samples in self.kept.items():
            if name in other.kept and not _close(samples, other.kept[name], tolerance):
                return f"the values kept in {name} differ"
        return None if _close(self.outputs, other.outputs, tolerance) else "the outputs differ"


def record_run(
    model: nn.Module,
    run: Callable[[], Any],
    names: Mapping[nn.Module, str],
    forbidden: Iterable[nn.Module] = (),
) -> Record:
    """Run a model and record its calls.

    Args:
        model: The model.
        run: Calls the model and returns its output.
        names: Modules to record.
        forbidden: Modules that must not be called; a call raises CalledOutsideError.
    """
    record = Record()
    refused = set(forbidden)

    def enter(module: nn.Module, args: Any) -> None:
        if module in refused:
            raise CalledOutsideError(module)
        record.calls[module] += 1
        if module in names:
            record.events.append((f"{names[module]} (input)", _samples(args)))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module in names:
            record.events.append((names[module], _samples(output)))

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        record.outputs = _samples(run())
        record.kept = dict(_kept(model))
    except CalledOutsideError:
        raise
    except Exception as error:  # the code of a model can raise anything
        record.error = error
    finally:
        for hook in hooks:
            hook.remove()
    return record


class CalledOutsideError(Exception):
    """A copy of a model called a module of the original."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(f"{type(module).__name__} of the original is called")
        self.module = module


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in lists, dicts, data classes and plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth < _MAX_DEPTH:
        for item in _items(value):
            yield from tensors_in(item, depth + 1)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return list(vars(value).values()) if hasattr(value, "__dict__") else []
    plain = type(value).__module__ not in ("builtins", "functools", "types")
    if plain and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        return list(vars(value).values())
    return []


def _kept(model: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the tensors that modules hold besides their parameters and buffers."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OWN_ATTRIBUTES:
                found = _samples(value)
                if found:
                    yield f"{name}.{attribute}".lstrip("."), found


@torch.no_grad()
def _samples(value: Any) -> list[Tensor]:
    """Return some elements of each tensor, in fp64 on the CPU."""
    found = []
    for tensor in tensors_in(value):
        if tensor.is_meta or tensor.is_sparse or tensor.is_complex() or tensor.is_quantized:
            continue
        with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
            flat = tensor.detach().reshape(-1)
            found.append(flat[:: max(1, len(flat) // _SAMPLES)].cpu().double())
    return found


def _close(a: list[Tensor], b: list[Tensor], tolerance: float) -> bool:
    """Return whether all samples agree within a tolerance times the largest value."""
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if x.shape != y.shape:
            return False
        finite = x.isfinite()
        if not torch.equal(finite, y.isfinite()):
            return False
        x, y = x[finite], y[finite]
        if len(x) and (x - y).abs().max() > tolerance * max(float(x.abs().max()), 1e-30):
            return False
    return True
