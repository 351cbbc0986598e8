"""BatchNorm to AGC (automatic gain control), in any model."""

import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args, overload

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .batchnorm import check_can_start, find_batchnorms, layers_inside
from .example import maps_met
from .layers import (
    Control,
    batchnorm_start,
    make_layer,
    make_neuron,
    paper_start,
    starts_at_zero,
)
from .links import Links, find_links
from .neuron import Neuron, activation_name, find_neuron
from .report import Change, Report
from .tree import swap, warn_of_hooks

Init = Literal["paper", "bn"]
Where = Callable[[str, nn.Module], bool]


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
    """Put AGC (automatic gain control) where BatchNorm is, in any model, in place; returns it.

    Where a convolution feeds a BatchNorm directly and feeds nothing else, the two, and the ReLU
    behind them if there is one, become one AGCConv at the convolution's place: then the memory of
    normalization is saved too. nn.Identity is left at the other places, so no name or index moves.
    Every other BatchNorm becomes AGC1d/2d/3d. BatchNorm1d/2d/3d, SyncBatchNorm and their subclasses
    are found wherever they are. Filters stay the very parameters they were; gains, biases and
    lambdas are new, so make the optimizer afterwards.

    where(name, batchnorm): whether to convert this one; all, if not given.

    init: how the layers start.
      "paper": gamma 1, beta 0, lambda 1, for training. A trained gamma and beta are not kept: they
      belong to maps of mean 0 and variance 1, which AGC's are not. A gamma of 0 throughout is: it
      makes a residual branch start as its shortcut. The filters stay as they are. To train
      from scratch start them by He's rule, which AGC relies on: he_init_(model) *before* this.
      "bn": what a trained BatchNorm computes in eval mode, as gain and bias with lambda 0. The
      outputs stay the same, up to rounding.

    example: an input of the model (or a tuple, or a dict of keywords), to find maps of one position
    (squeeze-and-excitation, the pooling of ASPP). There the mean is the value itself, so lambda
    starts at 0. Without an example, only a BatchNorm1d behind a linear layer is known to be one.
    It also shows who calls whom where the model's code is more than torch.fx can follow; without
    it, a convolution and a BatchNorm stay two layers there. Of the code only forward is looked at:
    where other methods call a convolution by itself, leave its BatchNorm out with `where`.

    report: return the model and a Report, a table of what became what and why.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    >>> model, table = to_agc(model, report=True)
    >>> print(table)
    layer  was          became                 why
    1      BatchNorm2d  AGCConv2d at 0 (relu)  with its convolution and ReLU
    1 fused, 0 replaced, 0 skipped
    """
    if init not in get_args(Init):
        raise ValueError(f"unknown init {init!r}: choose one of {', '.join(get_args(Init))}")
    conversion = _Conversion(model, where, init, example)
    changes = []
    with torch.no_grad():  # all is decided before anything changes: an error leaves the model alone
        for name, norm in conversion.norms.items():
            changes.append(conversion.convert(name, norm))
    for name, module in model.named_modules():
        if module in conversion.replacements:
            warn_of_hooks(name, module)
    converted = swap(model, conversion.replacements)
    return (converted, Report(tuple(changes))) if report else converted


class _Conversion:
    """What is known of a model before it changes, and what will stand in place of what."""

    def __init__(self, model: nn.Module, where: Where | None, init: Init, example: Any) -> None:
        self.norms = find_batchnorms(model)
        self.init = init
        self.chosen = {m for n, m in self.norms.items() if where is None or where(n, m)}
        self.links: Links = find_links(model, self.chosen, example)
        self.example = example is not None
        self.met = maps_met(model, self.chosen, example) if self.example else {}
        self.names = {module: name for name, module in model.named_modules()}
        self.replacements: dict[nn.Module, nn.Module] = {}

    def convert(self, name: str, norm: _BatchNorm) -> Change:
        """Decide about one BatchNorm, and note down what takes its place."""
        was = type(norm).__name__
        if norm not in self.chosen:
            return Change(name, was, was, "skipped", "`where` left it out")
        inside = layers_inside(norm)
        if inside is None:
            warnings.warn(
                f"{name} ({was}) is left as it is: it does more than normalize", stacklevel=3
            )
            return Change(name, was, was, "skipped", "its forward is its own")
        check_can_start(name, norm, self.init)
        control, notes = self._start(name, norm, inside)
        neuron = find_neuron(norm, self.links)
        if isinstance(neuron, str):
            layer = make_layer(self._dims(name, norm), control).train(norm.training)
            self.replacements[norm] = nn.Sequential(layer, *inside) if inside else layer
            became = " + ".join(type(m).__name__ for m in (layer, *inside))
            return Change(name, was, became, "replaced", "; ".join([neuron, *notes]))
        became, why = self._fuse(norm, neuron, inside, control)
        return Change(name, was, became, "fused", "; ".join([why, *notes]))

    def _fuse(
        self, norm: _BatchNorm, found: Neuron, inside: list[nn.Module], control: Control
    ) -> tuple[str, str]:
        """Convolution and norm to one neuron; what it became, and why."""
        conv, activation, parts = found.conv, found.activation, ["convolution"]
        if found.activation_module is not None and not inside:
            self.replacements[found.activation_module] = nn.Identity()
            parts.append(type(found.activation_module).__name__)
        else:
            activation = "none"
        if len(inside) == 1 and (own := activation_name(inside[0])) is not None:
            parts.append(f"own {type(inside[0]).__name__}")
            activation, inside = own, []
        neuron = make_neuron(conv, control, activation).train(norm.training)
        self.replacements[conv] = neuron
        self.replacements[norm] = nn.Sequential(*inside) if inside else nn.Identity()
        became = f"{type(neuron).__name__} at {self.names[conv]} ({activation})"
        return became, f"with its {' and '.join(parts)}"

    def _start(
        self, name: str, norm: _BatchNorm, inside: list[nn.Module]
    ) -> tuple[Control, list[str]]:
        """Where the layer starts, and what there is to say about it."""
        notes = []
        single = self._one_position(norm)
        if single:
            notes.append(f"lambda 0: {single}")
        elif self.example and norm not in self.met:
            notes.append("not reached by the example")
        if self.init == "bn":
            return batchnorm_start(norm), notes
        if starts_at_zero(norm):
            notes.append("gamma 0 kept")
        # An activation inside the norm stands between it and the pooling.
        if not single and not inside and self.links.meets_global_mean(norm):
            notes.append("hazard: global average pooling follows")
            warnings.warn(
                f"{name} is followed by global average pooling: at lambda 1 every map has mean "
                "beta, so the pooled features are constant until lambda has moved. Leave it out "
                "with `where`, or start it at lambda 0",
                stacklevel=4,
            )
        return paper_start(norm, lam=0.0 if single else 1.0), notes

    def _one_position(self, norm: _BatchNorm) -> str | None:
        """How it is known that the norm's maps have one position, or None."""
        if norm in self.met:
            return "maps of one position" if self.met[norm][1] == 1 else None
        if isinstance(self.links.only_before(norm), nn.Linear):
            return "behind a linear layer, one position"
        return None

    def _dims(self, name: str, norm: _BatchNorm) -> int:
        """Dimensions of the norm's maps, which SyncBatchNorm does not say."""
        for d in (1, 2, 3):
            if isinstance(norm, getattr(nn, f"BatchNorm{d}d")):
                return d
        if norm in self.met:
            return max(self.met[norm][0], 1)
        everywhere = {
            d for d in (1, 2, 3) for m in self.names if isinstance(m, getattr(nn, f"Conv{d}d"))
        }
        if len(everywhere) != 1:
            raise ValueError(
                f"{name!r} ({type(norm).__name__}) does not say if its maps have 1, 2 or 3 "
                "dimensions: give an example input"
            )
        return everywhere.pop()
