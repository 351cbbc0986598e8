"""Initialize networks: He fan-in and identity (the paper's), and unit variance."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

from ..ops.background import check_background
from ..ops.layout import map_mean, over_maps

# Initial gain of a neuron that reads the outputs of a ReLU. Their mean carries 1 / pi of their
# power, and subtracting it (lambda = 1) leaves 1 - 1 / pi of the variance that He fan-in gives. For
# SiLU and GELU the same gain is within 5%.
CENTERING_GAIN = math.sqrt(1 / (1 - 1 / math.pi))
OUTPUT_SCALE = 0.1  # unit_init_: scale of the output layers relative to He fan-in

_KINDS = ("MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool", "LPPool", "MaxUnpool")
_POOLING = (
    *(getattr(nn, f"{kind}{d}d") for kind in _KINDS for d in (1, 2, 3)),
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


def he_init_(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Initialize every layer of a model with He fan-in, in place, as the paper does.

        W ~ N(0, 2 / fan_in)        1 / fan_in for an AGC neuron with activation="none"

    This applies to the filters of convolutions and linear layers; their biases become 0. Norms and
    AGC (automatic gain control) layers are reset: gamma = 1, beta = 0, lambda = 1. Other layers,
    such as embeddings, are not changed.

    Args:
        model: The model to initialize.
        generator: Random number generator for the filters; torch's default if None.

    Returns:
        The same model.

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


def branch_gain(blocks: int) -> float:
    """Return the initial gain of the last neuron of every residual branch.

        gain = 1 / sqrt(blocks)

    A residual block computes x + f(x). AGC does not divide by a measured spread, so with gains of 1
    the variance of f(x) is close to that of x, and every block multiplies the variance of the
    signal by up to 2 (about 1.5 in a ResNet): it grows exponentially with depth. With this gain a
    block multiplies the variance by 1 + 1 / blocks, which is less than e = 2.72 over all blocks,
    whatever the depth. A gain of 0 bounds the variance as well, but gives the other layers of the
    branch no gradient in the first step.

    Args:
        blocks: Number of residual additions in the network.

    Returns:
        The gain. It is 1 without residual additions.

    >>> branch_gain(16)
    0.25
    """
    if blocks < 0:
        raise ValueError(f"expected a number of residual additions of 0 or more, got {blocks}")
    return 1 / math.sqrt(max(blocks, 1))


def identity_init_(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Initialize convolutions as the identity except after poolings, in place.

    This is the paper's variant of the initialization.

    A convolution with an odd kernel, stride 1 and as many output as input channels gets the
    identity (Dirac) filter. All other layers get He fan-in: the first layer of the model, the first
    one after each pooling, unpooling or strided convolution, those that change the number of
    channels, those with weight_standardization, and linear layers.

    Layers with weight_norm scale the identity filter to the norm of a He filter, so their gain
    starts at the inverse of that norm and the layer is the identity too.

    Layers and poolings are visited in the order in which the model registers them. A pooling that
    is a function call, or one module used in several places, is not found; initialize the
    layer after it with `torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")`.

    Args:
        model: The model to initialize.
        generator: Random number generator for the He filters; torch's default if None.

    Returns:
        The same model.

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
                if _normalizes_filters(module):
                    nn.init.constant_(module.gain, 1 / module.filter_norm.norm)  # type: ignore[arg-type, operator]
            first_after_pooling = strided or getattr(module, "pools", False)
    return model


def unit_init_(
    model: nn.Module,
    example: Any,
    outputs: Iterable[nn.Module] = (),
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Initialize with He fan-in, then scale pre-activations to variance 1, in place.

    He fan-in preserves the second moment of the signal from layer to layer. AGC subtracts the map
    mean, which after a ReLU carries 1/pi of that moment, so the signal shrinks in every layer:
    SegNet's logits and gradients start at a thousandth of BatchNorm's. This initialization divides
    each layer's filters by the standard deviation of its pre-activation on an example, layer after
    layer (Mishkin and Matas, "All you need is a good init", 2016). It is not part of the paper.

    AGC1d/2d/3d layers and layers with weight_norm have their gamma scaled. AGCLinear layers keep He
    fan-in.

    Args:
        model: The model to initialize.
        example: A typical input of the model, or a tuple of its inputs. A few images are enough.
        outputs: The layers that end the model. They start at a tenth of He fan-in, because large
            random outputs cost the first training steps.
        generator: Random number generator for the filters; torch's default if None.

    Returns:
        The same model.

    >>> from deepcontrol import AGCConv2d
    >>> neuron, head = AGCConv2d(3, 8, 3, activation="none"), nn.Conv2d(8, 2, 1)
    >>> images = 7 * torch.randn(2, 3, 16, 16)
    >>> model = unit_init_(nn.Sequential(neuron, head), images, outputs=[head])
    >>> f"{neuron(images).std().item():.3f}"
    '1.000'
    """
    return scale_to_unit_(he_init_(model, generator), example, outputs)


@torch.no_grad()
def scale_to_unit_(model: nn.Module, example: Any, outputs: Iterable[nn.Module] = ()) -> nn.Module:
    """Scale the filters of an initialized model to pre-activations of variance 1."""
    for layer in outputs:
        scale_output_(layer, OUTPUT_SCALE)
    scaled: set[nn.Module] = set()  # a module that is called twice is scaled once

    def scale(layer: nn.Module, inputs: tuple[Tensor, ...], keywords: Any, output: Any) -> Any:
        if layer in scaled:
            return output
        scaled.add(layer)
        if isinstance(layer.weight, Tensor):
            x = inputs[0] if inputs else keywords["input"]
            scale_output_(layer, unit_scale(layer, x))
        return layer.forward(*inputs, **keywords)

    hooks = [
        m.register_forward_hook(scale, with_kwargs=True)
        for m in model.modules()
        if is_agc_over_maps(m)
    ]
    try:
        model(*example) if isinstance(example, tuple) else model(example)
    finally:
        for hook in hooks:
            hook.remove()
    return model


def is_agc_over_maps(module: nn.Module) -> bool:
    """Return whether a module is AGC, AGCConv or AGCConvTranspose (1d, 2d or 3d)."""
    # By attribute, not by class: conv.py imports this module.
    return hasattr(module, "shared_means")


def unit_scale(layer: Any, x: Tensor) -> float:
    """Return 1 / std of the pre-activation of an AGC layer for its input x."""
    # AGC1d/2d/3d multiply by gamma after the means; a convolution has its gain in the filters.
    gamma = layer.weight if layer.weight.dim() == 1 else torch.ones_like(layer.mean_scale)
    measured = _MeasuredScale(layer.mean_scale, gamma, check_background(layer.background))
    layer.shared_means = measured
    try:
        layer.forward(x)
    finally:
        layer.shared_means = None
    return measured.scale


class _MeasuredScale:
    """Stand-in for SharedMeans that reads maps before their mean is subtracted."""

    scale = 1.0

    def __init__(self, mean_scale: Tensor, gamma: Tensor, background: Any) -> None:
        self.mean_scale, self.gamma, self.background = mean_scale, gamma, background

    def of(self, z: Tensor) -> Tensor:
        mean = map_mean(z)
        if self.background == "mean":
            centered = z - over_maps(self.mean_scale * mean, z)
        else:
            centered = z - over_maps(self.mean_scale, z) * self.background(z)
        before, after = z.float().std().item(), centered.float().std().item()
        if after > 1e-3 * before:  # else only rounding errors are left, as on 1x1 maps
            scaled = over_maps(self.gamma.expand_as(mean), z) * centered
            self.scale = 1 / scaled.float().std().item() if self.gamma.any() else 1.0
        return mean


def he_normal_(layer: Any, generator: torch.Generator | None = None) -> Tensor:
    """Fill a layer's filters from N(0, 2 / fan_in).

    Without an activation the variance is 1 / fan_in.
    """
    weight: Tensor = layer.weight
    fan_in = math.prod(weight.shape[1:])
    if isinstance(layer, _ConvTransposeNd):
        # weight is (in, out / groups, *), and 1 of prod(stride) taps contributes to an output.
        taps = math.prod(weight.shape[2:]) / math.prod(layer.stride)
        fan_in = weight.shape[0] / layer.groups * taps  # type: ignore[assignment]
    std = math.sqrt(_he_variance(layer) / max(fan_in, 1))
    if not is_parametrized(layer, "weight"):
        return nn.init.normal_(weight, 0.0, std, generator=generator)
    return set_filters_(
        layer, nn.init.normal_(torch.empty_like(weight), 0.0, std, generator=generator)
    )


def he_filter_norm(layer: Any) -> float:
    """Return the norm of a filter with He fan-in (the root of its expected square)."""
    # Of a transposed convolution, an output sees one of prod(stride) taps of its filter.
    unseen = math.prod(layer.stride) if isinstance(layer, _ConvTransposeNd) else 1
    return math.sqrt(_he_variance(layer) * unseen)


def _he_variance(layer: Any) -> float:
    """Return the variance of He filters times their fan-in."""
    return 1.0 if getattr(layer, "activation", "relu") == "none" else 2.0


@torch.no_grad()
def scale_output_(layer: Any, factor: float) -> None:
    """Scale a layer's filters, or its gain if the norm of its filters has no effect."""
    if _normalizes_filters(layer):
        layer.gain.mul_(factor)
    else:
        set_filters_(layer, factor * layer.weight)


def _normalizes_filters(layer: nn.Module) -> bool:
    """Return whether a layer is an AGCConv or AGCLinear that normalizes its filters."""
    return getattr(layer, "filter_norm", None) is not None


@torch.no_grad()
def set_filters_(layer: Any, filters: Tensor) -> Tensor:
    """Set a layer's filters, also if they are parametrized (weight norm)."""
    if is_parametrized(layer, "weight"):
        layer.weight = filters
    else:
        layer.weight.copy_(filters)
    weight: Tensor = layer.weight
    return weight


def reset_all_but_filters_(layer: nn.Module) -> None:
    """Set bias to 0, gain to 1 and mean_scale to its start, if the layer has them."""
    start_mean_scale = getattr(layer, "start_mean_scale", 1.0)
    for name, start in (("bias", 0.0), ("gain", 1.0), ("mean_scale", start_mean_scale)):
        parameter = getattr(layer, name, None)
        if isinstance(parameter, Tensor):
            nn.init.constant_(parameter, start)


def _is_norm(module: nn.Module) -> bool:
    """Return whether all parameters are per channel and the module can reset them."""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(p.dim() == 1 for p in own) and hasattr(module, "reset_parameters")


def _can_be_identity(layer: _ConvNd) -> bool:
    filter_norm = getattr(layer, "filter_norm", None)
    return (
        layer.in_channels == layer.out_channels
        and not (filter_norm is not None and filter_norm.centered)
        and not isinstance(layer, _ConvTransposeNd)
        and all(k % 2 == 1 for k in layer.kernel_size)
    )
