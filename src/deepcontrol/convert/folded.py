"""The neuron at inference: a convolution whose bias is computed from its input.

    y = act( conv(x, V) + beta - lambda * m )          V = gamma W, m = mean of conv(x, V)

m comes from sums over x (window_sums.py), before the convolution runs. So nothing passes over the
output: at batch 1, beta - lambda * m is the convolution's own bias.
"""

from collections.abc import Callable
from typing import TypeGuard

from torch import Tensor, addcmul, nn
from torch.nn.functional import conv1d, conv2d, conv3d
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import type_before_parametrizations

from ..nn import AGCConv1d, AGCConv2d, AGCConv3d, AGCConvPool2d
from ..nn.conv import _AGCConv, check_input, padded
from ..nn.symbolic import OneNode
from ..ops import max_pool2x2
from ..ops.activation import ActivationName, get_activation
from ..ops.layout import over_maps
from ..ops.reference import LEAKY_SLOPE, conv, scaled_filters
from .layers import geometry
from .window_sums import window_means

_CONVOLUTIONS = {1: conv1d, 2: conv2d, 3: conv3d}  # which, unlike torch.convolution, autocast knows


class _FoldedConv(OneNode, _ConvNd):
    bias: nn.Parameter
    mean_scale: nn.Parameter
    activation: ActivationName

    def __init__(self, neuron: _AGCConv) -> None:
        super().__init__(**geometry(neuron), device="meta")
        self.weight = constant(scaled_filters(neuron.weight, neuron.gain, neuron.weight.dtype))
        self.bias = constant(neuron.bias.clone())
        self.mean_scale = constant(neuron.mean_scale.clone())
        self.activation = neuron.activation

    def reset_parameters(self) -> None:
        """Nothing: a folded neuron has no start of its own, it is made of a trained one."""

    def forward(self, input: Tensor) -> Tensor:
        check_input(self, input)
        if input.dim() < self.weight.dim():
            return self.forward(input.unsqueeze(0)).squeeze(0)
        return get_activation(self.activation).apply_(self._biased(input))

    def _biased(self, input: Tensor) -> Tensor:
        """conv(x, V) + beta - lambda * m"""
        x, padding = padded(self, input)
        bias = self._shift(x, padding)
        if x.shape[0] == 1:
            return self._convolved(x, padding, bias.flatten())
        return self._convolved(x, padding).add_(over_maps(bias, x))

    def _convolved(self, x: Tensor, padding: tuple[int, ...], bias: Tensor | None = None) -> Tensor:
        run = _CONVOLUTIONS[x.dim() - 2]
        return run(x, self.weight, bias, self.stride, padding, self.dilation, self.groups)

    def _shift(self, x: Tensor, padding: tuple[int, ...]) -> Tensor:
        """beta - lambda * m, (N, C)"""
        shift = addcmul(self.bias, self.mean_scale, self._means(x, padding), value=-1)
        return shift.to(self.weight.dtype)

    def _means(self, x: Tensor, padding: tuple[int, ...]) -> Tensor:
        """The mean of each map of conv(x, V), (N, C)."""
        window = window_means(x, self.kernel_size, self.stride, padding, self.dilation)
        ones, zeros = (1,) * (x.dim() - 2), (0,) * (x.dim() - 2)
        window = window.to(self.weight.dtype)
        return conv(window, self.weight, ones, zeros, ones, self.groups).flatten(1)

    def means(self, input: Tensor) -> Tensor:
        """The mean of each map before bias and activation, (N, C); without a batch, (1, C)."""
        batch = input if input.dim() == self.weight.dim() else input.unsqueeze(0)
        return self._means(*padded(self, batch))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class FoldedConv1d(_FoldedConv, nn.Conv1d):
    """AGCConv1d for inference: see FoldedConv2d."""


class FoldedConv2d(_FoldedConv, nn.Conv2d):
    """AGCConv2d for inference: a convolution with a computed bias, and its activation.

    `weight` is gamma W, `bias` is beta, `mean_scale` is lambda; none of them trains.
    """


class FoldedConv3d(_FoldedConv, nn.Conv3d):
    """AGCConv3d for inference: see FoldedConv2d."""


class FoldedConvPool2d(FoldedConv2d):
    """AGCConvPool2d for inference: pooled maps and their index of one byte a window.

    ReLU runs before the pooling, though after it there would be less to do: where a window has
    nothing above zero the index names the first position, and an unpooling elsewhere reads it.
    """

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return max_pool2x2(super().forward(input))


_FOLDED: dict[type[_AGCConv], type[_FoldedConv]] = {
    AGCConv1d: FoldedConv1d,
    AGCConv2d: FoldedConv2d,
    AGCConv3d: FoldedConv3d,
    AGCConvPool2d: FoldedConvPool2d,
}


def folded(neuron: _AGCConv) -> nn.Module:
    """The neuron for inference; where no lambda is left in it, a plain convolution."""
    layer = _FOLDED[type_before_parametrizations(neuron)](neuron)
    lam = layer.mean_scale
    if lam.is_meta or lam.any() or isinstance(layer, FoldedConvPool2d):
        return layer
    return plain(layer, layer.bias)


def can_fold(module: nn.Module) -> TypeGuard[_AGCConv]:
    """Whether the module is one of the neurons here, and not one with a forward of its own."""
    return type_before_parametrizations(module) in _FOLDED and "forward" not in vars(module)


def plain(layer: _FoldedConv, bias: Tensor) -> nn.Module:
    """torch's own convolution with that bias, and its activation behind it."""
    convolution = getattr(nn, f"Conv{layer.weight.dim() - 2}d")(**geometry(layer), device="meta")
    convolution.weight, convolution.bias = layer.weight, constant(bias.to(layer.weight))
    layers = [convolution, *activation_layers(layer.activation)]
    if isinstance(layer, FoldedConvPool2d):
        layers.append(_Pool2x2())
    return nn.Sequential(*layers) if len(layers) > 1 else convolution


def activation_layers(name: ActivationName) -> list[nn.Module]:
    """An activation as torch's own layer, over a map that nobody else reads; none for "none"."""
    make: dict[str, Callable[[], nn.Module]] = {
        "relu": lambda: nn.ReLU(inplace=True),
        "leaky_relu": lambda: nn.LeakyReLU(LEAKY_SLOPE, inplace=True),
        "silu": lambda: nn.SiLU(inplace=True),
        "gelu": nn.GELU,
    }
    return [make[name]()] if name != "none" else []


class _Pool2x2(OneNode, nn.Module):
    """The pooling of AGCConvPool2d by itself."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return max_pool2x2(input)


def constant(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach(), requires_grad=False)
