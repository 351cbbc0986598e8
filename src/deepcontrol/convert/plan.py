"""Plan the conversion of each BatchNorm: how far it is fused, and the layers that replace it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..ops.activation import ActivationName, name_of_module
from .layers import ConvNormAct, make_agc_conv, make_agc_layer
from .start import AGCParameters


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
