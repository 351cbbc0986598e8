"""The paper's neuron: a convolution with AGC (automatic gain control) and nonlinearity inside."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..ops import gain_conv, max_pool2x2
from ..ops.activation import ActivationName, get_activation
from ..ops.given_mean import center_bias_act_given_mean
from ..ops.maps import positions
from ..ops.neuron import Geometry, Parameters, neuron, neuron_pool
from .init import he_normal_, reset_all_but_filters_
from .layer import FxLeaf, warn_if_single_position
from .shared_means import SharedMeans


class _AGCConv(FxLeaf, _ConvNd):
    bias: nn.Parameter
    activation: ActivationName
    shared_means: SharedMeans | None = None  # set where the maps are tiles of larger ones
    feeds = 0.0  # set where the next neuron is known: elements it writes for each that it reads

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        activation: ActivationName = "relu",
        *,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        get_activation(activation)
        self.activation = activation  # before torch's constructor, which resets the parameters
        super().__init__(  # type: ignore[call-arg]
            in_channels,
            out_channels,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=True,
            padding_mode=padding_mode,  # type: ignore[arg-type]
            device=device,
            dtype=dtype,
        )
        self.gain = nn.Parameter(torch.ones(out_channels, device=device, dtype=dtype))
        self.mean_scale = nn.Parameter(torch.ones(out_channels, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """He fan-in filters, gain = 1, bias = 0, mean_scale = 1.

        AGC does not bring the signal to a fixed scale, so the filters must start at the right one:
        torch's own default for convolutions would lose it within a few layers.
        """
        he_normal_(self)
        reset_all_but_filters_(self)  # the gain is not there yet while torch's constructor runs

    def forward(self, input: Tensor) -> Tensor:
        check_input(self, input)
        if input.dim() < self.weight.dim():
            return self._neuron(input.unsqueeze(0)).squeeze(0)
        return self._neuron(input)

    def _neuron(self, input: Tensor) -> Tensor:
        if self.shared_means is not None:
            return self._given_mean(self._convolved(input), self.shared_means)
        y = neuron(*self._of(input), self.activation, self.feeds)
        warn_if_single_position(self, positions(y))
        return y

    def _of(self, input: Tensor) -> tuple[Tensor, Parameters, Geometry]:
        x, padding = padded(self, input)
        parameters = Parameters(self.weight, self.gain, self.bias, self.mean_scale)
        return x, parameters, Geometry(self.stride, padding, self.dilation, self.groups)

    def _given_mean(self, v: Tensor, shared: SharedMeans) -> Tensor:
        mean = shared.of(v)
        return center_bias_act_given_mean(v, mean, self.bias, self.mean_scale, self.activation)

    def _convolved(self, input: Tensor) -> Tensor:
        """conv(x, gamma W)"""
        x, parameters, geometry = self._of(input)
        v = gain_conv(x, parameters.weight, parameters.gain, *geometry)
        warn_if_single_position(self, positions(v))
        return v

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


def check_input(conv: _ConvNd, input: Tensor) -> None:
    """ValueError, with the numbers, unless input is (N, C, *) or (C, *) of the right C."""
    spatial = conv.weight.dim() - 2
    if input.dim() not in (spatial + 1, spatial + 2):
        raise ValueError(
            f"expected {spatial + 2}-D input, or {spatial + 1}-D without a batch, "
            f"got {input.dim()}-D: {tuple(input.shape)}"
        )
    if input.shape[-spatial - 1] != conv.in_channels:
        raise ValueError(
            f"expected {conv.in_channels} channels, got {input.shape[-spatial - 1]} "
            f"in the input of shape {tuple(input.shape)}"
        )


def padded(conv: _ConvNd, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """x and the zero padding that is left to the convolution, which can only pad evenly."""
    both_sides = conv._reversed_padding_repeated_twice
    if conv.padding_mode != "zeros":
        x = nn.functional.pad(x, both_sides, mode=conv.padding_mode)
    elif both_sides[::2] != both_sides[1::2]:  # "same" around an even kernel
        x = nn.functional.pad(x, both_sides)
    else:
        return x, tuple(both_sides[::-2])
    return x, (0,) * (conv.weight.dim() - 2)


class AGCConv1d(_AGCConv, nn.Conv1d):
    """The neuron with AGC (automatic gain control) over (N, C, L): see AGCConv2d.

    >>> AGCConv1d(3, 8, kernel_size=3)(torch.randn(1, 3, 16)).shape
    torch.Size([1, 8, 14])
    """


class AGCConv2d(_AGCConv, nn.Conv2d):
    """A convolution, AGC (automatic gain control) and activation in one: the paper's neuron, Eq. 1.

        y = act( gamma * (z - lambda * mean(z)) + beta )        z = x * W, mean over H, W per sample

    It computes what Conv2d(bias=False), AGC2d and the activation compute in turn, but with the
    gain in the weights: conv(x, gamma W), less lambda times its mean, plus beta, activated. For
    relu, leaky_relu and none, its backward needs x and N x C means, and no other map.

    It is an nn.Conv2d: `weight` is the filter W and `bias` is beta (starts at 0); it adds `gain`
    (gamma, 1) and `mean_scale` (lambda, 1), each (out_channels,). activation is one of relu,
    leaky_relu, silu, gelu, none. Under autocast it returns autocast's dtype, as Conv2d does.

    >>> neuron = AGCConv2d(3, 16, kernel_size=3, padding=1)
    >>> neuron(torch.randn(1, 3, 32, 32)).shape
    torch.Size([1, 16, 32, 32])
    """


class AGCConvPool2d(AGCConv2d):
    """The neuron and a 2x2 max pooling in one: what ends a stage of an encoder. See AGCConv2d.

    Returns the pooled maps (N, C, H // 2, W // 2) and their index, a byte for each, for
    ops.max_unpool2x2: the same as max_pool2x2(AGCConv2d(...)(x)). The unpooled map is not kept for
    the backward, and on a GPU not even written.

    >>> pooled, index = AGCConvPool2d(3, 16, kernel_size=3, padding=1)(torch.randn(1, 3, 32, 32))
    >>> pooled.shape, index.dtype
    (torch.Size([1, 16, 16, 16]), torch.uint8)
    """

    pools = True  # for identity_init_, which starts afresh after a pooling

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if input.dim() != 4 or input.shape[1] != self.in_channels:
            raise ValueError(
                f"expected 4-D input of {self.in_channels} channels, got {tuple(input.shape)}"
            )
        if self.shared_means is not None:
            return max_pool2x2(self._given_mean(self._convolved(input), self.shared_means))
        return neuron_pool(*self._of(input), self.activation, self.feeds)


class AGCConv3d(_AGCConv, nn.Conv3d):
    """The neuron with AGC (automatic gain control) over volumes (N, C, D, H, W): see AGCConv2d.

    >>> AGCConv3d(3, 8, kernel_size=3)(torch.randn(1, 3, 6, 8, 8)).shape
    torch.Size([1, 8, 4, 6, 6])
    """
