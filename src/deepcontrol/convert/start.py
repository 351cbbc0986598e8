"""Initial parameters of the AGC layers that replace BatchNorms."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..nn.init import is_agc_over_maps, scale_output_, unit_scale
from ..ops.layout import accumulate_dtype
from .copies import copy_model
from .dataflow import run_example

TOLERANCE = 2.0  # factor by which the deviation of a map may differ from its target


@dataclass(frozen=True)
class AGCParameters:
    """The parameters of Eq. 1 for one layer, each (C,): gamma, beta and lambda."""

    gain: nn.Parameter
    bias: nn.Parameter
    mean_scale: nn.Parameter


def untrained_parameters(norm: _BatchNorm, gamma: float, lam: float) -> AGCParameters:
    """Return the given gamma and lambda, and beta = 0."""
    like = _like(norm)
    return _parameters(norm, *(like.new_full((norm.num_features,), a) for a in (gamma, 0, lam)))


def correct_scales_(
    model: nn.Module, example: Any, targets: Mapping[nn.Module, float]
) -> set[nn.Module]:
    """Scale AGC layers with maps of the wrong deviation on an example, layer by layer.

    He fan-in and CENTERING_GAIN are right for chains of convolutions and ReLUs. Gates (squeeze-and-
    excitation halves a map), other activations and concatenations change the scale of the signal,
    and in a deep network the factors multiply. Layers within TOLERANCE are left alone.

    Args:
        model: The initialized model.
        example: An input of the model, a tuple of inputs or a dict of keyword arguments.
        targets: Deviation of the pre-activations of a layer; 1 for layers that are missing.

    Returns:
        The layers that were scaled.
    """
    copied = copy_model(model, share_parameters=True)  # the run must not fill the model's caches
    original = copied.original()
    seen, scaled = set[nn.Module](), set[nn.Module]()

    def correct(
        layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
    ) -> Tensor:
        if layer in seen or not isinstance(layer.weight, Tensor):
            return output
        seen.add(layer)
        x = args[0] if args else kwargs["input"]
        factor = targets.get(original[layer], 1.0) * unit_scale(layer, x)
        if 1 / TOLERANCE <= factor <= TOLERANCE:
            return output
        scale_output_(layer, factor)
        scaled.add(original[layer])
        return layer.forward(x)

    hooks = [
        m.register_forward_hook(correct, with_kwargs=True)
        for m in copied.model.modules()
        if is_agc_over_maps(m)
    ]
    run_example(copied.model, example, hooks)
    return scaled


def has_zero_gamma(norm: _BatchNorm) -> bool:
    """Return whether all of gamma is 0, as in a zero-initialized residual branch."""
    gamma = norm.weight
    return gamma is not None and not gamma.is_meta and not gamma.any()


def batchnorm_parameters(
    norm: _BatchNorm, *, centered: bool, normalized_filters: bool
) -> AGCParameters:
    """Return the parameters that continue from a trained BatchNorm.

        lambda = 0:  gain = gamma / sigma,  bias = beta - gain * mean      as BatchNorm in eval mode
        lambda = 1:  gain = gamma / sigma,  bias = beta                    centered

    With normalized filters the gain is gamma: the convolution before computes z / sigma.

    Splitting the factor gamma / sigma that way makes the start independent of the scale of the
    filters, which BatchNorm's function does not depend on. The gradient of the gain is
    sum g * (z - lambda * mean). If the filters were ten times as large, it would be ten times as
    large for a gain a tenth as large, so that a learning rate that suits one model makes the other
    diverge. With the filters W / sigma, z has variance 1 over the data, as BatchNorm's normalized
    map, and the gain has the value and the gradient of BatchNorm's gamma. Filters scaled to the
    norm of He initialization would not depend on their scale either, but would leave the variance
    of the layer's input in the gain.

    Args:
        norm: The BatchNorm, with running statistics.
        centered: Start at lambda = 1: the sample's own mean replaces the running mean.
        normalized_filters: Whether the filters before the norm are divided by sigma.
    """
    mean = norm.running_mean
    assert mean is not None
    scale = inverse_sigma(norm)
    gamma = torch.ones_like(scale) if norm.weight is None else norm.weight.to(scale.dtype)
    bias = torch.zeros_like(scale) if norm.bias is None else norm.bias.to(scale.dtype)
    if not centered:
        bias = bias - gamma * scale * mean
    gain = gamma if normalized_filters else gamma * scale
    return _parameters(norm, gain, bias, torch.full_like(gain, float(centered)))


def inverse_sigma(norm: _BatchNorm) -> Tensor:
    """Return 1 / sqrt(var + eps) of a BatchNorm's running variance, in fp32 or fp64."""
    var = norm.running_var
    assert var is not None
    return torch.rsqrt(var.to(accumulate_dtype(var.dtype)) + norm.eps)


def _parameters(norm: _BatchNorm, gain: Tensor, bias: Tensor, mean_scale: Tensor) -> AGCParameters:
    """Make parameters with the dtype and requires_grad of the BatchNorm's."""
    dtype = _like(norm).dtype

    def parameter(value: Tensor, own: Tensor | None) -> nn.Parameter:
        return nn.Parameter(value.detach().to(dtype, copy=True), own is None or own.requires_grad)

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
