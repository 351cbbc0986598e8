"""Initial parameters of the AGC layers that replace BatchNorms."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ..nn.init import CENTERING_GAIN, is_agc_over_maps, scale_output_, unit_scale
from ..ops.layout import accumulate_dtype
from .dry_run import Copied, copy_model, example_arguments, run_example, seed_everything

TOLERANCE = 2.0  # factor by which the deviation of a map may differ from its target
_NOISE = 1e4  # smaller maps are the rounding errors of features that are constant
NEAR_ONE = 0.95  # a lambda above it leaves less than a twentieth of the mean
_CONSTANT = 2e-5  # change of the features relative to the map's, above the rounding of a mean
_SAMPLES = 512

Lambdas = Mapping[nn.Module, float]


@dataclass(frozen=True)
class AGCParameters:
    """The parameters of Eq. 1 for one layer, each (C,): gamma, beta and lambda."""

    gain: nn.Parameter
    bias: nn.Parameter
    mean_scale: nn.Parameter


def untrained_parameters(
    norm: _BatchNorm, gamma: float, lam: float, *, trainable: bool = True
) -> AGCParameters:
    """Return the given gamma and lambda, and beta = 0.

    Args:
        norm: The BatchNorm to replace.
        gamma: The initial gain.
        lam: The initial lambda.
        trainable: Whether parameters that the BatchNorm does not have require gradients.
    """
    like = _like(norm)
    values = [like.new_full((norm.num_features,), a) for a in (gamma, 0, lam)]
    return _parameters(norm, *values, trainable=trainable)


def centering_gain(lam: float) -> float:
    """Return the gamma that makes up for the variance of the mean times lambda.

    Behind a ReLU, subtracting the mean removes 1 / pi of the variance: see CENTERING_GAIN.
    """
    if lam == 1:
        return CENTERING_GAIN
    removed = 1 - 1 / CENTERING_GAIN**2
    return 1 / math.sqrt(1 - (2 * lam - lam**2) * removed)


def is_computed(norm: _BatchNorm) -> bool:
    """Return whether gamma or beta is computed from others (parametrized, pruned)."""
    values = (norm.weight, norm.bias)
    return any(a is not None and not isinstance(a, nn.Parameter) for a in values)


def correct_scales_(
    model: nn.Module, example: Any, targets: Mapping[nn.Module, float]
) -> set[nn.Module]:
    """Scale AGC layers whose maps have the wrong deviation, layer by layer.

    He fan-in and CENTERING_GAIN are right for chains of convolutions and ReLUs. Gates (squeeze-and-
    excitation halves a map), other activations and concatenations change the scale of the signal,
    and in a deep network the factors multiply. Layers within TOLERANCE do not change.

    Args:
        model: The initialized model.
        example: An input of the model, a tuple of inputs or a dict of keyword arguments.
        targets: Deviation of the pre-activations of a layer; 1 for layers that are missing.

    Returns:
        The layers that were scaled; none on the meta device, which has no values.
    """
    if any(p.is_meta for p in model.parameters()):
        return set()
    copied = copy_model(model, share_parameters=True)  # the run must not fill the model's caches
    original = copied.original()
    seen, scaled = set[nn.Module](), set[nn.Module]()

    def correct(
        layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
    ) -> Tensor:
        if layer in seen or not isinstance(layer.weight, Tensor):
            return output
        seen.add(layer)
        x = args[0] if args else kwargs["input"]
        factor = targets.get(original[layer], 1.0) * unit_scale(layer, x)
        if 1 / TOLERANCE <= factor <= TOLERANCE or factor > _NOISE:
            return output
        scale_output_(layer, factor)
        scaled.add(original[layer])
        return layer.forward(*args, **kwargs)

    hooks = [
        m.register_forward_hook(correct, with_kwargs=True)
        for m in copied.model.modules()
        if is_agc_over_maps(m)
    ]
    run_example(copied, example, hooks)
    return scaled


def has_zero_gamma(norm: _BatchNorm) -> bool:
    """Return whether all of gamma is 0, as in a zero-initialized residual branch."""
    gamma = norm.weight
    return gamma is not None and not gamma.is_meta and not gamma.any()


def batchnorm_parameters(
    norm: _BatchNorm,
    *,
    lam: float = 0.0,
    filter_scale: Tensor | None = None,
    trainable: bool = True,
) -> AGCParameters:
    """Return the parameters that continue from a trained BatchNorm.

        lambda = 0:  gain = gamma / sigma,  bias = beta - gain * mean      as BatchNorm in eval mode
        lambda = 1:  gain = gamma / sigma,  bias = beta                    centered

    In between, 1 - lambda of the running mean is subtracted.

    If the filters before the norm are multiplied by a scale, the gain is divided by it. The scale
    brings each filter to the norm of He initialization (plan.he_scale), which makes the start
    independent of the scale of the filters: BatchNorm's function does not depend on it. A step of
    the filters W changes gain * W in proportion to gain^2, and a step of the gain in proportion to
    |W|^2. If the filters were ten times as large, a learning rate that suits one model would make
    the other diverge. BatchNorm leaves filters near the norm of He initialization, so the steps are
    about those of frozen BatchNorms. With filters W / sigma and gain = gamma, the steps of the
    filters would be sigma^2 times as large: sigma exceeds 1 after the sums of a residual network,
    and fine-tuning diverged at learning rates that frozen BatchNorms tolerate (dev/LOG.md). Only
    BatchNorms that share their gamma start so, because their gains can stay shared then.

    Args:
        norm: The BatchNorm, with running statistics.
        lam: The initial lambda, the share of the running mean that the sample's own mean replaces.
        filter_scale: The scale (C,) of the filters before the norm; None if they stay as they are.
        trainable: Whether parameters that the BatchNorm does not have require gradients.
    """
    _refresh(norm)
    mean = norm.running_mean
    assert mean is not None
    scale = inverse_sigma(norm)
    gamma = torch.ones_like(scale) if norm.weight is None else norm.weight.to(scale.dtype)
    bias = torch.zeros_like(scale) if norm.bias is None else norm.bias.to(scale.dtype)
    if lam != 1:
        bias = bias - (1 - lam) * (gamma * scale * mean)
    gain = gamma * scale if filter_scale is None else gamma * (scale / filter_scale)
    return _parameters(norm, gain, bias, torch.full_like(gain, lam), trainable=trainable)


def _refresh(norm: _BatchNorm) -> None:
    """Compute the parameters that a hook derives before each call (pruning)."""
    for hook in norm._forward_pre_hooks.values():
        if computes_parameter(hook):
            hook(norm, ())


def computes_parameter(hook: Any) -> bool:
    """Return whether a hook computes a parameter: weight or spectral norm, pruning."""
    # By name, because `import torch` does not load torch.nn.utils.prune.
    names = {base.__name__ for base in type(hook).__mro__}
    return bool(names & {"BasePruningMethod", "SpectralNorm", "WeightNorm"})


def inverse_sigma(norm: _BatchNorm) -> Tensor:
    """Return 1 / sqrt(var + eps) of a BatchNorm's running variance, in fp32 or fp64."""
    var = norm.running_var
    assert var is not None
    return torch.rsqrt(var.to(accumulate_dtype(var.dtype)) + norm.eps)


def _parameters(
    norm: _BatchNorm, gain: Tensor, bias: Tensor, mean_scale: Tensor, *, trainable: bool
) -> AGCParameters:
    """Make parameters with the dtype and requires_grad of the BatchNorm's."""
    dtype = _like(norm).dtype

    def parameter(value: Tensor, name: str) -> nn.Parameter:
        own = _sources(norm, name)
        requires_grad = any(p.requires_grad for p in own) if own else trainable
        return nn.Parameter(value.detach().to(dtype, copy=True), requires_grad)

    return AGCParameters(
        parameter(gain, "weight"),
        parameter(bias, "bias"),
        parameter(mean_scale, "weight"),
    )


def _sources(norm: _BatchNorm, name: str) -> list[nn.Parameter]:
    """Return the parameters that gamma or beta is, or is computed from.

    Parametrized and pruned ones are computed.
    """
    own = getattr(norm, name)
    if own is None or isinstance(own, nn.Parameter):
        return [] if own is None else [own]
    if is_parametrized(norm, name):
        return list(norm.parametrizations[name].parameters())  # type: ignore[index, union-attr]
    pruned = getattr(norm, f"{name}_orig", None)
    return [pruned] if isinstance(pruned, nn.Parameter) else []


def _like(norm: _BatchNorm) -> Tensor:
    """Return a tensor of the norm's dtype and device.

    It is fp32 if the norm has no parameters and buffers.
    """
    for a in (norm.weight, norm.running_mean):
        if a is not None:
            return a.detach()
    return torch.empty(0)


@dataclass(frozen=True)
class _Value:
    """A tensor that is computed from AGC layers without another AGC layer in between."""

    function: str
    elements: int
    sources: tuple[int, ...]
    origins: frozenset[nn.Module]
    samples: Tensor


def constant_features(
    copied: Copied, layers: Mapping[nn.Module, nn.Module], lambdas: Lambdas, example: Any
) -> set[nn.Module] | None:
    """Find features that are equal for all inputs: AGC removes the mean of their map.

    At lambda 1 every map of an AGC layer has mean beta. If only such means are read from it (global
    average pooling without an activation in between), the features stay constant until lambda has
    changed. The converted model runs on two inputs to find them, however the mean is computed.

    Args:
        copied: A converted copy of the model.
        layers: AGC layer or AGCConv of each BatchNorm.
        lambdas: The initial lambda of each BatchNorm.
        example: An input of the model.

    Returns:
        BatchNorms with constant features on the example; None if it cannot be measured.
    """
    norms = {layer: norm for norm, layer in layers.items()}
    first, second = (_run(copied, norms, example, change) for change in (False, True))
    if first is None or second is None or len(first) != len(second):
        return None  # the code takes another path for the other input
    changes = []
    for a, b in zip(first, second, strict=True):
        if (a.function, a.elements, a.sources) != (b.function, b.elements, b.sources):
            return None
        changes.append(float((a.samples - b.samples).abs().max()) if a.elements else 0.0)
    found = set[nn.Module]()
    for value, change in zip(first, changes, strict=True):
        if not value.samples.any():
            continue  # closed ReLUs
        for i in value.sources:
            # A constant source was counted already, at the layer that made it constant.
            varies = changes[i] > 1e-6 * float(first[i].samples.abs().max())
            if varies and value.elements < first[i].elements and change <= _CONSTANT * changes[i]:
                found |= first[i].origins
    return {norm for norm in found if lambdas[norm] > NEAR_ONE}


def _run(
    copied: Copied, norms: Mapping[nn.Module, nn.Module], example: Any, change_input: bool
) -> list[_Value] | None:
    """Run the converted model; record all values computed from AGC layers' outputs."""
    values: list[_Value] = []
    index = WeakTensorKeyDictionary()
    running = set[nn.Module]()  # AGC layers, which take means themselves

    def append(
        tensor: Tensor, function: str, sources: tuple[int, ...], origins: frozenset[nn.Module]
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
                origins = frozenset[nn.Module]().union(*(values[i].origins for i in sources))
                for tensor in tree_leaves(output):
                    if isinstance(tensor, Tensor) and tensor.is_floating_point():
                        append(tensor, getattr(func, "__name__", ""), sources, origins)
            return output

    hooks = []

    def leave(layer: nn.Module, args: Any, output: Tensor) -> None:
        running.discard(layer)
        append(output, "agc", (), frozenset({norms[layer]}))

    for layer in norms:
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
