"""Convert a model: plan, verify, choose initial parameters, build layers."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..nn.agc import _AGC
from ..nn.conv import STANDARDIZED_START, _AGCConv
from ..nn.init import CENTERING_GAIN, he_filter_norm, he_init_, set_filters_
from .dataflow import has_hooks, trace_dataflow
from .norms import (
    NormKind,
    Where,
    check_can_start,
    find_norms,
    is_frozen_class,
    keeps_function,
    select_norms,
    spatial_dims,
    trailing_layers,
)
from .plan import (
    Built,
    Change,
    Level,
    Site,
    build,
    he_scale,
    match_conv_norm_act,
    scalable_source,
    scale_filters_,
)
from .replace import set_consumer_
from .residual import NORMS, Additions, find_additions
from .start import (
    NEAR_ONE,
    AGCParameters,
    batchnorm_parameters,
    centering_gain,
    constant_features,
    has_zero_gamma,
    inverse_sigma,
    is_computed,
    untrained_parameters,
)
from .verify import Trial, back_out

Lam = float | Callable[[str], float | None]


class Conversion:
    """Plan the conversion of a model: fill `replacements` without changing the model.

    Args:
        model: The model, with BatchNorms in the place of other norms (norms.stand_ins).
        where, init, example, lam: As in to_agc.
        kinds: The kinds of norms to convert.
        originals: The norm for each stand-in.
    """

    def __init__(
        self,
        model: nn.Module,
        where: Where | None,
        init: str,
        example: Any,
        lam: Lam | None,
        kinds: Sequence[NormKind] = ("batch",),
        originals: Mapping[nn.Module, nn.Module] | None = None,
    ) -> None:
        self.originals = {} if originals is None else originals
        self.norms = find_norms(model, kinds, self.originals)
        self.init = init
        self.lam = lam
        self.selected = select_norms(self.norms, where, self.originals)
        self.trailing: dict[nn.Module, list[nn.Module]] = {}
        for name, norm in self.norms.items():
            if norm in self.selected and isinstance(norm, _BatchNorm):
                trailing = trailing_layers(norm)
                if trailing is not None:
                    self.trailing[norm] = trailing
                    check_can_start(name, norm, self._kind(norm), init)
        self.flow = trace_dataflow(model, self.selected, example)
        self._check_features()
        norms = {norm for norm in self.selected if isinstance(norm, _BatchNorm)}
        self.trial = Trial(model, norms, example) if example is not None else None
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
        # Frozen filters that feed no norm are constants, such as a blur or the bins of a detector.
        self.fixed = [
            module
            for module in self.initialized
            if module not in sources
            and _is_frozen(module.weight)
            and not any(isinstance(m, NORMS) for m in self.flow.consumers[module])
        ]
        for module in self.fixed:
            del self.initialized[module]
        self.targets: dict[nn.Module, float] = {}  # deviation at the start, if it is not 1
        # A network that is frozen as a whole stays frozen.
        parameters = list(model.parameters())
        self.trainable = not parameters or any(p.requires_grad for p in parameters)
        self.layers: dict[nn.Module, nn.Module] = {}  # the AGC layer or AGCConv of each BatchNorm
        self.sites = self._plan()
        self.lambdas = {norm: self._lambda(site) for norm, site in self.sites.items()}
        self.pooled = self._find_pooled()
        if init == "centered":
            self.lambdas |= dict.fromkeys(self.pooled, 0.0)

    def _kind(self, norm: nn.Module) -> str:
        """Return the class name of the norm in the model."""
        return type(self.originals.get(norm, norm)).__name__

    def _check_features(self) -> None:
        """Raise ValueError if a norm has another number of channels than its convolution.

        An InstanceNorm without parameters works with any number.
        """
        for name, norm in self.norms.items():
            conv = self.flow.sole_producer(norm) if norm in self.trailing else None
            if isinstance(conv, _ConvNd) and conv.out_channels != norm.num_features:
                raise ValueError(
                    f"{name!r} ({self._kind(norm)}) has num_features={norm.num_features}, and its "
                    f"convolution has {conv.out_channels} channels: set num_features to that"
                )

    def _plan(self) -> dict[nn.Module, Site]:
        """Plan the conversion of each norm, and verify the plan on the example."""
        sites: dict[nn.Module, Site] = {}
        for name, norm in self.norms.items():
            if norm in self.trailing:
                assert isinstance(norm, _BatchNorm)
                match = match_conv_norm_act(norm, self.flow)
                source = scalable_source(norm, self.flow)
                if source is not None and any(
                    self.owners[p] != 1 for p in source.parameters(recurse=False)
                ):
                    source = None
                sites[norm] = Site(
                    name, norm, match, self.trailing[norm], source, self._dims(name, norm)
                )
        for site in sites.values():
            self._keep_observed(site)
        for parent in self.names:
            # Their forward uses the statistics of the BatchNorm inside.
            if type(parent).__module__.startswith("torch.ao."):
                self.flow.read |= set(parent.children())
        for site in sites.values():
            if site.norm in self.flow.read:
                site.lower(Level.SKIPPED, "other code reads its running statistics")
        if self.trial is not None:
            back_out(self.trial, list(sites.values()))
        return sites

    def _keep_observed(self, site: Site) -> None:
        """Do not fuse across the end of a module with hooks.

        Its hooks would see another output.
        """
        parts = [f"{name}." for module, name in self.names.items() if name and has_hooks(module)]
        for part in parts:
            inside = site.name.startswith(part)
            if site.source is not None and inside != self.names[site.source].startswith(part):
                site.lower(Level.UNSCALED, f"hooks observe {part[:-1]}")
            if isinstance(site.match, str):
                continue
            after = site.match.activation_module
            if inside != self.names[site.match.conv].startswith(part):
                site.lower(Level.REPLACED, f"hooks observe {part[:-1]}")
            elif after is not None and inside != self.names[after].startswith(part):
                site.lower(Level.WITH_CONVOLUTION, f"hooks observe {part[:-1]}")

    def convert(self, name: str, norm: nn.Module) -> Change:
        """Choose the replacement of one norm."""
        was = self._kind(norm)
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
        parameters, notes = self._start(site)
        if site.reason is not None:
            notes.insert(0, f"backed out: {site.reason}")
        if site.level >= Level.REPLACED:
            built = build(site, parameters)
            if is_computed(site.norm):
                notes.append("gamma and beta keep their values, not their parametrization")
            became = " + ".join(type(m).__name__ for m in (built.layer, *built.trailing))
            why = site.match if isinstance(site.match, str) else "not fused"
        else:
            built, became, why = self._fuse(site, parameters)
        self.replacements |= built.replacements
        self.layers[norm] = built.layer
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
        built = build(site, parameters, conv_bias=bias, standardize=from_scratch)
        neuron, found = built.layer, self.additions
        assert isinstance(neuron, _AGCConv)
        linear = site.norm in found.linear and not built.trailing
        if from_scratch and site.norm not in found.gains and not linear:
            # An activation that is not part of the neuron follows: He's factor of 2 for it.
            neuron.gain.mul_(he_filter_norm(conv) / he_filter_norm(neuron))
        became = f"{type(neuron).__name__} at {self.names[conv]} ({built.activation})"
        return built, became, f"fused with its {' and '.join(built.parts)}"

    def _lambda(self, site: Site) -> float:
        """Return the initial lambda of a layer."""
        if self.init == "bn":
            return 0.0
        own = self.lam(site.name) if callable(self.lam) else None
        if own is not None:
            return float(own)
        if self._single_position(site.norm):
            return 0.0
        if self.lam is not None and not callable(self.lam):
            return float(self.lam)
        return STANDARDIZED_START if self._centers_filters(site) else 1.0

    def _centers_filters(self, site: Site) -> bool:
        """Return whether the layer of a site subtracts the mean of its filters' weights."""
        if self.init != "scratch" or site.level >= Level.REPLACED or isinstance(site.match, str):
            return False
        return site.match.conv.in_channels > site.match.conv.groups  # not if they are depthwise

    def _find_pooled(self) -> set[nn.Module]:
        """Return the norms from which only constant features would be computed."""
        centered = [s for n, s in self.sites.items() if self.lambdas[n] > NEAR_ONE]
        if not centered:
            return set()
        if self.trial is not None and self.trial.can_compare:
            sites = [s for s in self.sites.values() if s.level != Level.SKIPPED]
            copied, layers = self.trial.convert_copy(sites, lam=self.lambdas)
            measured = constant_features(copied, layers, self.lambdas, self.trial.example)
            if measured is not None:
                return measured
        # A trailing activation lies between the norm and the pooling.
        return {
            site.norm
            for site in centered
            if not site.trailing
            and not self._single_position(site.norm)
            and self.flow.feeds_global_pool(site.norm)
        }

    def _start(self, site: Site) -> tuple[AGCParameters, list[str]]:
        """Return the AGC layer's initial parameters, and notes on them for the report."""
        norm, lam, notes = site.norm, self.lambdas[site.norm], []
        single = self._single_position(norm)
        if single and lam == 0:
            notes.append(f"lambda 0: {single}")
        elif self.trial is not None and norm not in self.maps:
            notes.append("not reached by the example")
        if keeps_function(self.init):
            if norm in self.pooled:
                notes.append("lambda 0: global average pooling follows")
            return self._continue(site), notes
        if norm in self.pooled:
            notes.append("hazard: global average pooling follows")
        gamma = 1.0
        if self.init == "scratch":  # filters of mean 0 do not pass the mean of the ReLUs either
            gamma = CENTERING_GAIN if self._centers_filters(site) else centering_gain(lam)
        if norm in self.additions.gains:
            end = self.additions.gains[norm]
            gamma *= end.gain
            notes.append(f"{end}: gamma {gamma:.2f}")
        elif has_zero_gamma(norm):
            gamma = 0.0
            notes.append("gamma 0 kept")
        return untrained_parameters(norm, gamma, lam, trainable=self.trainable), notes

    def _continue(self, site: Site) -> AGCParameters:
        """Return parameters that continue from the BatchNorm; plan to scale its filters."""
        scale = None
        if site.scales() and site.source is not None:
            gamma = site.norm._parameters.get("weight")
            shared = sum(norm._parameters.get("weight") is gamma for norm in self.norms.values())
            tied = gamma is not None and shared > 1
            scale = inverse_sigma(site.norm) if tied else he_scale(site.source)
            self.filter_scales[site.source] = scale
        return batchnorm_parameters(
            site.norm,
            lam=self.lambdas[site.norm],
            filter_scale=scale,
            trainable=self.trainable,
        )

    def tie(self) -> list[str]:
        """Tie gains and biases of BatchNorms that share theirs; return those that differ."""
        untied = []
        for name in ("weight", "bias"):
            groups: dict[nn.Parameter, list[nn.Module]] = {}
            for norm, layer in self.layers.items():
                own = norm._parameters.get(name)
                if own is not None:
                    groups.setdefault(own, []).append(layer)
            for layers in groups.values():
                attribute = [_attribute(layer, name) for layer in layers]
                first = getattr(layers[0], attribute[0])
                for layer, own_name in zip(layers[1:], attribute[1:], strict=True):
                    if torch.equal(getattr(layer, own_name), first):
                        setattr(layer, own_name, first)
                    else:
                        norm = next(n for n, built in self.layers.items() if built is layer)
                        untied.append(f"{self.names[norm]}.{name}")
        return untied

    def set_consumers(self) -> None:
        """Set consumer_ratio of each neuron that has a single neuron as its consumer."""
        neurons: dict[nn.Module, _AGCConv] = {m: m for m in self.names if isinstance(m, _AGCConv)}
        last = dict(neurons)  # module: the neuron that computes its output
        for norm, layer in self.layers.items():
            match = self.sites[norm].match
            if isinstance(layer, _AGCConv) and not isinstance(match, str):
                neurons[match.conv] = layer
                fused = self.sites[norm].level == Level.WITH_ACTIVATION
                after = match.activation_module if fused else None
                last[norm if after is None else after] = layer
        for module, neuron in last.items():
            consumer = self.flow.sole_consumer(module)
            trailing = isinstance(self.replacements.get(module), nn.Sequential)
            if consumer in neurons and not trailing:
                set_consumer_(neuron, neurons[consumer])

    def unregistered(self) -> list[Change]:
        """Return an entry for each BatchNorm that is called without being a submodule."""
        why = "called, but not registered as a submodule"
        kinds = self.trial.unregistered if self.trial is not None else []
        return [Change("(not registered)", kind, kind, "skipped", why) for kind in kinds]

    def frozen(self) -> list[Change]:
        """Return an entry for each FrozenBatchNorm2d, which stays."""
        why = "frozen, with constant statistics; frozen=True converts it"
        return [
            Change(name, type(module).__name__, type(module).__name__, "skipped", why)
            for module, name in self.names.items()
            if is_frozen_class(module)
        ]

    def constant(self) -> tuple[str, ...]:
        """Name the BatchNorms that constant features would be computed from."""
        if keeps_function(self.init):
            return ()
        return tuple(name for name, norm in self.norms.items() if norm in self.pooled)

    def unverified(self) -> str | None:
        """Return the unverified part, the reason and its cost; None if all was verified."""
        if self.trial is not None:
            return self.trial.unverified
        waiting = sum("pass example=" in str(site.match) for site in self.sites.values())
        cost = f"; {waiting} BatchNorms stay unfused for that" if waiting else ""
        return f"no example, so branches that torch.fx does not see; pass example={cost}"

    def initialize(
        self, model: nn.Module, generator: torch.Generator | None
    ) -> tuple[tuple[str, float], ...]:
        """Change the model's own parameters; return the layers scaled for an addition."""
        for source, scale in self.filter_scales.items():
            scale_filters_(source, scale)
        scaled = []
        if self.init == "scratch":
            constants = {
                p: p.clone()
                for layer in self.fixed
                for p in layer._parameters.values()
                if p is not None
            }
            for part in [model] if self.whole else self.initialized:
                he_init_(part, generator)
            with torch.no_grad():
                for parameter, value in constants.items():
                    parameter.copy_(value)
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
        """Return the number of spatial dimensions; some norms work for any number."""
        own = spatial_dims(norm)
        if own is not None:
            return own
        if norm in self.maps:
            return max(self.maps[norm][0], 1)
        if isinstance(self.flow.sole_producer(norm), nn.Linear):
            return 1
        conv_dims = {
            d for d in (1, 2, 3) for m in self.names if isinstance(m, getattr(nn, f"Conv{d}d"))
        }
        if len(conv_dims) != 1:
            raise ValueError(
                f"{name!r} ({self._kind(norm)}) accepts maps of 1, 2 or 3 dimensions, and the "
                "model's convolutions do not determine which: pass example="
            )
        return conv_dims.pop()


def _is_frozen(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and not weight.requires_grad


@torch.no_grad()
def _scale_(layer: nn.Module, factor: float) -> bool:
    """Scale a layer's gamma, else its filters; return whether it has either."""
    gain = getattr(layer, "weight" if isinstance(layer, _AGC) else "gain", None)
    if gain is not None:
        gain.mul_(factor)
    elif isinstance(layer, (_ConvNd, nn.Linear)):
        set_filters_(layer, factor * layer.weight)
    else:
        return False
    return True


def _attribute(layer: nn.Module, name: str) -> str:
    """Return the name of gamma or beta in an AGC layer."""
    return "gain" if name == "weight" and isinstance(layer, _AGCConv) else name
