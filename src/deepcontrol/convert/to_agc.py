"""Convert a model from BatchNorm to AGC (automatic gain control)."""

import math
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..nn.agc import _AGC
from ..nn.conv import _AGCConv
from ..nn.init import CENTERING_GAIN, he_filter_norm, he_init_, set_filters_
from .batchnorms import (
    Where,
    check_can_start,
    find_batchnorms,
    keeps_function,
    refuse_frozen,
    select_batchnorms,
    trailing_layers,
    warn_trained,
)
from .calibrate import reestimate_statistics
from .dataflow import trace_dataflow
from .layers import match_conv_norm_act, scalable_source, scale_filters_
from .plan import Built, Level, Site, build
from .replace import replace_modules
from .report import Change, Report
from .residual import Additions, find_additions
from .start import (
    AGCParameters,
    batchnorm_parameters,
    correct_scales_,
    has_zero_gamma,
    inverse_sigma,
    untrained_parameters,
)
from .verify import Trial, settle

Init = Literal["scratch", "paper", "bn", "centered"]


@overload
def to_agc(
    model: nn.Module,
    where: Where | None = None,
    init: Init = "scratch",
    example: Any = None,
    report: Literal[False] = False,
    *,
    data: Iterable[Any] | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module: ...


@overload
def to_agc(
    model: nn.Module,
    where: Where | None = None,
    init: Init = "scratch",
    example: Any = None,
    *,
    report: Literal[True],
    data: Iterable[Any] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[nn.Module, Report]: ...


def to_agc(
    model: nn.Module,
    where: Where | None = None,
    init: Init = "scratch",
    example: Any = None,
    report: bool = False,
    *,
    data: Iterable[Any] | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module | tuple[nn.Module, Report]:
    """Replace every BatchNorm of a model by AGC (automatic gain control), in place.

    If a convolution feeds a BatchNorm directly and nothing else, the two become one AGCConv at the
    convolution's place, together with a ReLU, LeakyReLU, SiLU or GELU after them. This also saves
    the memory of the normalization. nn.Identity is left at the other places, so no module changes
    its name or index. Every other BatchNorm becomes AGC1d/2d/3d.

    BatchNorm1d/2d/3d, SyncBatchNorm and their subclasses are converted. The filters stay the same
    nn.Parameter objects; gains, biases and lambdas are new. Create the optimizer afterwards: one
    that exists already does not train them. Report.new_parameters has their names.

    To train from scratch: to_agc(model, example=images), then SGD with momentum 0.9, weight decay
    on the filters (param_groups), a warm-up, and a learning rate of 0.02 x batch size for
    segmentation or 0.1 x (batch size / 128)^0.75 for classification.

    Fused layers of init="scratch" have weight_norm, which a state dict does not record: load it
    into a model that was converted with the same init.

    Only forward is traced. If another method of the model calls a convolution separately, exclude
    its BatchNorm with `where`.

    Args:
        model: The model to convert. It is changed in place.
        where: The BatchNorms to convert: where(name, batchnorm) -> bool, a name, a glob
            ("layer4.*"), or a list of these. Default: all.
        init: Initialization.

            "scratch": for training from scratch. The whole model is initialized (with `where`, only
            the selected BatchNorms and the layers that feed them): filters by He
            fan-in (he_init_), beta 0, lambda 1, and gamma 1.21, which makes up for the variance of
            the mean that is subtracted. The last layer of every residual branch starts at
            branch_gain(number of residual additions) times that, so that the variance of the signal
            stays bounded over depth; other summed maps start at 1 / sqrt(number of operands).
            With an example, layers whose maps are more than a factor of 2 off (after gates, for
            example) are scaled; use a few images like those that you train on. Fused layers have
            weight_norm (see AGCConv2d), which trains better and tolerates higher learning rates.

            "paper": gamma 1, beta 0, lambda 1, whatever the residual structure. The filters do not
            change: call he_init_(model) *before* the conversion. A gamma of all zeros is kept.

            "bn": for fine-tuning. Gamma and beta compute the same as the trained BatchNorm in eval
            mode, with lambda 0. The outputs stay the same up to rounding.

            "centered": for fine-tuning on images that differ from the training images. As "bn", but
            with lambda 1 and beta as trained: the sample's own mean replaces the running mean.
            Maps of one position, and those before global average pooling, start as with "bn".

            With "bn" and "centered" the filters W of a convolution that feeds only the BatchNorm
            become W / sigma, in place, and gamma stays as trained. The function is the same, and
            fine-tuning does not depend on the scale of the filters, as with BatchNorm. Code outside
            of the model that reads the same filters sees the change.
        example: An input of the model, a tuple of inputs or a dict of keyword arguments. The model
            runs on it once, in eval mode. This finds maps of one position (squeeze-and-excitation,
            the pooling of ASPP), where the mean is the value itself, so that lambda starts at 0
            there. Without it, only a BatchNorm1d after a linear layer is known to have such maps.
            It also shows which module calls which, and what is added to what, if torch.fx cannot
            trace the model; without it, convolution and BatchNorm stay two layers there.
        report: Also return a Report, a table of all changes and their reasons.
        data: Only for "bn" and "centered": batches of new images, on which the statistics of all
            BatchNorms are estimated again first (reestimate_statistics).
        generator: Random number generator for the filters of init="scratch"; torch's default if
            None.

    Returns:
        The converted model (the same object, unless the model itself is a BatchNorm), or
        (model, Report) with report=True.

    Raises:
        ValueError: If the model has no BatchNorm, or one that cannot be converted, or if a name in
            `where` matches none. The model is then unchanged.

    Warns:
        UserWarning: If the BatchNorms have trained statistics that `init` discards.

    Reference:
        Brendan Ruff, "Deep Control: a simple automatic gain control for memory efficient and high
        performance training of deep convolutional neural networks".

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    >>> model, table = to_agc(model, report=True)
    >>> print(table)
    layer  was          became                 why
    1      BatchNorm2d  AGCConv2d at 0 (relu)  fused with its convolution and ReLU
    1 fused, 0 replaced, 0 skipped
    3 new parameters: create the optimizer after the conversion
    """
    if init not in get_args(Init):
        raise ValueError(f"unknown init {init!r}: choose one of {', '.join(get_args(Init))}")
    if data is not None and not keeps_function(init):
        raise ValueError(
            f"data is for the statistics of trained BatchNorms, and init={init!r} discards them: "
            "use init='bn' or 'centered', or leave out data"
        )
    conversion = _Conversion(model, where, init, example)
    if init == "scratch":
        refuse_frozen({name: layer for layer, name in conversion.initialized.items()})
    if data is not None:
        reestimate_statistics(model, data)
    warn_trained(conversion.selected, init)
    changes = []
    # Plan all changes before the first one, so that an error leaves the model unchanged.
    with torch.no_grad():
        for name, norm in conversion.norms.items():
            changes.append(conversion.convert(name, norm))
    before = set(model.parameters())
    scaled = conversion.initialize(model, generator)
    converted = replace_modules(model, conversion.replacements)
    corrected = set[nn.Module]()
    if init == "scratch" and example is not None:
        corrected = correct_scales_(converted, example, conversion.targets)
    if not report:
        return converted
    new = tuple(name for name, p in converted.named_parameters() if p not in before)
    found = conversion.additions
    names = tuple(name for name, module in converted.named_modules() if module in corrected)
    return converted, Report(tuple(changes), new, scaled, names, found.blocks, found.missing)


class _Conversion:
    """Plan the conversion of a model: fill `replacements` without changing the model."""

    def __init__(self, model: nn.Module, where: Where | None, init: Init, example: Any) -> None:
        self.norms = find_batchnorms(model)
        self.init = init
        self.selected = select_batchnorms(self.norms, where)
        for name, norm in self.norms.items():
            if norm in self.selected and trailing_layers(norm) is not None:
                check_can_start(name, norm, init)
        self.flow = trace_dataflow(model, self.selected, example)
        self.trial = Trial(model, self.selected, example) if example is not None else None
        self.maps = self.trial.maps if self.trial is not None else {}
        self.names = {module: name for name, module in model.named_modules()}
        self.replacements: dict[nn.Module, nn.Module] = {}
        self.additions = Additions()
        if init == "scratch":
            self.additions = find_additions(model, self.flow, example)
        self.owners = Counter(
            p for module in model.modules() for p in module._parameters.values() if p is not None
        )
        self.filter_scales: dict[_ConvNd | nn.Linear, Tensor] = {}
        # The layers that "scratch" initializes: with `where`, those that feed a selected BatchNorm.
        self.whole = where is None
        sources = {self.flow.sole_producer(norm) for norm in self.selected}
        self.initialized = {
            module: name
            for module, name in self.names.items()
            if isinstance(module, (_ConvNd, nn.Linear)) and (self.whole or module in sources)
        }
        self.targets: dict[nn.Module, float] = {}  # deviation at the start, if it is not 1
        self.sites = self._plan()

    def _plan(self) -> dict[nn.Module, Site]:
        """Plan the conversion of each BatchNorm, and verify the plan on the example."""
        sites: dict[nn.Module, Site] = {}
        for name, norm in self.norms.items():
            trailing = trailing_layers(norm) if norm in self.selected else None
            if trailing is not None:
                match = match_conv_norm_act(norm, self.flow)
                source = scalable_source(norm, self.flow)
                if source is not None and any(
                    self.owners[p] != 1 for p in source.parameters(recurse=False)
                ):
                    source = None
                sites[norm] = Site(name, norm, match, trailing, source, self._dims(name, norm))
        if self.trial is not None:
            settle(self.trial, list(sites.values()))
        return sites

    def convert(self, name: str, norm: _BatchNorm) -> Change:
        """Choose the replacement of one BatchNorm."""
        was = type(norm).__name__
        if norm not in self.selected:
            return Change(name, was, was, "skipped", "excluded by `where`")
        if norm not in self.sites:
            warnings.warn(
                f"{name} ({was}) is skipped: its forward does more than normalize and call its "
                "children in order. Replace it by hand if it should become AGC",
                stacklevel=3,
            )
            return Change(name, was, was, "skipped", "its class overrides forward")
        site = self.sites[norm]
        if site.level == Level.SKIPPED:
            warnings.warn(
                f"{name} ({was}) is skipped: {site.reason}. Replace it by hand if it should become "
                "AGC",
                stacklevel=3,
            )
            return Change(name, was, was, "skipped", site.reason or "")
        parameters, notes = self._start(name, norm, site)
        if site.reason is not None:
            notes.insert(0, f"verified: {site.reason}")
        if site.level >= Level.REPLACED:
            built = build(site, parameters)
            became = " + ".join(type(m).__name__ for m in (built.layer, *built.trailing))
            why = site.match if isinstance(site.match, str) else "not fused"
        else:
            built, became, why = self._fuse(site, parameters)
        self.replacements |= built.replacements
        if norm in self.additions.gains:
            self.targets[built.layer] = self.additions.gains[norm].gain
        kind: Literal["fused", "replaced"] = "fused" if built.parts else "replaced"
        return Change(name, was, became, kind, "; ".join([why, *notes]))

    def _fuse(self, site: Site, parameters: AGCParameters) -> tuple[Built, str, str]:
        """Fuse convolution, norm and activation; return the layers, `became` and `why`."""
        assert not isinstance(site.match, str)
        conv = site.match.conv
        from_scratch = self.init == "scratch"
        bias = None if from_scratch else conv.bias  # "scratch" sets it to 0
        if bias is not None and conv in self.filter_scales:
            bias = bias * self.filter_scales[conv]
        built = build(site, parameters, conv_bias=bias, weight_norm=from_scratch)
        neuron, found = built.layer, self.additions
        assert isinstance(neuron, _AGCConv)
        linear = site.norm in found.linear and not built.trailing
        if from_scratch and site.norm not in found.gains and not linear:
            # An activation that is not part of the neuron follows: He's factor of 2 for it.
            neuron.gain.mul_(math.sqrt(2) / he_filter_norm(neuron))
        became = f"{type(neuron).__name__} at {self.names[conv]} ({built.activation})"
        return built, became, f"fused with its {' and '.join(built.parts)}"

    def _start(self, name: str, norm: _BatchNorm, site: Site) -> tuple[AGCParameters, list[str]]:
        """Return the initial parameters of the AGC layer, and notes on them for the report."""
        notes = []
        single = self._single_position(norm)
        if single:
            notes.append(f"lambda 0: {single}")
        elif self.trial is not None and norm not in self.maps:
            notes.append("not reached by the example")
        # A trailing activation lies between the norm and the pooling.
        pooled = not single and not site.trailing and self.flow.feeds_global_pool(norm)
        if keeps_function(self.init):
            centered = self.init == "centered" and not single and not pooled
            if self.init == "centered" and pooled:
                notes.append("lambda 0: global average pooling follows")
            return self._continue(site, centered), notes
        if pooled:
            notes.append("hazard: global average pooling follows")
            warnings.warn(
                f"{name} is followed by global average pooling: at lambda 1 every map has mean "
                "beta, so the pooled features stay constant until lambda has changed. Exclude it "
                "with `where`, or start it at lambda 0",
                stacklevel=4,
            )
        gamma = CENTERING_GAIN if self.init == "scratch" and not single else 1.0
        if norm in self.additions.gains:
            end = self.additions.gains[norm]
            gamma *= end.gain
            notes.append(f"{end}: gamma {gamma:.2f}")
        elif has_zero_gamma(norm):
            gamma = 0.0
            notes.append("gamma 0 kept")
        return untrained_parameters(norm, gamma, lam=0.0 if single else 1.0), notes

    def _continue(self, site: Site, centered: bool) -> AGCParameters:
        """Return parameters that continue from the BatchNorm; plan to scale its filters."""
        if site.scales() and site.source is not None:
            self.filter_scales[site.source] = inverse_sigma(site.norm)
        return batchnorm_parameters(
            site.norm, centered=centered, normalized_filters=site.scales()
        )

    def initialize(
        self, model: nn.Module, generator: torch.Generator | None
    ) -> tuple[tuple[str, float], ...]:
        """Change the parameters of the model itself; return the layers scaled for an addition."""
        for source, scale in self.filter_scales.items():
            scale_filters_(source, scale)
        scaled = []
        if self.init == "scratch":
            for part in [model] if self.whole else self.initialized:
                he_init_(part, generator)
            done = set[nn.Parameter]()  # layers may share their filters
            for layer, end in self.additions.gains.items():
                if not isinstance(layer, (_ConvNd, nn.Linear, _AGC)) or layer.weight in done:
                    continue
                if not self.whole and layer not in self.initialized:
                    continue
                if _scale_(layer, end.gain):
                    scaled.append((self.names[layer], end.gain))
                    done.update(layer.parameters(recurse=False))
        return tuple(scaled)

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


@torch.no_grad()
def _scale_(layer: nn.Module, factor: float) -> bool:
    """Scale the gamma of a layer, or its filters if it has none; return whether it has either."""
    gain = getattr(layer, "weight" if isinstance(layer, _AGC) else "gain", None)
    if gain is not None:
        gain.mul_(factor)
    elif isinstance(layer, (_ConvNd, nn.Linear)):
        set_filters_(layer, factor * layer.weight)
    else:
        return False
    return True
