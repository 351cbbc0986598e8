"""Find BatchNorms, match them with convolution and activation, and build their AGC layers."""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from ..nn import AGC1d, AGC2d, AGC3d, AGCConv1d, AGCConv2d, AGCConv3d
from ..nn.agc import _AGC
from ..nn.conv import _AGCConv
from ..ops.activation import ActivationName, name_of_module
from ..ops.layout import accumulate_dtype
from .dataflow import Dataflow

_AGC_CONVS: dict[int, type[_AGCConv]] = {1: AGCConv1d, 2: AGCConv2d, 3: AGCConv3d}
_AGC_LAYERS: dict[int, type[_AGC]] = {1: AGC1d, 2: AGC2d, 3: AGC3d}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class AGCParameters:
    """The parameters of Eq. 1 for one layer, each (C,): gamma, beta and lambda."""

    gain: nn.Parameter
    bias: nn.Parameter
    mean_scale: nn.Parameter


@dataclass(frozen=True)
class ConvNormAct:
    """A convolution and an activation called only right before and after a norm.

    activation is "none" and activation_module None if no supported activation follows the norm.
    """

    conv: _ConvNd
    activation: ActivationName = "none"
    activation_module: nn.Module | None = None


def match_conv_norm_act(norm: nn.Module, flow: Dataflow) -> ConvNormAct | str:
    """Return the convolution and activation around a norm, or why they cannot fuse."""
    conv = flow.sole_producer(norm)
    if conv is None:
        return "no single convolution feeds it"
    reason = _unsupported(conv)
    if reason is not None:
        return reason
    assert isinstance(conv, _ConvNd)
    if flow.sole_consumer(conv) is not norm:
        return "the convolution's output has other consumers"
    if flow.unconfirmed & {conv, norm}:
        return "could not trace what calls the convolution; pass example="
    after = flow.sole_consumer(norm)
    if (
        after is not None
        and after not in flow.unconfirmed
        and flow.sole_producer(after) is norm
        and not has_hooks(after)
    ):
        name = name_of_module(after)
        if name is not None:
            return ConvNormAct(conv, name, after)
    return ConvNormAct(conv)


def _unsupported(conv: nn.Module) -> str | None:
    """Return why an AGCConv cannot replace this module, or None if it can."""
    kind = type(conv).__name__
    plain = next((c for c in _CONVOLUTIONS if isinstance(conv, c)), None)
    if plain is None:
        return f"{kind} feeds it"
    if hasattr(conv, "parametrizations"):
        return "the convolution is parametrized"
    own = [getattr(type(conv), method) for method in ("forward", "_conv_forward")]
    if own != [plain.forward, plain._conv_forward] or "forward" in vars(conv):
        return f"{kind} overrides forward"
    if not isinstance(conv.weight, nn.Parameter):
        return "the convolution's weight is not a parameter"
    if has_hooks(conv):
        return "the convolution has hooks"
    return None


def make_agc_conv(conv: _ConvNd, parameters: AGCParameters, activation: ActivationName) -> _AGCConv:
    """Build an AGCConv that shares the filters of a convolution.

    A bias b of the convolution is constant over each map, and AGC leaves gamma (1 - lambda) b of
    it. That is added to beta.
    """
    agc_conv = _AGC_CONVS[conv.weight.dim() - 2]
    # On meta, because all parameters are assigned below.
    neuron = agc_conv(**conv_options(conv), activation=activation, device="meta")
    bias = parameters.bias
    if conv.bias is not None:
        left = parameters.gain * (1 - parameters.mean_scale) * conv.bias.to(parameters.gain)
        bias = nn.Parameter((bias + left).detach(), bias.requires_grad)
    assert isinstance(conv.weight, nn.Parameter)
    neuron.weight = conv.weight
    neuron.bias, neuron.gain, neuron.mean_scale = bias, parameters.gain, parameters.mean_scale
    return neuron


def make_agc_layer(dims: int, parameters: AGCParameters) -> _AGC:
    """Build AGC1d, AGC2d or AGC3d with the given parameters."""
    layer = _AGC_LAYERS[dims](len(parameters.gain), device="meta")
    layer.weight, layer.bias = parameters.gain, parameters.bias
    layer.mean_scale = parameters.mean_scale
    return layer


def parameters_of(layer: _AGC) -> AGCParameters:
    """Return the parameters of an AGC layer, with 1, 0 and 1 for missing ones."""
    given = (layer.weight, layer.bias, layer.mean_scale)
    defaults = (1.0, 0.0, 1.0)
    like = next((a for a in given if a is not None), torch.empty(0))
    return AGCParameters(
        *(
            nn.Parameter(like.new_full((layer.num_features,), default)) if a is None else a
            for a, default in zip(given, defaults, strict=True)
        )
    )


def conv_options(conv: _ConvNd) -> dict[str, Any]:
    """Return the constructor arguments for another convolution of the same geometry."""
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
    return {name: getattr(conv, name) for name in (*names, "groups", "padding_mode")}


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules wherever they are registered, in place.

    Returns:
        The model, or its replacement if the model itself is replaced.
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]
    return replacements.get(model, model)


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def warn_dropped_hooks(name: str, module: nn.Module) -> None:
    """Warn if a replaced module has hooks, which its replacement does not get."""
    if has_hooks(module):
        warnings.warn(
            f"the hooks on {name or 'the model'} ({type(module).__name__}) are dropped, because "
            "the module is replaced: register them again on its replacement",
            stacklevel=3,  # skip this function and the public function that calls it
        )


_PLAIN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def find_batchnorms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return every BatchNorm of a model by its (first) name.

    Raises:
        ValueError: If the model has none, or contains modules that cannot be converted.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which has registered its parameters "
            "already: convert the model before DistributedDataParallel wraps it"
        )
    found, frozen = {}, []
    for name, module in model.named_modules():
        place = _place(name)
        if isinstance(module, torch.jit.ScriptModule):
            if module is model or "BatchNorm" in module.original_name:
                raise ValueError(
                    f"{place} is scripted, and a scripted module cannot be changed: "
                    "convert the model first, then script it"
                )
        elif any(is_lazy(a) for a in (*module._parameters.values(), *module._buffers.values())):
            raise ValueError(
                f"{place} ({type(module).__name__}) is not initialized yet: "
                "run the model once on an input, then convert it"
            )
        elif isinstance(module, _BatchNorm):
            found[name] = module
        elif "FrozenBatchNorm" in type(module).__name__:
            frozen.append(place)
    if not found:
        raise ValueError(f"no BatchNorm in {type(model).__name__}: {_remedy(frozen)}")
    return found


def _place(name: str) -> str:
    return f"{name!r}" if name else "the model"


def _remedy(frozen: list[str]) -> str:
    if frozen:
        return (
            f"{frozen[0]} is a frozen BatchNorm with constant statistics; build the model with "
            "nn.BatchNorm2d, load its weights, and convert it with init='bn'"
        )
    return "there is nothing to convert"


def check_can_start(name: str, norm: _BatchNorm, init: str) -> None:
    """Raise ValueError if AGC cannot be initialized from this BatchNorm as requested."""
    place = f"{_place(name)} ({type(norm).__name__})"
    if init == "bn" and (norm.running_mean is None or norm.running_var is None):
        raise ValueError(
            f"{place} has no running statistics (track_running_stats=False), which init='bn' "
            "needs: use init='paper', or exclude it with `where`"
        )
    if init == "paper" and any(not p.requires_grad for p in norm.parameters(recurse=False)):
        raise ValueError(
            f"{place} is frozen (requires_grad=False), so the untrained values of init='paper' "
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
    probe = copy.deepcopy(norm).eval()
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


def paper_parameters(norm: _BatchNorm, lam: float) -> AGCParameters:
    """Return gamma = 1, beta = 0 and the given lambda; a gamma of all zeros is kept."""
    gamma = 0.0 if has_zero_gamma(norm) else 1.0
    like = _like(norm)
    return _parameters(norm, *(like.new_full((norm.num_features,), a) for a in (gamma, 0, lam)))


def has_zero_gamma(norm: _BatchNorm) -> bool:
    """Return whether all of gamma is 0, as in a zero-initialized residual branch."""
    gamma = norm.weight
    return gamma is not None and not gamma.is_meta and not gamma.any()


def eval_parameters(norm: _BatchNorm) -> AGCParameters:
    """Return a BatchNorm in eval mode as Eq. 1 with lambda = 0.

    gamma' = gamma / sqrt(var + eps), beta' = beta - gamma' * mean
    """
    mean, var = norm.running_mean, norm.running_var
    assert mean is not None
    assert var is not None
    gain = torch.rsqrt(var.to(accumulate_dtype(var.dtype)) + norm.eps)
    if norm.weight is not None:
        gain = gain * norm.weight
    bias = -gain * mean
    if norm.bias is not None:
        bias = bias + norm.bias
    return _parameters(norm, gain, bias, torch.zeros_like(gain))


def _parameters(norm: _BatchNorm, gain: Tensor, bias: Tensor, mean_scale: Tensor) -> AGCParameters:
    """Make parameters with the dtype and requires_grad of the BatchNorm's."""
    dtype = _like(norm).dtype

    def parameter(value: Tensor, own: Tensor | None) -> nn.Parameter:
        return nn.Parameter(value.detach().to(dtype), own is None or own.requires_grad)

    return AGCParameters(
        parameter(gain, norm.weight),
        parameter(bias, norm.bias),
        parameter(mean_scale, norm.weight),
    )


def _like(norm: _BatchNorm) -> Tensor:
    """Return a tensor of the norm's dtype and device; fp32 without parameters and buffers."""
    for a in (norm.weight, norm.running_mean):
        if a is not None:
            return a.detach()
    return torch.empty(0)
