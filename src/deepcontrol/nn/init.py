"""The paper's two ways to start a network: He fan-in, and identity."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

_KINDS = ("MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool", "LPPool", "MaxUnpool")
_POOLING = (
    *(getattr(nn, f"{kind}{d}d") for kind in _KINDS for d in (1, 2, 3)),
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


def he_init_(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Start every layer of a model as the paper does, in place; returns the model.

    Filters of convolutions and linear layers are normal with variance 2 / fan-in (He et al.,
    1 / fan-in for an AGC neuron without activation), biases 0. Norms and AGC (automatic gain
    control) layers start over: gamma = 1, beta = 0, lambda = 1. Other layers are left alone.

    >>> model = he_init_(nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU()))
    >>> bool(model[0].bias.any())
    False
    """
    for module in model.modules():
        if isinstance(module, (_ConvNd, nn.Linear)):
            he_normal_(module, generator)
            reset_all_but_filters_(module)
        elif _is_norm(module):
            module.reset_parameters()  # type: ignore[operator]
    return model


def identity_init_(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """The paper's variant: identity in all layers except the first after a pooling; in place.

    A convolution that keeps its number of channels and has an odd kernel starts as the identity
    (Dirac) filter. He fan-in starts all others: the first layer of the model, the first after each
    pooling, unpooling or strided convolution, those that change the number of channels, and the
    linear ones. Layers and poolings are taken in the order in which the model registers them: a
    pooling that is a function call, or one module used in several places, is not seen, and the
    layer after it must be given he_normal_ by hand.

    >>> model = identity_init_(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)))
    >>> x = torch.randn(1, 8, 5, 5)
    >>> torch.equal(model[1](x), x)
    True
    """
    he_init_(model, generator)
    first_after_pooling = True
    for module in model.modules():
        if isinstance(module, _POOLING):
            first_after_pooling = True
        elif isinstance(module, _ConvNd):
            strided = any(s != 1 for s in module.stride)
            if not first_after_pooling and not strided and _can_be_identity(module):
                nn.init.dirac_(module.weight, module.groups)
            first_after_pooling = strided or getattr(module, "pools", False)
    return model


def he_normal_(layer: Any, generator: torch.Generator | None = None) -> Tensor:
    """Fill a layer's filters from N(0, gain^2 / fan-in), gain^2 = 2, or 1 before no activation."""
    weight: Tensor = layer.weight
    fan_in = math.prod(weight.shape[1:])
    if isinstance(layer, _ConvTransposeNd):
        # Weight is (in, out / groups, *), and of its taps only 1 in prod(stride) meets an output.
        taps = math.prod(weight.shape[2:]) / math.prod(layer.stride)
        fan_in = weight.shape[0] / layer.groups * taps  # type: ignore[assignment]
    variance = 1.0 if getattr(layer, "activation", "relu") == "none" else 2.0
    std = math.sqrt(variance / max(fan_in, 1))
    if not is_parametrized(layer, "weight"):
        return nn.init.normal_(weight, 0.0, std, generator=generator)
    return set_filters_(
        layer, nn.init.normal_(torch.empty_like(weight), 0.0, std, generator=generator)
    )


@torch.no_grad()
def set_filters_(layer: Any, filters: Tensor) -> Tensor:
    """Where the weight is computed (weight norm, say), it is set by assigning to it."""
    if is_parametrized(layer, "weight"):
        layer.weight = filters
    else:
        layer.weight.copy_(filters)
    weight: Tensor = layer.weight
    return weight


def _is_norm(module: nn.Module) -> bool:
    """A layer whose own parameters are all per channel, and which knows how to start over."""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(p.dim() == 1 for p in own) and hasattr(module, "reset_parameters")


def reset_all_but_filters_(layer: nn.Module) -> None:
    for name, start in (("bias", 0.0), ("gain", 1.0), ("mean_scale", 1.0)):
        parameter = getattr(layer, name, None)
        if isinstance(parameter, Tensor):
            nn.init.constant_(parameter, start)


def _can_be_identity(layer: _ConvNd) -> bool:
    return (
        layer.in_channels == layer.out_channels
        and not isinstance(layer, _ConvTransposeNd)
        and all(k % 2 == 1 for k in layer.kernel_size)
    )
