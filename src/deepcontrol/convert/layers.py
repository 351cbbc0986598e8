"""AGC layers and neurons made of what a model already has: its filters and its BatchNorms."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..nn import AGC1d, AGC2d, AGC3d, AGCConv1d, AGCConv2d, AGCConv3d
from ..nn.agc import _AGC
from ..nn.conv import _AGCConv
from ..ops.activation import ActivationName
from ..ops.layout import accumulate_dtype

_NEURONS: dict[int, type[_AGCConv]] = {1: AGCConv1d, 2: AGCConv2d, 3: AGCConv3d}
_LAYERS: dict[int, type[_AGC]] = {1: AGC1d, 2: AGC2d, 3: AGC3d}


@dataclass(frozen=True)
class Control:
    """Eq. 1's three parameters for one layer, each (C,): gamma, beta and lambda."""

    gain: nn.Parameter
    bias: nn.Parameter
    mean_scale: nn.Parameter


def paper_start(norm: _BatchNorm, lam: float) -> Control:
    """gamma 1, beta 0, and lambda as given; a gamma that starts at 0 everywhere stays there."""
    gamma = 0.0 if starts_at_zero(norm) else 1.0
    return _control(norm, *(_like(norm).new_full((norm.num_features,), a) for a in (gamma, 0, lam)))


def starts_at_zero(norm: _BatchNorm) -> bool:
    """Whether gamma is 0 throughout: how residual branches are made to start as their shortcut."""
    gamma = norm.weight
    return gamma is not None and not gamma.is_meta and not gamma.any()


def batchnorm_start(norm: _BatchNorm) -> Control:
    """What BatchNorm computes in eval mode, as Eq. 1 with lambda 0."""
    mean, var = norm.running_mean, norm.running_var
    assert mean is not None
    assert var is not None
    exact = accumulate_dtype(var.dtype)
    gain = torch.rsqrt(var.to(exact) + norm.eps)
    if norm.weight is not None:
        gain = gain * norm.weight
    bias = -gain * mean
    if norm.bias is not None:
        bias = bias + norm.bias
    return _control(norm, gain, bias, torch.zeros_like(gain))


def _control(norm: _BatchNorm, gain: Tensor, bias: Tensor, mean_scale: Tensor) -> Control:
    """Parameters with the dtype and requires_grad of the BatchNorm's own, where it has them."""
    dtype = _like(norm).dtype

    def parameter(value: Tensor, own: Tensor | None) -> nn.Parameter:
        return nn.Parameter(value.detach().to(dtype), own is None or own.requires_grad)

    return Control(
        parameter(gain, norm.weight),
        parameter(bias, norm.bias),
        parameter(mean_scale, norm.weight),
    )


def _like(norm: _BatchNorm) -> Tensor:
    """A tensor of the norm's dtype and device; fp32 where it has neither parameters nor buffers."""
    for a in (norm.weight, norm.running_mean):
        if a is not None:
            return a.detach()
    return torch.empty(0)


def control_of(layer: _AGC) -> Control:
    """The parameters of a drop-in layer, or what stands for them where it has none."""
    given = (layer.weight, layer.bias, layer.mean_scale)
    starts = (1.0, 0.0, 1.0)
    like = next((a for a in given if a is not None), torch.empty(0))
    return Control(
        *(
            nn.Parameter(like.new_full((layer.num_features,), start)) if a is None else a
            for a, start in zip(given, starts, strict=True)
        )
    )


def make_neuron(conv: _ConvNd, control: Control, activation: ActivationName) -> _AGCConv:
    """act(Eq. 1) of conv in one layer, with the very filters of conv.

    A bias b of the convolution is a constant of each map, of which centring leaves
    gamma (1 - lambda) b; that goes into beta.
    """
    neuron = _NEURONS[conv.weight.dim() - 2](
        **geometry(conv), activation=activation, device="meta"
    )  # on meta: all its parameters come from elsewhere
    bias = control.bias
    if conv.bias is not None:
        left = control.gain * (1 - control.mean_scale) * conv.bias.to(control.gain)
        bias = nn.Parameter((bias + left).detach(), bias.requires_grad)
    assert isinstance(conv.weight, nn.Parameter)
    neuron.weight = conv.weight
    neuron.bias, neuron.gain, neuron.mean_scale = bias, control.gain, control.mean_scale
    return neuron


def make_layer(dims: int, control: Control) -> _AGC:
    """The drop-in layer over maps of that many dimensions."""
    layer = _LAYERS[dims](len(control.gain), device="meta")
    layer.weight, layer.bias = control.gain, control.bias
    layer.mean_scale = control.mean_scale
    return layer


def geometry(conv: _ConvNd) -> dict[str, Any]:
    """What makes another convolution of the same shape."""
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
    return {name: getattr(conv, name) for name in (*names, "groups", "padding_mode")}
