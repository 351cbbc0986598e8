"""Find the BatchNorms of a model, select some of them, and check that they can be converted."""

import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from .copies import copy_model

Selector = Callable[[str, nn.Module], bool] | str
Where = Selector | Sequence[Selector]

# By the name of the class, because the modules of torch.distributed are not always available.
_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
}
_PLAIN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def find_batchnorms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return every BatchNorm of a model by its (first) name.

    Raises:
        ValueError: If the model has none, or contains modules that cannot be converted.
    """
    found, frozen = {}, []
    for name, module in _modules(model):
        place = _place(name)
        wrapper = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise ValueError(
                f"{place} is wrapped in {_WRAPPERS[wrapper]}, which has registered its parameters "
                f"already: convert the model before {_WRAPPERS[wrapper]} wraps it"
            )
        if isinstance(module, torch.jit.ScriptModule):
            if module is model or "BatchNorm" in module.original_name:
                raise ValueError(
                    f"{place} is scripted, and a scripted module cannot be changed: "
                    "convert the model before it is scripted. Models with AGC can be traced "
                    "(torch.jit.trace) or exported (torch.export), not scripted"
                )
        elif any(
            a is not None and is_lazy(a)
            for a in (*module._parameters.values(), *module._buffers.values())
        ):
            raise ValueError(
                f"{place} ({type(module).__name__}) is not initialized yet: "
                "run the model once on an input, then convert it"
            )
        elif isinstance(module, _BatchNorm):
            found[name] = module
        elif is_frozen_class(module):
            frozen.append(place)
    if not found:
        raise ValueError(f"no BatchNorm in {type(model).__name__}: {_remedy(frozen)}")
    return found


def is_frozen_class(module: nn.Module) -> bool:
    """Return whether a module is a FrozenBatchNorm2d of torchvision, detectron2 or others."""
    return "FrozenBatchNorm" in type(module).__name__


def batchnorms_of_frozen(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return an nn.BatchNorm2d with the same values for each FrozenBatchNorm2d of a model.

    Its parameters do not require gradients.
    """
    found: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if is_frozen_class(module):
            frozen: Any = module
            norm = nn.BatchNorm2d(len(frozen.weight), eps=getattr(frozen, "eps", 1e-5))
            norm = norm.to(frozen.weight).train(frozen.training).requires_grad_(False)
            for name in ("weight", "bias", "running_mean", "running_var"):
                getattr(norm, name).data.copy_(getattr(frozen, name))
            found[module] = norm
    return found


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model before its children, because a wrapper may not be initialized."""
    yield "", model
    for name, module in model.named_modules():
        if module is not model:
            yield name, module


def _place(name: str) -> str:
    return f"{name!r}" if name else "the model"


def _remedy(frozen: list[str]) -> str:
    if frozen:
        return (
            f"{frozen[0]} is a frozen BatchNorm with constant statistics; convert it with "
            "frozen=True and init='bn', or build the model with nn.BatchNorm2d to train it"
        )
    return "there is nothing to convert"


def select_batchnorms(norms: Mapping[str, _BatchNorm], where: Where | None) -> set[_BatchNorm]:
    """Return the BatchNorms that `where` selects: by function, name or glob, or a list of them.

    Raises:
        ValueError: If a name or glob matches no BatchNorm.
    """
    if where is None:
        return set(norms.values())
    selectors = [where] if isinstance(where, str) or callable(where) else list(where)
    selected = set[_BatchNorm]()
    for selector in selectors:
        if isinstance(selector, str):
            found = {norm for name, norm in norms.items() if fnmatchcase(name, selector)}
            if not found:
                raise ValueError(
                    f"where={selector!r} matches no BatchNorm: expected the name of a BatchNorm or "
                    f"a glob. {_similar(norms, selector)}"
                )
        else:
            found = {norm for name, norm in norms.items() if selector(name, norm)}
        selected |= found
    return selected


def _similar(norms: Mapping[str, _BatchNorm], selector: str) -> str:
    """Return a suggestion for a name that matches no BatchNorm."""
    inside = f"{selector}.*"
    if any(fnmatchcase(name, inside) for name in norms):
        return f"To select the BatchNorms inside of {selector!r}, use {inside!r}"
    close = difflib.get_close_matches(selector, norms, cutoff=0.4)
    some = close or list(norms)[:3]
    return f"{'Similar' if close else 'Some'} names: {', '.join(map(repr, some))}"


def keeps_function(init: str) -> bool:
    """Return whether an initialization starts from the trained BatchNorms."""
    return init in ("bn", "centered")


def warn_trained(norms: Iterable[_BatchNorm], init: str) -> None:
    """Warn if an initialization discards trained statistics."""
    if keeps_function(init):
        return
    trained = [norm for norm in norms if _is_trained(norm)]
    if trained:
        lost = "overwrites all filters and discards" if init == "scratch" else "discards"
        warnings.warn(
            f"{len(trained)} BatchNorms have trained statistics, and "
            f"init={init!r} {lost} their gains, biases and statistics. To start from the trained "
            "model, use init='bn'. To train from scratch, build the model without weights, or "
            "call reset_running_stats() on its BatchNorms",
            stacklevel=3,  # skip this function and to_agc
        )


def _is_trained(norm: _BatchNorm) -> bool:
    """Return whether a BatchNorm has seen a batch, or has statistics from an old checkpoint."""
    count, mean, var = norm.num_batches_tracked, norm.running_mean, norm.running_var
    if mean is None or var is None or mean.is_meta:
        return False
    return bool((count is not None and count > 0) or mean.any() or (var != 1).any())


def refuse_frozen(layers: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if the initialization of these layers would overwrite frozen filters."""
    frozen = [
        name
        for name, layer in layers.items()
        if isinstance(layer.weight, nn.Parameter) and not layer.weight.requires_grad
    ]
    if frozen:
        more = f" (and {len(frozen) - 1} more)" if len(frozen) > 1 else ""
        raise ValueError(
            f"init='scratch' initializes {frozen[0]!r}{more}, which is frozen "
            "(requires_grad=False) and would keep random filters: use init='paper', which leaves "
            "filters as they are, or init='bn', or unfreeze it"
        )


def check_can_start(name: str, norm: _BatchNorm, init: str) -> None:
    """Raise ValueError if AGC cannot be initialized from this BatchNorm as requested."""
    place = f"{_place(name)} ({type(norm).__name__})"
    if keeps_function(init) and (norm.running_mean is None or norm.running_var is None):
        raise ValueError(
            f"{place} has no running statistics (track_running_stats=False), which init={init!r} "
            "needs: use init='scratch', or exclude it with `where`"
        )
    if not keeps_function(init) and any(
        not p.requires_grad for p in norm.parameters(recurse=False)
    ):
        raise ValueError(
            f"{place} is frozen (requires_grad=False), so the untrained values of init={init!r} "
            "would stay forever: use init='bn', which keeps its function and keeps it frozen, or "
            "unfreeze it, or exclude it with `where`"
        )


def trailing_layers(norm: _BatchNorm) -> list[nn.Module] | None:
    """Return the layers that a BatchNorm subclass applies after normalizing.

    Some libraries put an activation or a dropout inside their BatchNorm (timm's BatchNormAct2d).
    An overridden forward counts as "normalize, then call the children in order" if it computes the
    same on a test input in eval mode.

    Returns:
        The layers, empty for a plain BatchNorm; None if the forward computes something else.
    """
    if type(norm).forward in _PLAIN_FORWARDS and "forward" not in vars(norm):
        return []
    # On the CPU with values, because a BatchNorm on meta computes nothing to compare.
    probe = copy_model(norm).model
    assert isinstance(probe, _BatchNorm)
    if any(a.is_meta for a in (*probe.parameters(), *probe.buffers())):
        probe.to_empty(device="cpu")
        probe.reset_parameters()
    probe.eval()
    like = next((a for a in (probe.weight, probe.running_mean) if a is not None), torch.empty(0))
    dims = next((d for d in (1, 2, 3) if isinstance(norm, getattr(nn, f"BatchNorm{d}d"))), 2)
    x = torch.linspace(-2, 2, 2 * norm.num_features * 3**dims).to(like)
    x = x.reshape(2, norm.num_features, *(3,) * dims)
    try:
        with torch.no_grad():
            expected = _BatchNorm.forward(probe, x)
            for layer in probe.children():
                expected = layer(expected)
            same = torch.allclose(probe(x), expected)
    except (RuntimeError, TypeError, ValueError):
        return None  # it takes other inputs than feature maps; the report lists it as skipped
    return [layer for layer in norm.children() if type(layer) is not nn.Identity] if same else None
