"""Find features that are the same for all inputs, because AGC removes the mean of their map.

At lambda 1 every map of an AGC layer has mean beta. If nothing but such means is read from it
(global average pooling without an activation in between), the features stay constant until lambda
has changed. The converted model runs on two inputs to find them, however the mean is computed.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from .copies import Copied, seed_everything
from .dataflow import example_arguments
from .plan import Level, Site
from .verify import Lambdas, Trial

NEAR_ONE = 0.95  # a lambda above it leaves less than a twentieth of the mean
_CONSTANT = 2e-5  # change of the features relative to the map's, above the rounding of a mean
_SAMPLES = 512


@dataclass(frozen=True)
class _Value:
    """A tensor that is computed from AGC layers without another AGC layer in between."""

    function: str
    elements: int
    sources: tuple[int, ...]
    origins: frozenset[Site]
    samples: Tensor


def constant_features(trial: Trial, sites: Sequence[Site], lambdas: Lambdas) -> list[Site] | None:
    """Return the sites whose maps are reduced to constants; None if it cannot be measured.

    Args:
        trial: The runs of the model on its example.
        sites: The plan.
        lambdas: The initial lambda of each BatchNorm.
    """
    sites = [site for site in sites if site.level != Level.SKIPPED]
    copied, layers = trial.convert_copy(sites, lam=lambdas)
    first, second = (
        _run(copied, {layers[site.norm]: site for site in sites}, trial.example, change)
        for change in (False, True)
    )
    if first is None or second is None or len(first) != len(second):
        return None  # the code takes another path for the other input
    changes = []
    for a, b in zip(first, second, strict=True):
        if (a.function, a.elements, a.sources) != (b.function, b.elements, b.sources):
            return None
        changes.append(float((a.samples - b.samples).abs().max()) if a.elements else 0.0)
    found = set[Site]()
    for value, change in zip(first, changes, strict=True):
        if not value.samples.any():
            continue  # closed ReLUs
        for i in value.sources:
            # A source that is constant already has been counted where it became so.
            varies = changes[i] > 1e-6 * float(first[i].samples.abs().max())
            if varies and value.elements < first[i].elements and change <= _CONSTANT * changes[i]:
                found |= first[i].origins
    return [s for s in sites if s in found and lambdas[s.norm] > NEAR_ONE]


def _run(
    copied: Copied, layers: Mapping[nn.Module, Site], example: Any, change_input: bool
) -> list[_Value] | None:
    """Run the converted model and record everything computed from the outputs of AGC layers."""
    values: list[_Value] = []
    index = WeakTensorKeyDictionary()
    running = set[nn.Module]()  # AGC layers, which take means themselves

    def append(
        tensor: Tensor, function: str, sources: tuple[int, ...], origins: frozenset[Site]
    ) -> None:
        flat = tensor.detach().reshape(-1)
        samples = flat[:: max(1, len(flat) // _SAMPLES)].double().cpu()
        index[tensor] = len(values)
        values.append(_Value(function, len(flat), sources, origins, samples))

    class Recorder(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            leaves = tree_leaves((args, kwargs))
            known = [index[a] for a in leaves if isinstance(a, Tensor) and a in index]
            output = func(*args, **(kwargs or {}))
            if known and not running:
                sources = tuple(dict.fromkeys(known))
                origins = frozenset[Site]().union(*(values[i].origins for i in sources))
                for tensor in tree_leaves(output):
                    if isinstance(tensor, Tensor) and tensor.is_floating_point():
                        append(tensor, getattr(func, "__name__", ""), sources, origins)
            return output

    hooks = []

    def leave(layer: nn.Module, args: Any, output: Tensor) -> None:
        running.discard(layer)
        append(output, "agc", (), frozenset({layers[layer]}))

    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(lambda layer, args: running.add(layer)))
        hooks.append(layer.register_forward_hook(leave))
    args, kwargs = example_arguments(copied.model, example)
    try:
        with torch.no_grad(), warnings.catch_warnings(), copied.isolated():
            warnings.simplefilter("ignore")
            seed_everything(1)
            if change_input:
                args, kwargs = tree_map(_changed, (args, kwargs))
            with Recorder():
                copied.model.eval()(*args, **kwargs)
    except Exception:  # the code of a model can raise anything for another input
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return values


def _changed(value: Any) -> Any:
    """Add noise to an input of floating-point numbers."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    deviation = float(value.float().std()) if value.numel() > 1 else 0.0
    return value + (deviation or 1.0) * torch.randn_like(value)
