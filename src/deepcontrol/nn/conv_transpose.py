"""The neuron with a transposed convolution, for upsampling in decoders."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from ..ops import center_bias_act, gain_conv_transpose
from ..ops.activation import ActivationName
from ..ops.agc import center_bias_act_given_mean
from ..ops.background import Background
from ..ops.layout import positions
from .conv import _AGCConv, check_input
from .layer import is_plain, warn_if_single_position


class _AGCConvTranspose(_AGCConv, _ConvTransposeNd):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        *,
        dilation: Any = 1,
        activation: ActivationName | nn.Module | type[nn.Module] | None = "relu",
        weight_norm: bool = False,
        weight_standardization: bool = False,
        background: Background = "mean",
        noise: float = 0.0,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sides = padding if isinstance(padding, (tuple, list)) else (padding,)
        if not all(isinstance(p, int) for p in sides):
            raise ValueError(
                f"{type(self).__name__} takes a number as padding, or one per dimension, got "
                f"{padding!r}: choose the size of the output with output_padding or output_size"
            )
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups,
            activation=activation, weight_norm=weight_norm,
            weight_standardization=weight_standardization, background=background, noise=noise,
            bias=bias, padding_mode=padding_mode, device=device, dtype=dtype,
        )  # fmt: skip
        several = isinstance(output_padding, (tuple, list))
        self.output_padding = (
            tuple(output_padding) if several else (output_padding,) * len(self.stride)
        )

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        check_input(self, input)
        dims = len(self.stride)
        if input.dim() == dims + 1:  # without a batch
            size = None if output_size is None else output_size[-dims:]
            return self.forward(input.unsqueeze(0), size).squeeze(0)
        if self.shared_means is None and not is_plain(self):
            return self._forward_with_extras(input, output_size=output_size)
        v = self._convolved(input, output_size=output_size)
        if self.shared_means is None:
            return center_bias_act(v, self.bias, self.mean_scale, self.activation, overwrite=True)
        mean = self.shared_means.of(v)
        return center_bias_act_given_mean(v, mean, self.bias, self.mean_scale, self.activation)

    def _convolved(
        self, input: Tensor, gain: Tensor | None = None, output_size: Sequence[int] | None = None
    ) -> Tensor:
        """Return conv_transpose(x, V) with the scaled filters V."""
        v = gain_conv_transpose(
            input, self.weight, self.gain if gain is None else gain,
            self.stride, self.padding, padding_of_output(self, input, output_size),
            self.dilation, self.groups, self.filter_norm,
        )  # fmt: skip
        warn_if_single_position(self, positions(v))
        return v


def padding_of_output(
    conv: _ConvTransposeNd, input: Tensor, output_size: Sequence[int] | None
) -> list[int]:
    """Return the output_padding for an output_size; the layer's if it is None.

    Raises:
        ValueError: If the layer cannot produce an output of that size.
    """
    size = None if output_size is None else list(output_size)
    geometry: Any = (conv.stride, conv.padding, conv.kernel_size, len(conv.stride), conv.dilation)
    return list(conv._output_padding(input, size, *geometry))


class AGCConvTranspose1d(_AGCConvTranspose, nn.ConvTranspose1d):
    """The neuron with a transposed convolution over (N, C, L).

    See AGCConvTranspose2d.

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, Eq. 1, there for convolutions.

    >>> AGCConvTranspose1d(8, 3, kernel_size=2, stride=2)(torch.randn(1, 8, 16)).shape
    torch.Size([1, 3, 32])
    """


class AGCConvTranspose2d(_AGCConvTranspose, nn.ConvTranspose2d):
    """Neuron of transposed convolution, AGC (automatic gain control) and activation.

        z = conv_transpose(x, W)        y = act( gamma * (z - lambda * mean(z)) + beta )

    with the mean over H and W, per sample and filter. It computes the same as
    ConvTranspose2d(bias=False), AGC2d and the activation one after the other, with the gain in the
    weights. For relu, leaky_relu and none, the layer saves x and N x C means for backward, and no
    other map (on a GPU also one bit per output element).

    It is an nn.ConvTranspose2d: `weight` is the filter W and `bias` is beta (initially 0). It adds
    `gain` (gamma, 1) and `mean_scale` (lambda, 1), each (out_channels,). See AGCConv2d for
    weight_norm and weight_standardization, where c is multiplied by the root of the number of
    outputs per input position (the product of the strides), as He fan-in does.

    Args:
        in_channels, out_channels, kernel_size, stride, output_padding, groups, dilation: As in
            nn.ConvTranspose2d.
        padding: As in nn.ConvTranspose2d: a number, or one per dimension.
        activation: As in AGCConv2d.
        weight_norm: Normalize the filter of each output channel.
        weight_standardization: Center and normalize the filter of each output channel.
        background, noise: As in AGCConv2d.
        bias: Must be True: beta is part of the neuron.
        padding_mode, device, dtype: As in nn.ConvTranspose2d.

    Shape:
        (N, in_channels, H, W) or (in_channels, H, W) -> the output shape of nn.ConvTranspose2d.
        As there, forward takes an optional output_size.

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, Eq. 1, there for convolutions.

    >>> neuron = AGCConvTranspose2d(16, 8, kernel_size=3, stride=2, padding=1)
    >>> neuron(torch.randn(1, 16, 8, 8)).shape
    torch.Size([1, 8, 15, 15])
    >>> neuron(torch.randn(1, 16, 8, 8), output_size=(16, 16)).shape
    torch.Size([1, 8, 16, 16])
    """


class AGCConvTranspose3d(_AGCConvTranspose, nn.ConvTranspose3d):
    """The neuron with a transposed convolution over (N, C, D, H, W).

    See AGCConvTranspose2d.

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, Eq. 1, there for convolutions.

    >>> AGCConvTranspose3d(8, 3, kernel_size=2, stride=2)(torch.randn(1, 8, 4, 4, 4)).shape
    torch.Size([1, 3, 8, 8, 8])
    """
