"""The plan of a conversion, norm by norm, and the report of it.

A Site is a norm with the convolution and the activation around it. `build` makes its new layers.
The Report lists the conversion of every norm.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..ops.activation import ActivationName, name_of_module
from ..ops.layout import accumulate_dtype
from ..ops.reference import norm_scale
from .dataflow import Dataflow, has_hooks
from .replace import known_padding, make_agc_conv, make_agc_layer
from .start import AGCParameters

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
HE_NORM = math.sqrt(2.0)  # expected norm of a filter before a ReLU under He initialization


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
    """Return the factor (C,) that brings each output channel's filters to He's norm.

    A channel whose filters are zero has a factor of 1.
    """
    weight = layer.weight.transpose(0, 1) if isinstance(layer, _TRANSPOSED) else layer.weight
    weight = weight.to(accumulate_dtype(weight.dtype))
    return norm_scale(weight, HE_NORM)


@torch.no_grad()
def scale_filters_(layer: _ConvNd | nn.Linear, scale: Tensor) -> None:
    """Multiply the filters and bias of each output channel by scale (C,), in place."""
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
    if not isinstance(conv, (*_CONVOLUTIONS, *_TRANSPOSED)):
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
    """Level of a conversion, from the most to the least that is fused."""

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
        match: Convolution and activation of the BatchNorm, or why they cannot fuse.
        trailing: Layers inside of the BatchNorm that follow the normalization.
        source: The layer before it whose filters can be scaled, or None.
        dims: Spatial dimensions of its maps.
        level: Level of its conversion.
        reason: Why the level is lower than planned, or None.
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
        """Lower the level, unless it is as low already."""
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
        """Return the modules whose values change: the filters of one may be scaled."""
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
        parts: Names of the layers that an AGCConv was fused from.
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
    standardize: bool = False,
    of: Callable[[nn.Module], nn.Module] = _same,
) -> Built:
    """Build the layers of a site.

    Args:
        site: The plan; its level must not be SKIPPED.
        parameters: Parameters of the AGC layer.
        conv_bias: Bias of the convolution, which becomes part of beta.
        standardize: Give an AGCConv weight_standardization.
        of: The module of a copy of the model for a module of the model.
    """
    norm, trailing = of(site.norm), [of(layer) for layer in site.trailing]
    if site.level >= Level.REPLACED or isinstance(site.match, str):
        layer: nn.Module = make_agc_layer(site.dims, parameters).train(norm.training)
        new = nn.Sequential(layer, *trailing) if trailing else layer
        return Built(layer, "none", [], trailing, {norm: new})
    conv, activation = of(site.match.conv), site.match.activation
    parts = ["transposed convolution" if isinstance(conv, _TRANSPOSED) else "convolution"]
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
    neuron = make_agc_conv(conv, parameters, activation, conv_bias, standardize)
    neuron.train(norm.training)
    replacements[conv] = neuron
    replacements[norm] = nn.Sequential(*trailing) if trailing else nn.Identity()
    return Built(neuron, activation, parts, trailing, replacements)


@dataclass(frozen=True)
class Change:
    """The conversion of one BatchNorm.

    Attributes:
        name: Name of the BatchNorm in the model; empty if it is the model itself.
        was: Class name before the conversion.
        became: Class name after the conversion; for fused layers with the name of the convolution
            and the activation.
        kind: "fused" (into one AGCConv with its convolution), "replaced" (by AGC1d/2d/3d) or
            "skipped" (unchanged).
        why: Reason for the kind, and notes on the initialization.
        saved_bytes: Bytes that only the AGC layer or neuron saves for the backward on the example,
            besides the input of a convolution; None without an example. An AGC layer that is not
            fused saves its input.
    """

    name: str
    was: str
    became: str
    kind: Literal["fused", "replaced", "skipped"]
    why: str
    saved_bytes: int | None = None


@dataclass(frozen=True)
class Report:
    """All changes to a model, in module order. Print it for a table.

    Attributes:
        changes: The conversion of every BatchNorm.
        new_parameters: Names of the parameters that the conversion created. An optimizer created
            before it does not have them.
        scaled_layers: Names of the convolutions and linear layers that end a residual branch, or
            another operand of a sum, without a norm after them, with the factor of their filters.
        corrected: Names of the AGC layers that were scaled because their maps were too large or too
            small on the example.
        blocks: Number of residual additions found in the model; only init="scratch" looks for them.
        missing: Why residual additions may be missing, or None.
        constant: Names of the BatchNorms that start at a lambda near 1 and are followed by a mean
            over the whole map, so that the features computed from it are the same for all inputs.
        untied: Gammas and betas that were shared by several BatchNorms and no longer are.
        unverified: The part that was not verified, and the reason; None if the example showed the
            same values before and after in evaluation and in training mode.
        difference: Only for init="bn" with an example: largest difference of the outputs before
            and after, relative to the largest output.
        disabled_fusers: Names of the methods that fold BatchNorms (fuse, reparameterize), which now
            leave their module unchanged.
        saved_bytes: Bytes that the whole model saves for the backward on the example, or None.
    """

    changes: tuple[Change, ...]
    new_parameters: tuple[str, ...] = ()
    scaled_layers: tuple[tuple[str, float], ...] = ()
    corrected: tuple[str, ...] = ()
    blocks: int = 0
    missing: str | None = None
    constant: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()
    unverified: str | None = None
    difference: float | None = None
    saved_bytes: int | None = None
    disabled_fusers: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def count(self, kind: Literal["fused", "replaced", "skipped"]) -> int:
        """Return the number of BatchNorms that were fused, replaced or skipped."""
        return Counter(change.kind for change in self.changes)[kind]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "was", "became", "saves", "why")]
        rows += [
            (c.name or "(the model)", c.was, c.became, _size(c.saved_bytes), c.why)
            for c in self.changes
        ]
        if self.saved_bytes is None:
            rows = [(*row[:3], *row[4:]) for row in rows]
        last = len(rows[0]) - 1
        widths = [max(len(row[i]) for row in rows) for i in range(last)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[last]])
            for row in rows
        ]
        total = ", ".join(f"{self.count(k)} {k}" for k in ("fused", "replaced", "skipped"))
        return "\n".join([*(line.rstrip() for line in lines), total, *self._summary()])

    def _summary(self) -> Iterator[str]:
        if self.blocks:
            yield f"{self.blocks} residual additions"
        if self.scaled_layers:
            layers = tuple(f"{name} by {gain:.2f}" for name, gain in self.scaled_layers)
            some = _some(layers, "scaled_layers")
            yield f"filters scaled at the end of summed branches: {some}"
        if self.corrected:
            number = len(self.corrected)
            corrected = f"{number} layer{'s' * (number > 1)}"
            yield f"{corrected} rescaled to fit the example (Report.corrected)"
        if self.missing:
            yield f"residual branches were not all found: {self.missing}"
        if self.constant:
            yield f"constant features until lambda changes: {_some(self.constant, 'constant')}"
        if self.untied:
            yield f"no longer tied: {_some(self.untied, 'untied')}"
        if self.unverified:
            yield f"not verified: {self.unverified}"
        else:
            yield "verified on the example in evaluation and training mode"
        if self.difference is not None:
            yield f"outputs on the example differ by {self.difference:.1e} of the largest"
        if self.saved_bytes is not None:
            replaced = sum(c.saved_bytes or 0 for c in self.changes if c.kind == "replaced")
            total = _size(self.saved_bytes)
            yield f"{total} saved for backward, {_size(replaced)} of it by unfused AGC layers"
        if self.disabled_fusers:
            methods = _some(self.disabled_fusers, "disabled_fusers")
            yield f"disabled, because they fold BatchNorms: {methods}"
        if self.new_parameters:
            count = len(self.new_parameters)
            yield f"{count} new parameters: create the optimizer after the conversion"


def _size(count: int | None) -> str:
    """Return a number of bytes with its unit."""
    if count is None:
        return "-"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _some(names: tuple[str, ...], attribute: str) -> str:
    """Return the first names, and how many follow."""
    if len(names) <= 4:
        return ", ".join(names)
    return f"{', '.join(names[:3])}, and {len(names) - 3} more (Report.{attribute})"
