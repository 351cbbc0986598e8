"""Verify the plan of a conversion on an example, and back out wrong fusions.

Two copies of the model run on the example, in evaluation mode without gradients and in training
mode with them. One keeps its BatchNorms. In the other one the plan is carried out, and the AGC
layers start as the BatchNorms (lambda 0). Both must call the same modules with the same values.

BatchNorms normalize with constant statistics in both copies. These are the statistics of the
example, and gains, biases and other vectors of parameters are random: untrained BatchNorms are
close to the identity, and a gain of zero would hide a whole branch.
"""

import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from ..nn.memory import saved_bytes_by_layer
from ..ops.layout import positions
from .dataflow import has_hooks
from .dry_run import (
    CalledOutsideError,
    Copied,
    Record,
    copy_model,
    example_arguments,
    record_run,
    run_example,
    seed_everything,
    tensors_in,
)
from .plan import Level, Site, build, he_scale, scale_filters_
from .replace import replace_modules
from .start import Lambdas, batchnorm_parameters

_TOLERANCE = 1e-2  # relative, in the dtype of the model; a wrong plan is off by far more
_TOLERANCE_FP64 = 1e-7  # decides if the first is exceeded: deep networks amplify rounding
_SEED = 0


class Trial:
    """Runs of copies of a model on an example.

    Attributes:
        maps: Spatial dimensions and positions of the largest map of each BatchNorm.
        reached: The BatchNorms that the example calls.
        unregistered: Class names of BatchNorms that are called but are no submodules.
        held: Modules of the model that it calls through references which a copy does not follow.
        unverified: The part that could not be verified, and the reason, or None.
    """

    def __init__(self, model: nn.Module, norms: Iterable[_BatchNorm], example: Any) -> None:
        self.model = model
        self.norms = set(norms)
        self.example = example
        self.maps: dict[nn.Module, tuple[int, int]] = {}
        self.reached = set[nn.Module]()
        self.unregistered: list[str] = []
        self.held = set[nn.Module]()
        self.unverified: str | None = None
        self.names = {module: name for name, module in model.named_modules()}
        self.references: dict[torch.dtype | None, tuple[dict[str, Record], _Values]] = {}
        if not self.can_compare:
            self.unverified = "the model is on the meta device"
        self._observe()

    @property
    def can_compare(self) -> bool:
        """Return whether the model has values to compare."""
        if any(p.is_meta for p in self.model.parameters()):
            return False
        return None not in self.references or not self.references[None][0]["evaluation"].error

    def _observe(self) -> None:
        """Run the model as it is; find the references that a copy does not follow."""
        while True:
            try:
                reference = self._reference(None)
                break
            except CalledOutsideError as error:
                self.held.add(error.module)
        runs, values = reference
        evaluation, training = runs["evaluation"], runs["training"]
        called = {*evaluation.calls, *training.calls}
        self.reached = {values.original[m] for m in called if m in values.original} & self.norms
        self.unregistered = [
            type(m).__name__
            for m in called
            if isinstance(m, _BatchNorm) and m not in values.original and m not in self.held
        ]
        if evaluation.error is not None:
            self._observe_maps()  # raises if the example itself is wrong
            kind = type(evaluation.error).__name__
            why = f"a run with random gains and biases raises {kind}: {evaluation.error}"
            self.unverified = why
        elif training.error is not None and self.unverified is None:
            why = f"{type(training.error).__name__}: {training.error}"
            self.unverified = f"training mode, in which the example raises {why}"
        self.references[None] = reference

    def _observe_maps(self) -> None:
        """Run the model with its own parameters, and record the size of maps."""
        copied = copy_model(self.model, share_parameters=True)

        def record(norm: _BatchNorm, x: Tensor) -> None:
            size = (x.dim() - 2, positions(x))
            self.maps[norm] = max(self.maps.get(norm, (0, 0)), size)

        hooks = [
            copied.modules[norm].register_forward_pre_hook(
                lambda _, args, kwargs, norm=norm: record(
                    norm, args[0] if args else kwargs["input"]
                ),
                with_kwargs=True,
            )
            for norm in self.norms
        ]
        run_example(copied, self.example, hooks)

    def _reference(self, dtype: torch.dtype | None) -> "tuple[dict[str, Record], _Values]":
        """Run a copy that keeps its BatchNorms; return its records and values."""
        copied = self._copy(dtype)
        values = _Values(copied, self.norms, self.maps)
        try:
            runs = self._run(copied, (), dtype)
        finally:
            values.remove_hooks()
        return runs, values

    def difference(self, sites: Sequence[Site]) -> str | None:
        """Return where the model with these sites converted differs, or None."""
        found = self._difference(sites, None, _TOLERANCE)
        if found is None:
            return None
        if torch.float64 not in self.references:
            reference = self._reference(torch.float64)
            self.references[torch.float64] = reference
        if self.references[torch.float64][0]["evaluation"].error is not None:
            return found  # the code needs another dtype
        return self._difference(sites, torch.float64, _TOLERANCE_FP64)

    def convert_copy(
        self, sites: Sequence[Site], dtype: torch.dtype | None = None, lam: Lambdas | None = None
    ) -> tuple[Copied, dict[nn.Module, nn.Module]]:
        """Carry out the plan in a copy with the values of the trial.

        Args:
            sites: The plan.
            dtype: The dtype of the copy; that of the model if None.
            lam: Initial lambda of each BatchNorm; 0 if None, as BatchNorm.

        Returns:
            The copy, and the AGC layer or AGCConv of each BatchNorm.
        """
        copied = self._copy(dtype)
        self.references[dtype][1].copy_to(copied)
        layers: dict[nn.Module, nn.Module] = {}
        replacements: dict[nn.Module, nn.Module] = {}
        with torch.no_grad():
            for site in sites:
                norm = copied.modules[site.norm]
                assert isinstance(norm, _BatchNorm)
                if norm.running_mean is None:  # never called, and without statistics
                    norm.running_mean = torch.zeros(norm.num_features)
                    norm.running_var = torch.ones(norm.num_features)
                scale = None
                if site.scales() and site.source is not None:
                    source: Any = copied.modules[site.source]
                    scale = he_scale(source)
                    scale_filters_(source, scale)
                parameters = batchnorm_parameters(
                    norm, lam=lam[site.norm] if lam is not None else 0.0, filter_scale=scale
                )
                bias: Any = None
                if not isinstance(site.match, str):
                    bias = copied.modules[site.match.conv].bias
                built = build(site, parameters, conv_bias=bias, of=copied.modules.__getitem__)
                replacements |= built.replacements
                layers[site.norm] = built.layer
        model = replace_modules(copied.model, replacements)
        return Copied(model, copied.modules), layers

    def _difference(
        self, sites: Sequence[Site], dtype: torch.dtype | None, tolerance: float
    ) -> str | None:
        runs, values = self.references[dtype]
        copied, layers = self.convert_copy(sites, dtype)
        changed = {module for site in sites for module in site.changed()}
        removed = {copied.modules[m] for site in sites for m in site.modules()}
        there = self._run(copied, changed, dtype)
        for mode, here in runs.items():
            if here.error is not None:
                continue
            expected, found = self._comparable(here, changed), there[mode]
            difference = expected.difference(found, tolerance)
            if difference is None:
                difference = self._wrong_calls(here, found, values.copied, layers, removed)
            if difference is not None:
                return f"in {mode} mode, {difference}"
        return None

    def _wrong_calls(
        self,
        here: Record,
        there: Record,
        reference: Copied,
        layers: Mapping[nn.Module, nn.Module],
        removed: set[nn.Module],
    ) -> str | None:
        """Return which layer is called too often or too rarely, or None."""
        for module in removed:
            if there.calls[module]:
                return f"the removed {type(module).__name__} is still called"
        for norm, layer in layers.items():
            if here.calls[reference.modules[norm]] != there.calls[layer]:
                return f"{self.names[norm]} is called, and its replacement is not"
        return None

    def _comparable(self, record: Record, changed: Collection[nn.Module]) -> Record:
        """Return a record without the modules that a plan changes."""
        names = set(self._compared(changed).values())
        names |= {f"{name} (input)" for name in names}
        return Record(
            [event for event in record.events if event[0] in names],
            record.calls,
            record.outputs,
            record.kept,
        )

    def _compared(self, changed: Collection[nn.Module]) -> dict[nn.Module, str]:
        """Return the modules whose values a plan must not change.

        These are the leaves outside of changed modules, the model itself, and modules with hooks.
        """
        inside = tuple(f"{self.names[module]}." for module in changed)
        return {
            module: name
            for module, name in self.names.items()
            if module not in changed
            and not (inside and name.startswith(inside))
            and (module is self.model or not module._modules or has_hooks(module))
        }

    def _copy(self, dtype: torch.dtype | None) -> Copied:
        copied = copy_model(self.model)
        if dtype is not None:
            copied.model.to(dtype)
        return copied

    def _run(
        self, copied: Copied, changed: Collection[nn.Module], dtype: torch.dtype | None
    ) -> dict[str, Record]:
        """Run a copy in both modes."""
        example = tree_map(lambda a: _cast(a, dtype), self.example)
        args, kwargs = example_arguments(copied.model, example)
        names = {copied.modules[m]: name for m, name in self._compared(changed).items()}
        forbidden = set(self.names) - self.held
        records = {}
        for mode in ("evaluation", "training"):
            copied.model.train(mode == "training")
            for module in copied.modules.values():  # also those that were replaced
                if isinstance(module, _BatchNorm):
                    module.eval()
            with (
                warnings.catch_warnings(),
                copied.isolated(),
                torch.set_grad_enabled(mode == "training"),
            ):
                warnings.simplefilter("ignore")
                seed_everything(_SEED)
                records[mode] = record_run(
                    copied.model, lambda: copied.model(*args, **kwargs), names, forbidden
                )
        return records


def example_outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """Return the outputs of a copy of a model in eval mode, in fp64 on the CPU."""
    copied = copy_model(model, share_parameters=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = tensors_in(run_example(copied, example, ()))
        return [t.double().cpu() for t in found if t.is_floating_point()]


def saved_for_backward(
    model: nn.Module, layers: Iterable[nn.Module], example: Any
) -> tuple[int | None, dict[nn.Module, int]]:
    """Return the bytes that a model and some of its layers save for backward.

    Returns:
        The bytes of the model, or None if the example does not run in training mode, and the bytes
        that only each layer saves: see saved_bytes_by_layer.
    """
    copied = copy_model(model, share_parameters=True)
    original = copied.original()
    args, kwargs = example_arguments(copied.model, example)
    own = [copied.modules[layer] for layer in layers]
    try:
        with warnings.catch_warnings(), torch.enable_grad(), copied.isolated():
            warnings.simplefilter("ignore")
            total, alone = saved_bytes_by_layer(copied.model.train(), own, *args, **kwargs)
    except Exception:  # the code of a model can raise anything
        return None, {}
    return total, {original[layer]: count for layer, count in alone.items()}


def relative_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the largest difference of outputs, relative to the largest output."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return math.inf
    largest = max((float(t.abs().max()) for t in before if t.numel()), default=0.0)
    pairs = zip(before, after, strict=True)
    differences = [float((a - b).abs().max()) for a, b in pairs if a.numel()]
    return max(differences, default=0.0) / max(largest, 1e-30)


class _Values:
    """Values of parameters and statistics that show a wrong plan."""

    def __init__(
        self,
        copied: Copied,
        norms: Iterable[_BatchNorm],
        maps: dict[nn.Module, tuple[int, int]],
    ) -> None:
        self.copied = copied
        self.maps = maps
        self.original = copied.original()
        self.done = set[nn.Module]()
        _randomize_(copied.model)
        self.hooks = [
            copied.modules[norm].register_forward_pre_hook(self._estimate, with_kwargs=True)
            for norm in norms
        ]

    @torch.no_grad()
    def _estimate(self, norm: Any, args: Any, kwargs: Any) -> None:
        """Set the statistics of a BatchNorm from its first input."""
        x: Tensor = args[0] if args else kwargs["input"]
        name = self.original[norm]
        self.maps[name] = max(self.maps.get(name, (0, 0)), (x.dim() - 2, positions(x)))
        if norm in self.done or x.is_meta:
            return
        self.done.add(norm)
        maps = x.detach().transpose(0, 1).flatten(1).float()
        var, mean = torch.var_mean(maps, 1, correction=0)
        if maps.shape[1] == 1:  # the mean is the value itself, and only rounding would be left
            mean = mean / 2
        like = next((a for a in (norm.running_mean, norm.weight) if a is not None), x)
        # Dividing nearly constant maps, or maps far smaller than the others, by their deviation
        # would amplify rounding in every layer.
        square = var + mean.square()
        var = torch.maximum(var, torch.maximum(0.1 * square, square.mean()))
        var = torch.where(var > 1e-8, var, torch.ones_like(var))  # an example of zeros
        norm.running_mean, norm.running_var = mean.to(like), var.to(like)

    def copy_to(self, other: Copied) -> None:
        """Give another copy the same values."""
        _randomize_(other.model)
        for norm in self.done:
            there: Any = other.modules[self.original[norm]]
            for name in ("running_mean", "running_var"):
                setattr(there, name, getattr(norm, name).clone())

    def remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()


@torch.no_grad()
def _randomize_(model: nn.Module) -> None:
    """Give gains, biases and other parameter vectors random values, always the same."""
    generator = torch.Generator().manual_seed(_SEED)
    for name, parameter in model.named_parameters():
        if sum(size > 1 for size in parameter.shape) > 1 or not parameter.is_floating_point():
            continue
        if parameter.is_meta:
            continue
        value = torch.rand(parameter.shape, generator=generator)
        parameter.copy_(value - 0.5 if name.endswith("bias") else value + 0.5)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)


def back_out(trial: Trial, sites: Sequence[Site]) -> None:
    """Lower the level of the sites that change the function, as little as possible.

    Raises:
        ValueError: If the sites change the function only together.
    """
    for site in sites:
        if site.norm in trial.held:
            site.lower(Level.SKIPPED, "a reference that cannot be replaced calls it")
        elif trial.held.intersection(site.modules()):
            site.lower(Level.REPLACED, "a reference that cannot be replaced calls a neighbor")
        elif trial.unverified is None and site.norm not in trial.reached:
            site.lower(Level.REPLACED, "not reached by the example, so not verified")
    if not trial.can_compare:
        return
    sites = [site for site in sites if site.level != Level.SKIPPED]
    difference = trial.difference(sites)
    if difference is None:
        return
    if trial.difference([]) is not None:
        trial.unverified = "two runs of the model on the example differ by themselves"
        return
    pending = _groups(sites)
    for level in Level:
        if level == Level.SKIPPED:
            break
        pending = _failing(trial, pending, level)
    for site in [site for group in pending for site in group]:
        site.lower(Level.SKIPPED, f"converted, {site.reason}" if site.reason else "")
    sites = [site for site in sites if site.level != Level.SKIPPED]
    difference = trial.difference(sites)
    if difference is not None:
        raise ValueError(
            f"the converted model computes something else than the model: {difference}. Each "
            "BatchNorm can be converted alone, but not all of them together: select some with "
            "`where`"
        )


def _groups(sites: Sequence[Site]) -> list[list[Site]]:
    """Group the sites at the same place of repeated blocks: the same code calls them."""
    groups: dict[str, list[Site]] = {}
    for site in sites:
        key = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", site.name)
        groups.setdefault(key, []).append(site)
    return list(groups.values())


def _failing(trial: Trial, groups: list[list[Site]], level: Level) -> list[list[Site]]:
    """Lower the groups to a level; return those wrong at it, found by halving."""
    if not groups:
        return []
    tested = all(site.reason is not None for group in groups for site in group)
    effect = False
    for group in groups:
        for site in group:
            effect |= site.level < level and (level != Level.UNSCALED or site.source is not None)
            site.level = max(site.level, level)
    if tested and not effect:
        return groups
    difference = trial.difference([site for group in groups for site in group])
    if difference is None:
        return []
    if len(groups) > 1:
        half = len(groups) // 2
        return _failing(trial, groups[:half], level) + _failing(trial, groups[half:], level)
    for site in groups[0]:
        site.reason = difference
    return groups
