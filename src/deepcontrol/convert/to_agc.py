"""Convert a model from BatchNorm to AGC (automatic gain control)."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args, overload

import torch
from torch import nn

from ..ops.background import Background, check_background
from .calibrate import reestimate_statistics
from .conversion import Conversion, Lam
from .norms import (
    NormKind,
    Where,
    batchnorms_of_frozen,
    check_kinds,
    keeps_function,
    refuse_frozen,
    stand_ins,
    warn_trained,
)
from .plan import Report
from .replace import disable_fusers, replace_modules
from .start import correct_scales_
from .verify import example_outputs, relative_difference, saved_for_backward

_MAX_DIFFERENCE = 0.05  # of outputs with init="bn"; rounding in deep networks reaches 0.003

Init = Literal["scratch", "paper", "bn", "centered"]


@overload
def to_agc(
    model: nn.Module,
    where: Where | None = None,
    init: Init = "scratch",
    example: Any = None,
    report: Literal[False] = False,
    *,
    norms: Sequence[NormKind] | NormKind = ("batch",),
    lam: Lam | None = None,
    frozen: bool = False,
    data: Iterable[Any] | None = None,
    generator: torch.Generator | None = None,
    background: Background = "mean",
) -> nn.Module: ...


@overload
def to_agc(
    model: nn.Module,
    where: Where | None = None,
    init: Init = "scratch",
    example: Any = None,
    *,
    report: Literal[True],
    norms: Sequence[NormKind] | NormKind = ("batch",),
    lam: Lam | None = None,
    frozen: bool = False,
    data: Iterable[Any] | None = None,
    generator: torch.Generator | None = None,
    background: Background = "mean",
) -> tuple[nn.Module, Report]: ...


def to_agc(
    model: nn.Module,
    where: Where | None = None,
    init: Init = "scratch",
    example: Any = None,
    report: bool = False,
    *,
    norms: Sequence[NormKind] | NormKind = ("batch",),
    lam: Lam | None = None,
    frozen: bool = False,
    data: Iterable[Any] | None = None,
    generator: torch.Generator | None = None,
    background: Background = "mean",
) -> nn.Module | tuple[nn.Module, Report]:
    """Replace every BatchNorm of a model by AGC (automatic gain control), in place.

    If a convolution feeds a BatchNorm directly and nothing else, the two become one AGCConv at the
    convolution's place, together with a ReLU, LeakyReLU, SiLU or GELU after them; a transposed
    convolution becomes an AGCConvTranspose. This also saves the memory of the normalization.
    nn.Identity is left at the other places, so no module changes its name or index. Every other
    BatchNorm becomes AGC1d/2d/3d.

    BatchNorm1d/2d/3d, SyncBatchNorm and their subclasses are converted, and with `norms` also
    InstanceNorm1d/2d/3d and GroupNorm. The filters stay the same
    nn.Parameter objects; gains, biases and lambdas are new. Create the optimizer afterwards: one
    that exists already does not train them. Report.new_parameters has their names.

    To train from scratch: to_agc(model, example=images), then SGD with momentum 0.9, weight decay
    on the filters (param_groups), a warm-up, and a learning rate of 0.02 x batch size for
    segmentation or 0.1 x (batch size / 128)^0.75 for classification.

    Fused layers of init="scratch" have weight_standardization, which a state dict does not record:
    load it into a model that was converted with the same init.

    Methods that fold BatchNorms for inference (ultralytics' fuse, timm's reparameterize) leave
    modules with AGC layers unchanged: AGC has no statistics to fold. Use fold instead.

    Only forward is traced and verified. If another method of the model calls a convolution
    separately, exclude its BatchNorm with `where`.

    Args:
        model: The model to convert. It is changed in place.
        where: The BatchNorms to convert: where(name, batchnorm) -> bool, a name, a glob
            ("layer4.*"), or a list of these. Default: all.
        init: Initialization.

            "scratch": for training from scratch. The whole model is initialized (with `where`, only
            the selected BatchNorms and the layers that feed them): filters by He
            fan-in (he_init_), beta 0, and gamma 1.21, which makes up for the variance of the mean
            that is subtracted. Fused layers have weight_standardization (see AGCConv2d), with which
            they train best, and lambda 0.5; depthwise ones, and layers that are not fused, have
            lambda 1. The last layer of every residual branch starts at
            branch_gain(number of residual additions) times that, so that the variance of the signal
            stays bounded over depth; other summed maps start at 1 / sqrt(number of operands).
            With an example, layers whose maps are more than a factor of 2 off (after gates, for
            example) are scaled; use a few images like those that you train on.

            "paper": gamma 1, beta 0, lambda 1, whatever the residual structure. The filters do not
            change: call he_init_(model) *before* the conversion. A gamma of all zeros is kept.

            "bn": for fine-tuning. Gamma and beta compute the same as the trained BatchNorm in eval
            mode, with lambda 0. The outputs stay the same up to rounding.

            "centered": as "bn", but with lambda 1 and beta as trained: the sample's own mean
            replaces the running mean. This can destroy a deep network; compare its error with that
            of "bn" first. For images that differ from the training images, try data= before.
            Maps of one position, and those before global average pooling, start as with "bn".

            With "bn" and "centered" the filters of a convolution that feeds only the BatchNorm are
            scaled to the norm of He initialization, in place, and the gain makes up for it. The
            function is the same, and fine-tuning does not depend on the scale of the filters. Code
            outside of the model that reads the same filters sees the change.
        example: An input of the model, a tuple of inputs or a dict of keyword arguments. Copies of
            the model run on it. This finds maps of one position (squeeze-and-excitation,
            the pooling of ASPP), where the mean is the value itself, so that lambda starts at 0
            there. Without it, only a BatchNorm1d after a linear layer is known to have such maps.
            It also shows the order of calls and the residual additions if torch.fx cannot trace
            the model; without it, convolution and BatchNorm stay two layers there.
            And it verifies the conversion: copies of the model run on it with BatchNorm and with
            AGC that starts as BatchNorm, in eval mode and in training mode. A fusion that changes a
            value is backed out, and the report says so. Use an input like those of the training,
            with all arguments that the model gets there.
        report: Also return a Report, a table of all changes and their reasons.
        norms: The kinds of norms to convert: "batch" (default), "instance" and "group", one or
            several. InstanceNorm and GroupNorm divide by the spread of each sample, which no
            constant gain does, so only "scratch" and "paper" convert them.
        lam: Initial lambda, a number or a function of the name of the BatchNorm that returns a
            number, or None for the default: 0 for maps of one position, 0.5 for layers with
            weight_standardization, else 1. A number is not used for maps of one position. With a
            lambda below 1, part of the mean of each map remains, which layers before global average
            pooling need. Not for "bn".
        frozen: Only for "bn" and "centered": also convert the FrozenBatchNorm2d layers of detection
            models. They start as the same function, and their parameters do not require gradients.
        data: Only for "bn" and "centered": batches of new images, on which the statistics of all
            BatchNorms are estimated again first (reestimate_statistics).
        generator: Random number generator for the filters of init="scratch"; torch's default if
            None.
        background: Estimator in place of the mean in every new layer, as in AGCConv2d. The initial
            gains are those for the mean. With init="bn" lambda starts at 0, so that the function
            does not depend on it.

    Returns:
        The converted model (the same object, unless the model itself is a BatchNorm), or
        (model, Report) with report=True.

    Raises:
        ValueError: If the model has no BatchNorm, or one that cannot be converted, or if a name in
            `where` matches none. The model is then unchanged.

    Warns:
        UserWarning: If the BatchNorms have trained statistics that `init` discards, if one is
            skipped, or if features are constant at the initial lambda (Report.constant).

    Reference:
        Brendan Ruff, "Deep Control: a simple automatic gain control for memory efficient and high
        performance training of deep convolutional neural networks", 2017,
        https://arxiv.org/abs/1706.03907.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    >>> model, table = to_agc(model, report=True)
    >>> print(table)
    layer  was          became                 why
    1      BatchNorm2d  AGCConv2d at 0 (relu)  fused with its convolution and ReLU
    1 fused, 0 replaced, 0 skipped
    not verified: no example, so branches that torch.fx does not see; pass example=
    3 new parameters: create the optimizer after the conversion
    """
    _check_arguments(model, init, lam, frozen, data)
    background = check_background(background)
    kinds = check_kinds(norms, init)
    planned = stand_ins(model, kinds, where) | (batchnorms_of_frozen(model) if frozen else {})
    originals = {stand_in: norm for norm, stand_in in planned.items()}
    model = replace_modules(model, planned)
    outputs, changes = None, []
    # Plan all changes before the first one, so that an error leaves the model unchanged.
    try:
        conversion = Conversion(model, where, init, example, lam, kinds, originals)
        if init == "scratch":
            refuse_frozen({name: layer for layer, name in conversion.initialized.items()})
        if data is not None:
            reestimate_statistics(model, data)
        warn_trained(conversion.selected, init, originals)
        if init == "bn" and conversion.trial is not None and conversion.trial.can_compare:
            outputs = example_outputs(model, example)
        with torch.no_grad():
            for name, norm in conversion.norms.items():
                changes.append(conversion.convert(name, norm))
            untied = conversion.tie()
    except BaseException:
        replace_modules(model, originals)
        raise
    conversion.set_consumers()
    before = set(model.parameters())
    scaled = conversion.initialize(model, generator)
    converted = replace_modules(model, originals | conversion.replacements)
    for layer in conversion.layers.values():
        layer.background = background  # type: ignore[assignment]
    disabled = disable_fusers(converted, conversion.layers.values())
    corrected = set[nn.Module]()
    if init == "scratch" and example is not None:
        corrected = correct_scales_(converted, example, conversion.targets)
    difference = None
    if outputs is not None:
        difference = relative_difference(outputs, example_outputs(converted, example))
    total = None
    if report and example is not None:
        total, saved = saved_for_backward(converted, conversion.layers.values(), example)
        layers = {name: conversion.layers.get(norm) for name, norm in conversion.norms.items()}
        of = {name: saved.get(layer) for name, layer in layers.items() if layer is not None}
        changes = [replace(change, saved_bytes=of.get(change.name)) for change in changes]
    result = Report(
        changes=(*changes, *conversion.frozen(), *conversion.unregistered()),
        new_parameters=tuple(n for n, p in converted.named_parameters() if p not in before),
        scaled_layers=scaled,
        corrected=tuple(n for n, module in converted.named_modules() if module in corrected),
        blocks=conversion.additions.blocks,
        missing=conversion.additions.missing,
        constant=conversion.constant(),
        untied=tuple(untied),
        unverified=conversion.unverified(),
        difference=difference,
        saved_bytes=total,
        disabled_fusers=tuple(disabled),
    )
    _warn(result)
    return (converted, result) if report else converted


def _check_arguments(
    model: Any, init: str, lam: Lam | None, frozen: bool, data: Iterable[Any] | None
) -> None:
    """Raise TypeError or ValueError if the arguments of `to_agc` do not fit together."""
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type)
        found = f"the class {model.__name__}: create it first" if is_class else type(model).__name__
        raise TypeError(f"expected a model (an nn.Module instance), got {found}")
    if init not in get_args(Init):
        raise ValueError(f"unknown init {init!r}: choose one of {', '.join(get_args(Init))}")
    if data is not None and not keeps_function(init):
        raise ValueError(
            f"data is for the statistics of trained BatchNorms, and init={init!r} discards them: "
            "use init='bn' or 'centered', or leave out data"
        )
    if lam is not None and init == "bn":
        raise ValueError(
            "lam is the initial lambda, and init='bn' keeps the function of the BatchNorms, which "
            "needs lambda 0: use init='centered', 'scratch' or 'paper', or leave out lam"
        )
    if frozen and not keeps_function(init):
        raise ValueError(
            f"frozen=True keeps the function of FrozenBatchNorm2d, and init={init!r} does not: use "
            "init='bn' or 'centered'"
        )


def _warn(report: Report) -> None:
    """Emit the warnings of a report, at most one of each kind."""
    if report.constant:
        first, more = report.constant[0], len(report.constant) - 1
        layers = f"{first} and {more} more (Report.constant) are" if more else f"{first} is"
        warnings.warn(
            f"{layers} followed by global average pooling: at lambda 1 every map has mean beta, so "
            "the pooled features are constant until lambda has changed. Start at lambda 0 there "
            "(lam=lambda name: 0 for these names, None for others), or exclude them with `where`",
            stacklevel=3,
        )
    if report.untied:
        warnings.warn(
            f"{', '.join(report.untied)}: shared with another BatchNorm before, and separate now, "
            "because the values differ after the conversion",
            stacklevel=3,
        )
    if report.difference is not None and not report.difference <= _MAX_DIFFERENCE:
        warnings.warn(
            f"the outputs on the example differ by {report.difference:.2g} of the largest output "
            "from those before the conversion. Expected less than "
            f"{_MAX_DIFFERENCE}: check the running variances of the BatchNorms (tiny ones make "
            "large filters), or use a wider dtype",
            stacklevel=3,
        )
