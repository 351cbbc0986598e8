"""Find and select a model's norms, and check that they can be converted.

The passes of the conversion handle BatchNorms only. An InstanceNorm, a GroupNorm or a frozen
BatchNorm is planned and verified as a BatchNorm in its place (`stand_ins`): the dataflow around it
is the same. Stand-ins that are not converted are replaced by their norms again.
"""

import difflib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from .dry_run import copy_model

Selector = Callable[[str, nn.Module], bool] | str
Where = Selector | Sequence[Selector]
NormKind = Literal["batch", "instance", "group"]

# By the name of the class, because the modules of torch.distributed are not always available.
_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
}
_PLAIN_FORWARDS = (
    _BatchNorm.forward,
    nn.SyncBatchNorm.forward,
    _InstanceNorm.forward,
    nn.GroupNorm.forward,
)
_KINDS: dict[NormKind, type[nn.Module]] = {
    "batch": _BatchNorm,
    "instance": _InstanceNorm,
    "group": nn.GroupNorm,
}


_TITLES: dict[NormKind, str] = {
    "batch": "BatchNorm",
    "instance": "InstanceNorm",
    "group": "GroupNorm",
}


def check_kinds(norms: Sequence[NormKind] | NormKind, init: str) -> tuple[NormKind, ...]:
    """Return the kinds of norms to convert.

    Raises:
        ValueError: If a kind is unknown, or has no constant statistics to start from.
    """
    kinds: tuple[Any, ...] = (norms,) if isinstance(norms, str) else tuple(norms)
    for kind in kinds:
        if kind not in _KINDS:
            raise ValueError(f"unknown norm {kind!r}: choose from {', '.join(get_args(NormKind))}")
    others = [kind for kind in kinds if kind != "batch"]
    if others and keeps_function(init):
        raise ValueError(
            f"init={init!r} starts from the running statistics of BatchNorms, and norms={kinds!r} "
            f"includes {others[0]!r} norms, which divide by the spread of each sample: use "
            "norms=('batch',), or train from scratch with init='scratch'"
        )
    return kinds


def kind_of(module: nn.Module) -> NormKind | None:
    """Return which kind of norm a module is, or None."""
    return next((kind for kind, base in _KINDS.items() if isinstance(module, base)), None)


def _is_uninitialized(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(a is not None and is_lazy(a) for a in tensors)


def spatial_dims(norm: nn.Module) -> int | None:
    """Return the spatial dimensions of a norm; None if it accepts any number."""
    for d in (1, 2, 3):
        if isinstance(norm, (getattr(nn, f"BatchNorm{d}d"), getattr(nn, f"InstanceNorm{d}d"))):
            return d
    return None


def find_norms(
    model: nn.Module,
    kinds: Sequence[NormKind] = ("batch",),
    originals: Mapping[nn.Module, nn.Module] | None = None,
) -> dict[str, nn.Module]:
    """Return every norm of a model that is to be converted, by its (first) name.

    Args:
        model: The model.
        kinds: The kinds of norms to convert.
        originals: The norm for each stand-in of the model.

    Raises:
        ValueError: If the model has none, or contains modules that cannot be converted.
    """
    found: dict[str, nn.Module] = {}
    frozen: list[str] = []
    others: dict[NormKind, list[str]] = {}
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
        elif _is_uninitialized(module):
            raise ValueError(
                f"{place} ({type(module).__name__}) is not initialized yet: "
                "run the model once on an input, then convert it"
            )
        elif module in (originals or {}):
            found[name] = module
        elif (kind := kind_of(module)) is not None:
            if kind in kinds:
                found[name] = module
            else:
                others.setdefault(kind, []).append(place)
        elif is_frozen_class(module):
            frozen.append(place)
    if not found:
        wanted = " or ".join(_TITLES[kind] for kind in kinds)
        raise ValueError(f"no {wanted} in {type(model).__name__}: {_remedy(frozen, others)}")
    return found


def is_frozen_class(module: nn.Module) -> bool:
    """Return whether a module is a FrozenBatchNorm2d (torchvision, detectron2, ...)."""
    return "FrozenBatchNorm" in type(module).__name__


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model before its children, because a wrapper may not be initialized."""
    yield "", model
    for name, module in model.named_modules():
        if module is not model:
            yield name, module


def _place(name: str) -> str:
    return f"{name!r}" if name else "the model"


def _remedy(frozen: list[str], others: Mapping[NormKind, list[str]]) -> str:
    if others:
        kind, places = next(iter(others.items()))
        return f"{places[0]} is a {_TITLES[kind]}; convert these with norms=({kind!r},)"
    if frozen:
        return (
            f"{frozen[0]} is a frozen BatchNorm with constant statistics; convert it with "
            "frozen=True and init='bn', or build the model with nn.BatchNorm2d to train it"
        )
    return "there is nothing to convert"


def select_norms(
    norms: Mapping[str, nn.Module],
    where: Where | None,
    originals: Mapping[nn.Module, nn.Module] | None = None,
) -> set[nn.Module]:
    """Return the norms that `where` selects.

    `where` is a function, a name or glob, or a list of them.

    Args:
        norms: The norms by name.
        where: The selection; None selects all.
        originals: The norm for each stand-in: functions get the norm of the model.

    Raises:
        ValueError: If a name or glob matches no norm.
    """
    if where is None:
        return set(norms.values())
    selectors = [where] if isinstance(where, str) or callable(where) else list(where)
    selected = set[nn.Module]()
    own = {} if originals is None else originals
    for selector in selectors:
        if isinstance(selector, str):
            found = {norm for name, norm in norms.items() if fnmatchcase(name, selector)}
            if not found:
                batch = all(kind_of(own.get(m, m)) in ("batch", None) for m in norms.values())
                kind = "BatchNorm" if batch else "norm"
                raise ValueError(
                    f"where={selector!r} matches no {kind}: expected the name of a {kind} or "
                    f"a glob. {_similar(norms, selector)}"
                )
        else:
            found = {m for name, m in norms.items() if selector(name, own.get(m, m))}
        selected |= found
    return selected


def _similar(norms: Mapping[str, nn.Module], selector: str) -> str:
    """Return a suggestion for a name that matches no norm."""
    inside = f"{selector}.*"
    if any(fnmatchcase(name, inside) for name in norms):
        return f"To select the BatchNorms inside of {selector!r}, use {inside!r}"
    close = difflib.get_close_matches(selector, norms, cutoff=0.4)
    some = close or list(norms)[:3]
    return f"{'Similar' if close else 'Some'} names: {', '.join(map(repr, some))}"


def keeps_function(init: str) -> bool:
    """Return whether an initialization starts from the trained BatchNorms."""
    return init in ("bn", "centered")


def warn_trained(
    norms: Iterable[nn.Module], init: str, originals: Mapping[nn.Module, nn.Module]
) -> None:
    """Warn if an initialization discards trained statistics, gains or biases."""
    if keeps_function(init):
        return
    lost = "overwrites all filters and discards" if init == "scratch" else "discards"
    others = [norm for norm in norms if norm in originals and _has_varying_gain(norm)]
    if others:
        warnings.warn(
            f"{len(others)} norms ({type(originals[others[0]]).__name__}) have trained gains or "
            f"biases, which differ between channels, and init={init!r} {lost} them. AGC does not "
            "divide by a spread and cannot start from them: build the model without weights to "
            "train it from scratch",
            stacklevel=3,  # skip this function and to_agc
        )
    trained = [norm for norm in norms if isinstance(norm, _BatchNorm) and _is_trained(norm)]
    if trained:
        warnings.warn(
            f"{len(trained)} BatchNorms have trained statistics, and "
            f"init={init!r} {lost} their gains, biases and statistics. To start from the trained "
            "model, use init='bn'. To train from scratch, build the model without weights, or "
            "call reset_running_stats() on its BatchNorms",
            stacklevel=3,  # skip this function and to_agc
        )


def _has_varying_gain(norm: nn.Module) -> bool:
    values = [p for p in (norm.weight, norm.bias) if isinstance(p, Tensor) and not p.is_meta]
    return any(bool((a != a[0]).any()) for a in values)


def _is_trained(norm: _BatchNorm) -> bool:
    """Return whether a BatchNorm has seen a batch.

    Statistics from an old checkpoint count too.
    """
    count, mean, var = norm.num_batches_tracked, norm.running_mean, norm.running_var
    if mean is None or var is None or mean.is_meta:
        return False
    return bool((count is not None and count > 0) or mean.any() or (var != 1).any())


def refuse_frozen(layers: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if initializing these layers would overwrite frozen filters."""
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


def check_can_start(name: str, norm: _BatchNorm, kind: str, init: str) -> None:
    """Raise ValueError if AGC cannot be initialized from this norm, of class `kind`."""
    place = f"{_place(name)} ({kind})"
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


def trailing_layers(norm: nn.Module) -> list[nn.Module] | None:
    """Return the layers that a subclass of a norm applies after normalizing.

    Some libraries put an activation or a dropout inside their norm (timm's BatchNormAct2d).
    An overridden forward counts as "normalize, then call the children in order" if it computes the
    same on a test input in eval mode.

    Returns:
        The layers, empty for a plain norm; None if the forward computes something else.
    """
    if type(norm).forward in _PLAIN_FORWARDS and "forward" not in vars(norm):
        return []
    # On the CPU with values, because a BatchNorm on meta computes nothing to compare.
    probe: Any = copy_model(norm).model
    kind = kind_of(norm)
    assert kind is not None
    plain: Any = _KINDS[kind]
    if any(a.is_meta for a in (*probe.parameters(), *probe.buffers())):
        probe.to_empty(device="cpu")
        probe.reset_parameters()
    probe.eval()
    given = (probe.weight, getattr(probe, "running_mean", None))
    like = next((a for a in given if a is not None), torch.empty(0))
    dims = spatial_dims(norm) or 2
    features = probe.num_channels if kind == "group" else probe.num_features
    x = torch.linspace(-2, 2, 2 * features * 3**dims).to(like)
    x = x.reshape(2, features, *(3,) * dims)
    try:
        with torch.no_grad():
            expected = plain.forward(probe, x)
            for layer in probe.children():
                expected = layer(expected)
            same = torch.allclose(probe(x), expected)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None  # it takes other inputs than feature maps; the report lists it as skipped
    return [layer for layer in norm.children() if type(layer) is not nn.Identity] if same else None


def batchnorms_of_frozen(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return an nn.BatchNorm2d of equal values for each FrozenBatchNorm2d of a model.

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


def stand_ins(
    model: nn.Module, kinds: Sequence[NormKind], where: Where | None
) -> dict[nn.Module, nn.Module]:
    """Return a BatchNorm to plan with for each selected InstanceNorm and GroupNorm.

    It shares gamma, beta and children. Norms that compute something else are left out.
    """
    found: dict[nn.Module, nn.Module] = {}
    if set(kinds) <= {"batch"}:
        return found
    like = next(model.parameters(), torch.empty(0)).detach()
    for norm in select_norms(find_norms(model, kinds), where):
        if kind_of(norm) != "batch":
            layers = trailing_layers(norm)
            if layers is not None:
                found[norm] = _stand_in(norm, layers, like)
    return found


def _stand_in(norm: Any, layers: list[nn.Module], like: Tensor) -> nn.Module:
    """Return a BatchNorm with the parameters and children of a norm.

    The norm is an InstanceNorm or GroupNorm.
    """
    own = next((p for p in norm.parameters(recurse=False)), like)
    dims = spatial_dims(norm)
    # SyncBatchNorm accepts any number of dimensions, as GroupNorm does.
    base: Any = nn.SyncBatchNorm if dims is None else getattr(nn, f"BatchNorm{dims}d")
    features = norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features
    new = _stand_in_class(base)(features, eps=norm.eps, affine=False)
    new = new.to(own.device, own.dtype if own.is_floating_point() else None).train(norm.training)
    # The model's code may read these. AGC has other values, so the verification detects it.
    for name in ("affine", "num_groups", "num_channels"):
        if hasattr(norm, name):
            setattr(new, name, getattr(norm, name))
    # A parametrized or pruned norm computes these; they are not parameters.
    for name in ("weight", "bias"):
        value = getattr(norm, name)
        if isinstance(value, nn.Parameter) or value is None:
            new.register_parameter(name, value)
        else:
            new.register_parameter(name, nn.Parameter(value.detach().clone()))
    for name, child in norm.named_children():
        if child in layers:
            new.add_module(name, child)
    return new


@functools.cache
def _stand_in_class(base: Any) -> Any:
    """Return a BatchNorm subclass that checks its input and calls its children last."""

    class StandIn(base):
        def forward(self, input: Tensor) -> Tensor:
            if input.shape[1] != self.num_features:  # norms without parameters accept any number
                raise ValueError(
                    f"a norm of {self.num_features} channels gets maps {tuple(input.shape)}. AGC "
                    "has parameters for each channel: give every place a norm of its own with the "
                    "right number of channels, or exclude it with `where`"
                )
            output: Tensor = super().forward(input)
            for layer in self.children():
                output = layer(output)
            return output

    return StandIn
