"""Record a run of a model: which modules are called in which order, and with which values."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_SAMPLES = 512  # elements of each tensor that are compared
_MAX_DEPTH = 5
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


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
        names: The modules whose values are recorded.
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
    """Return whether all samples are the same up to a tolerance, relative to the largest value."""
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
