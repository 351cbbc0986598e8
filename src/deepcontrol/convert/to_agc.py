"""Convert a model from BatchNorm to AGC (automatic gain control)."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..ops.activation import name_of_module
from .dataflow import observe_maps, trace_dataflow
from .layers import (
    AGCParameters,
    ConvNormAct,
    check_can_start,
    eval_parameters,
    find_batchnorms,
    has_zero_gamma,
    make_agc_conv,
    make_agc_layer,
    match_conv_norm_act,
    paper_parameters,
    replace_modules,
    trailing_layers,
    warn_dropped_hooks,
)

Init = Literal["paper", "bn"]
Where = Callable[[str, nn.Module], bool]


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
    """

    name: str
    was: str
    became: str
    kind: Literal["fused", "replaced", "skipped"]
    why: str


@dataclass(frozen=True)
class Report:
    """All changes to a model, in module order. Print it for a table."""

    changes: tuple[Change, ...]

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def count(self, kind: Literal["fused", "replaced", "skipped"]) -> int:
        """Return the number of BatchNorms that were fused, replaced or skipped."""
        return Counter(change.kind for change in self.changes)[kind]

    def __str__(self) -> str:
        rows = [("layer", "was", "became", "why")]
        rows += [(c.name or "(the model)", c.was, c.became, c.why) for c in self.changes]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        total = ", ".join(f"{self.count(k)} {k}" for k in ("fused", "replaced", "skipped"))
        return "\n".join([*(line.rstrip() for line in lines), total])


@overload
def to_agc(
    model: nn.Module,
    where: Where | None = None,
    init: Init = "paper",
    example: Any = None,
    report: Literal[False] = False,
) -> nn.Module: ...


@overload
def to_agc(
    model: nn.Module,
    where: Where | None = None,
    init: Init = "paper",
    example: Any = None,
    *,
    report: Literal[True],
) -> tuple[nn.Module, Report]: ...


def to_agc(
    model: nn.Module,
    where: Where | None = None,
    init: Init = "paper",
    example: Any = None,
    report: bool = False,
) -> nn.Module | tuple[nn.Module, Report]:
    """Replace every BatchNorm of a model by AGC (automatic gain control), in place.

    If a convolution feeds a BatchNorm directly and nothing else, the two become one AGCConv at the
    convolution's place, together with a ReLU, LeakyReLU, SiLU or GELU after them. This also saves
    the memory of the normalization. nn.Identity is left at the other places, so no module changes
    its name or index. Every other BatchNorm becomes AGC1d/2d/3d.

    BatchNorm1d/2d/3d, SyncBatchNorm and their subclasses are converted. The filters stay the same
    nn.Parameter objects; gains, biases and lambdas are new, so create the optimizer afterwards.

    Only forward is traced. If another method of the model calls a convolution separately, exclude
    its BatchNorm with `where`.

    Args:
        model: The model to convert. It is changed in place.
        where: where(name, batchnorm) -> bool selects the BatchNorms to convert. Default: all.
        init: Initialization of the AGC layers.

            "paper": gamma 1, beta 0, lambda 1, for training. A trained gamma and beta are not kept,
            because they belong to maps of mean 0 and variance 1; only a gamma of all zeros is,
            because it makes a residual branch start as its shortcut. The filters do not change. To
            train from scratch, call he_init_(model) *before* the conversion: AGC needs it.

            "bn": gamma and beta that compute the same as the trained BatchNorm in eval mode, with
            lambda 0. The outputs stay the same up to rounding.
        example: An input of the model, a tuple of inputs or a dict of keyword arguments. The model
            runs on it once, in eval mode. This finds maps of one position (squeeze-and-excitation,
            the pooling of ASPP), where the mean is the value itself, so that lambda starts at 0
            there. Without it, only a BatchNorm1d after a linear layer is known to have such maps.
            It also shows which module calls which if torch.fx cannot trace the model; without it,
            convolution and BatchNorm stay two layers there.
        report: Also return a Report, a table of all changes and their reasons.

    Returns:
        The converted model (the same object, unless the model itself is a BatchNorm), or
        (model, Report) with report=True.

    Raises:
        ValueError: If the model has no BatchNorm, or one that cannot be converted. The model is
            then unchanged.

    Reference:
        Brendan Ruff, "Deep Control: a simple automatic gain control for memory efficient and high
        performance training of deep convolutional neural networks".

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    >>> model, table = to_agc(model, report=True)
    >>> print(table)
    layer  was          became                 why
    1      BatchNorm2d  AGCConv2d at 0 (relu)  fused with its convolution and ReLU
    1 fused, 0 replaced, 0 skipped
    """
    if init not in get_args(Init):
        raise ValueError(f"unknown init {init!r}: choose one of {', '.join(get_args(Init))}")
    conversion = _Conversion(model, where, init, example)
    changes = []
    # Plan all changes before the first one, so that an error leaves the model unchanged.
    with torch.no_grad():
        for name, norm in conversion.norms.items():
            changes.append(conversion.convert(name, norm))
    for name, module in model.named_modules():
        if module in conversion.replacements:
            warn_dropped_hooks(name, module)
    converted = replace_modules(model, conversion.replacements)
    return (converted, Report(tuple(changes))) if report else converted


class _Conversion:
    """Plan the conversion of a model: fill `replacements` without changing the model."""

    def __init__(self, model: nn.Module, where: Where | None, init: Init, example: Any) -> None:
        self.norms = find_batchnorms(model)
        self.init = init
        self.selected = {m for n, m in self.norms.items() if where is None or where(n, m)}
        self.flow = trace_dataflow(model, self.selected, example)
        self.has_example = example is not None
        self.maps = observe_maps(model, self.selected, example) if self.has_example else {}
        self.names = {module: name for name, module in model.named_modules()}
        self.replacements: dict[nn.Module, nn.Module] = {}

    def convert(self, name: str, norm: _BatchNorm) -> Change:
        """Choose the replacement of one BatchNorm."""
        was = type(norm).__name__
        if norm not in self.selected:
            return Change(name, was, was, "skipped", "excluded by `where`")
        trailing = trailing_layers(norm)
        if trailing is None:
            warnings.warn(
                f"{name} ({was}) is skipped: its forward does more than normalize and call its "
                "children in order. Replace it by hand if it should become AGC",
                stacklevel=3,
            )
            return Change(name, was, was, "skipped", "its class overrides forward")
        check_can_start(name, norm, self.init)
        parameters, notes = self._start(name, norm, trailing)
        match = match_conv_norm_act(norm, self.flow)
        if isinstance(match, str):
            layer = make_agc_layer(self._dims(name, norm), parameters).train(norm.training)
            self.replacements[norm] = nn.Sequential(layer, *trailing) if trailing else layer
            became = " + ".join(type(m).__name__ for m in (layer, *trailing))
            return Change(name, was, became, "replaced", "; ".join([match, *notes]))
        became, why = self._fuse(norm, match, trailing, parameters)
        return Change(name, was, became, "fused", "; ".join([why, *notes]))

    def _fuse(
        self,
        norm: _BatchNorm,
        match: ConvNormAct,
        trailing: list[nn.Module],
        parameters: AGCParameters,
    ) -> tuple[str, str]:
        """Fuse convolution, norm and activation; return `became` and `why`."""
        conv, activation, parts = match.conv, match.activation, ["convolution"]
        if match.activation_module is not None and not trailing:
            self.replacements[match.activation_module] = nn.Identity()
            parts.append(type(match.activation_module).__name__)
        else:
            activation = "none"
        if len(trailing) == 1 and (own := name_of_module(trailing[0])) is not None:
            parts.append(f"built-in {type(trailing[0]).__name__}")
            activation, trailing = own, []
        neuron = make_agc_conv(conv, parameters, activation).train(norm.training)
        self.replacements[conv] = neuron
        self.replacements[norm] = nn.Sequential(*trailing) if trailing else nn.Identity()
        became = f"{type(neuron).__name__} at {self.names[conv]} ({activation})"
        return became, f"fused with its {' and '.join(parts)}"

    def _start(
        self, name: str, norm: _BatchNorm, trailing: list[nn.Module]
    ) -> tuple[AGCParameters, list[str]]:
        """Return the initial parameters of the AGC layer, and notes on them for the report."""
        notes = []
        single = self._single_position(norm)
        if single:
            notes.append(f"lambda 0: {single}")
        elif self.has_example and norm not in self.maps:
            notes.append("not reached by the example")
        if self.init == "bn":
            return eval_parameters(norm), notes
        if has_zero_gamma(norm):
            notes.append("gamma 0 kept")
        # A trailing activation lies between the norm and the pooling.
        if not single and not trailing and self.flow.feeds_global_pool(norm):
            notes.append("hazard: global average pooling follows")
            warnings.warn(
                f"{name} is followed by global average pooling: at lambda 1 every map has mean "
                "beta, so the pooled features stay constant until lambda has changed. Exclude it "
                "with `where`, or start it at lambda 0",
                stacklevel=4,
            )
        return paper_parameters(norm, lam=0.0 if single else 1.0), notes

    def _single_position(self, norm: _BatchNorm) -> str | None:
        """Return how the maps of the norm are known to have one position, or None."""
        if norm in self.maps:
            return "maps of one position" if self.maps[norm][1] == 1 else None
        if isinstance(self.flow.sole_producer(norm), nn.Linear):
            return "one position after a linear layer"
        return None

    def _dims(self, name: str, norm: _BatchNorm) -> int:
        """Return the number of spatial dimensions; SyncBatchNorm works for any number."""
        for d in (1, 2, 3):
            if isinstance(norm, getattr(nn, f"BatchNorm{d}d")):
                return d
        if norm in self.maps:
            return max(self.maps[norm][0], 1)
        conv_dims = {
            d for d in (1, 2, 3) for m in self.names if isinstance(m, getattr(nn, f"Conv{d}d"))
        }
        if len(conv_dims) != 1:
            raise ValueError(
                f"{name!r} ({type(norm).__name__}) accepts maps of 1, 2 or 3 dimensions, and the "
                "model's convolutions do not determine which: pass example="
            )
        return conv_dims.pop()
