"""Plan the conversion of each norm: match it with its neighbors, and build the new layers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..nn import AGC1d, AGC2d, AGC3d, AGCConv1d, AGCConv2d, AGCConv3d
from ..nn.agc import _AGC
from ..nn.conv import _AGCConv
from ..ops.activation import ActivationName, name_of_module
from ..ops.layout import accumulate_dtype
from ..ops.reference import norm_scale, square_norm
from .dataflow import Dataflow, has_hooks
from .padding import known_padding
from .start import AGCParameters

_AGC_CONVS: dict[int, type[_AGCConv]] = {1: AGCConv1d, 2: AGCConv2d, 3: AGCConv3d}
_AGC_LAYERS: dict[int, type[_AGC]] = {1: AGC1d, 2: AGC2d, 3: AGC3d}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
HE_NORM = math.sqrt(2.0)  # of a filter before a ReLU, as it is initialized


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
    if has_hooks(norm):
        return f"the {type(norm).__name__} has hooks"
    after = flow.sole_consumer(norm)
    if (
        after is not None
        and after not in flow.unconfirmed
        and flow.sole_producer(after) is norm
        and not has_hooks(after)
        and not _is_patched(after)
    ):
        name = name_of_module(after)
        if name is not None:
            return ConvNormAct(conv, name, after)
    return ConvNormAct(conv)


def scalable_source(norm: nn.Module, flow: Dataflow) -> _ConvNd | nn.Linear | None:
    """Return the layer before a norm if its filters can be rescaled, or None.

    Its output must feed only the norm, and be linear in filters and bias that no other layer has.
    """
    source = flow.sole_producer(norm)
    if not isinstance(source, (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear)):
        return None
    plain = next(c for c in (*_TRANSPOSED, nn.Linear, nn.Module) if isinstance(source, c))
    overridden = type(source).forward is not plain.forward and known_padding(source) is None
    grouped = isinstance(source, _TRANSPOSED) and source.groups != 1
    if (
        flow.sole_consumer(source) is not norm
        or flow.unconfirmed & {source, norm}
        or overridden
        or _is_patched(source)
        or hasattr(source, "parametrizations")
        or not isinstance(source.weight, nn.Parameter)
        or has_hooks(source)
        or has_hooks(norm)
        or grouped
    ):
        return None
    return source


@torch.no_grad()
def he_scale(layer: _ConvNd | nn.Linear) -> Tensor:
    """Return the factor (C,) that brings the filters of each output channel to He's norm.

    A channel whose filters are zero has a factor of 1.
    """
    weight = layer.weight.transpose(0, 1) if isinstance(layer, _TRANSPOSED) else layer.weight
    weight = weight.to(accumulate_dtype(weight.dtype))
    return norm_scale(square_norm(weight, HE_NORM), HE_NORM)


@torch.no_grad()
def scale_filters_(layer: _ConvNd | nn.Linear, scale: Tensor) -> None:
    """Multiply the filters of each output channel, and the bias, by scale (C,), in place."""
    weight = layer.weight
    channel = 1 if isinstance(layer, _TRANSPOSED) else 0
    shape = [-1 if d == channel else 1 for d in range(weight.dim())]
    weight.copy_(weight.to(scale.dtype) * scale.reshape(shape))
    if layer.bias is not None:
        layer.bias.copy_(layer.bias.to(scale.dtype) * scale)


def _unsupported(conv: nn.Module) -> str | None:
    """Return why an AGCConv cannot replace this module, or None if it can."""
    kind = type(conv).__name__
    if isinstance(conv, nn.Linear):
        return f"{kind} feeds it, and AGCLinear would save copies of its weights"
    if not isinstance(conv, _CONVOLUTIONS):
        return f"{kind} feeds it"
    if hasattr(conv, "parametrizations"):
        return "the convolution is parametrized"
    if _is_patched(conv) or known_padding(conv) is None:
        return f"{kind} overrides forward"
    if not isinstance(conv.weight, nn.Parameter):
        return "the convolution's weight is not a parameter"
    if has_hooks(conv):
        return "the convolution has hooks"
    return None


def _is_patched(module: nn.Module) -> bool:
    """Return whether a method is set on the instance, in place of that of its class."""
    return any(callable(getattr(type(module), name, None)) for name in vars(module))


class Level(IntEnum):
    """How far a BatchNorm is converted, from the most to the least."""

    WITH_ACTIVATION = 0  # one AGCConv with the convolution before and the activation after it
    WITH_CONVOLUTION = 1  # one AGCConv with the convolution before it
    REPLACED = 2  # an AGC layer; "bn" and "centered" scale the filters before it
    UNSCALED = 3  # an AGC layer; the filters before it stay as they are
    SKIPPED = 4  # the BatchNorm stays


@dataclass(eq=False)
class Site:
    """A BatchNorm of the model and the plan for it.

    Attributes:
        name: Name of the BatchNorm.
        norm: The BatchNorm.
        match: Its convolution and activation, or why they cannot fuse.
        trailing: Layers inside of the BatchNorm that follow the normalization.
        source: The layer before it whose filters can be scaled, or None.
        dims: Spatial dimensions of its maps.
        level: How far it is converted.
        reason: Why it is converted less far than planned, or None.
    """

    name: str
    norm: _BatchNorm
    match: ConvNormAct | str
    trailing: list[nn.Module]
    source: _ConvNd | nn.Linear | None
    dims: int
    level: Level = field(init=False)
    reason: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.match, str):
            self.level = Level.REPLACED
        elif self.match.activation_module is not None and not self.trailing:
            self.level = Level.WITH_ACTIVATION
        else:
            self.level = Level.WITH_CONVOLUTION

    def lower(self, level: Level, reason: str) -> None:
        """Convert it less far."""
        if level > self.level:
            self.level, self.reason = level, reason

    def modules(self) -> list[nn.Module]:
        """Return the modules that the plan replaces."""
        if self.level == Level.SKIPPED:
            return []
        if self.level >= Level.REPLACED or isinstance(self.match, str):
            return [self.norm]
        activation = self.match.activation_module
        fused = activation is not None and self.level == Level.WITH_ACTIVATION
        return [self.match.conv, self.norm, *([activation] if fused and activation else [])]

    def changed(self) -> list[nn.Module]:
        """Return the modules whose values the plan changes: the filters of one may be scaled."""
        scaled = [self.source] if self.source is not None and self.scales() else []
        return [*self.modules(), *scaled]

    def scales(self) -> bool:
        """Return whether filters are scaled to start from the trained BatchNorm."""
        return self.source is not None and self.level < Level.UNSCALED


def _same(module: nn.Module) -> nn.Module:
    return module


@dataclass(frozen=True)
class Built:
    """The layers that replace a BatchNorm and its neighbors.

    Attributes:
        layer: The AGC layer or AGCConv.
        activation: Name of the activation in an AGCConv.
        parts: What an AGCConv was fused from.
        trailing: Layers that follow, from inside of the BatchNorm.
        replacements: The new module for each module that is replaced.
    """

    layer: nn.Module
    activation: ActivationName
    parts: list[str]
    trailing: list[nn.Module]
    replacements: dict[nn.Module, nn.Module]


def build(
    site: Site,
    parameters: AGCParameters,
    *,
    conv_bias: Tensor | None = None,
    weight_norm: bool = False,
    of: Callable[[nn.Module], nn.Module] = _same,
) -> Built:
    """Build the layers of a site.

    Args:
        site: The plan; its level must not be SKIPPED.
        parameters: Parameters of the AGC layer.
        conv_bias: Bias of the convolution, which becomes part of beta.
        weight_norm: Normalize the filters of an AGCConv.
        of: The module of a copy of the model for a module of the model.
    """
    norm, trailing = of(site.norm), [of(layer) for layer in site.trailing]
    if site.level >= Level.REPLACED or isinstance(site.match, str):
        layer: nn.Module = make_agc_layer(site.dims, parameters).train(norm.training)
        new = nn.Sequential(layer, *trailing) if trailing else layer
        return Built(layer, "none", [], trailing, {norm: new})
    conv, activation, parts = of(site.match.conv), site.match.activation, ["convolution"]
    assert isinstance(conv, _ConvNd)
    replacements: dict[nn.Module, nn.Module] = {}
    after = site.match.activation_module
    if after is not None and site.level == Level.WITH_ACTIVATION:
        replacements[of(after)] = nn.Identity()
        parts.append(type(after).__name__)
    else:
        activation = "none"
    if len(trailing) == 1 and (own := name_of_module(trailing[0])) is not None:
        parts.append(f"built-in {type(trailing[0]).__name__}")
        activation, trailing = own, []
    neuron = make_agc_conv(conv, parameters, activation, conv_bias, weight_norm=weight_norm)
    neuron.train(norm.training)
    replacements[conv] = neuron
    replacements[norm] = nn.Sequential(*trailing) if trailing else nn.Identity()
    return Built(neuron, activation, parts, trailing, replacements)


def make_agc_conv(
    conv: _ConvNd,
    parameters: AGCParameters,
    activation: ActivationName,
    conv_bias: Tensor | None,
    weight_norm: bool = False,
) -> _AGCConv:
    """Build an AGCConv that shares the filters of a convolution.

    A bias b of the convolution is constant over each map, and AGC leaves gamma (1 - lambda) b of
    it. That is added to beta.
    """
    agc_conv = _AGC_CONVS[conv.weight.dim() - 2]
    options = conv_options(conv) | {"padding": known_padding(conv)}
    # On meta, because all parameters are assigned below.
    neuron = agc_conv(**options, activation=activation, weight_norm=weight_norm, device="meta")
    bias = parameters.bias
    if conv_bias is not None:
        left = parameters.gain * (1 - parameters.mean_scale) * conv_bias.to(parameters.gain)
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
