"""Building block of all networks: convolution, normalization, activation.

`conv_block(norm)` is the only place that depends on the kind of normalization.
"""

import math
from collections.abc import Callable
from typing import Literal, Protocol, get_args

from torch import Tensor, nn

from ...nn import AGCConv2d, AGCConv3d
from ...nn.init import CENTERING_GAIN, branch_gain
from .norms import (
    EvoNorm2dS0,
    FilterResponseNorm2d,
    ThresholdedLinearUnit2d,
    WeightStandardizedConv2d,
    WeightStandardizedConv3d,
)

Norm = Literal[
    "agc", "agc+wn", "agc+ws", "bn", "gn", "in", "ln", "frn", "evonorm-s0", "ws+bn", "ws+gn", "none"
]
NORMS: tuple[str, ...] = get_args(Norm)
BlockActivation = Literal["relu", "leaky_relu", "none"]
OWN_ACTIVATION = ("frn", "evonorm-s0")  # norms with an activation in place of ReLU; only in 2-D


def is_agc(norm: str) -> bool:
    """Return whether a norm is AGC.

    Its filters may be normalized or standardized.

    >>> is_agc("agc"), is_agc("agc+ws"), is_agc("bn")
    (True, True, False)
    """
    return norm in ("agc", "agc+wn", "agc+ws")


class Block(Protocol):
    """Factory of blocks from (N, in_channels, *) to (N, out_channels, *).

    The sides are divided by stride.
    """

    def __call__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        activation: BlockActivation = "relu",
    ) -> nn.Module: ...


def conv_block(norm: Norm, dims: Literal[2, 3] = 2, groups: int = 32) -> Block:
    """Return a factory of blocks with one kind of normalization.

    Args:
        norm: One of NORMS. agc+wn is agc with weight_norm and agc+ws with
            weight_standardization. frn and evonorm-s0 have their own activations in place of ReLU.
            ln is over channels and positions: GroupNorm with one group.
        dims: Dimensions of the feature maps, 2 or 3. frn and evonorm-s0 support only 2.
        groups: Groups of gn, ws+gn and evonorm-s0; fewer where it does not divide the channels.
    """
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}: choose one of {', '.join(NORMS)}")
    if norm in OWN_ACTIVATION and dims != 2:
        raise ValueError(
            f"norm {norm!r} supports only 2 dimensions, got {dims}: choose another norm"
        )
    agc_convolution = {2: AGCConv2d, 3: AGCConv3d}[dims]
    convolution: type[nn.Conv2d] | type[nn.Conv3d] = nn.Conv2d if dims == 2 else nn.Conv3d
    if norm in ("ws+bn", "ws+gn"):
        convolution = WeightStandardizedConv2d if dims == 2 else WeightStandardizedConv3d

    def block(
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        activation: BlockActivation = "relu",
    ) -> nn.Module:
        shape = (in_channels, out_channels, kernel_size, stride, kernel_size // 2)
        if is_agc(norm):
            return agc_convolution(
                *shape,
                activation=activation,
                weight_norm=norm == "agc+wn",
                weight_standardization=norm == "agc+ws",
            )
        layers: list[nn.Module] = [convolution(*shape, bias=norm == "none")]
        if norm != "none":
            layers.append(_norm_layer(norm, dims, out_channels, groups, activation != "none"))
        if norm not in OWN_ACTIVATION and activation != "none":
            # In-place is safe: convolutions and norms save their inputs, not their outputs.
            layers.append(
                nn.ReLU(inplace=True) if activation == "relu" else nn.LeakyReLU(inplace=True)
            )
        return nn.Sequential(*layers)

    return block


def projection(block: Block, in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return the shortcut of a block that changes its shape: pooling and 1x1 filters.

    The average pooling (https://arxiv.org/abs/1812.01187) reads every position. A 1x1 convolution
    with stride 2 would skip three of four, and torch 2.13 crashes in its backward pass on a CPU if
    it has fewer than 16 input channels in channels_last.
    """
    convolution = block(in_channels, out_channels, 1, activation="none")
    if stride == 1:
        return convolution
    pool = nn.AvgPool2d(stride, ceil_mode=True, count_include_pad=False)
    return nn.Sequential(pool, convolution)


def sum_activation(norm: Norm, channels: int, groups: int = 32) -> nn.Module:
    """Return the activation after a residual addition: that of the norm, or ReLU.

    Args:
        norm: One of NORMS.
        channels: Channels of the sum.
        groups: Groups of evonorm-s0; fewer where it does not divide the channels.
    """
    if norm == "frn":
        return ThresholdedLinearUnit2d(channels)
    if norm == "evonorm-s0":
        return _norm_layer(norm, 2, channels, groups, activation=True)
    return nn.ReLU(inplace=True)


def _norm_layer(norm: Norm, dims: int, channels: int, groups: int, activation: bool) -> nn.Module:
    """Return the layer that follows a convolution."""
    if norm in ("bn", "ws+bn"):
        return nn.BatchNorm2d(channels) if dims == 2 else nn.BatchNorm3d(channels)
    if norm == "in":
        instance_norm = nn.InstanceNorm2d if dims == 2 else nn.InstanceNorm3d
        return instance_norm(channels, affine=True)
    if norm == "frn":
        return FilterResponseNorm2d(channels, activation=activation)
    if norm == "ln":
        return nn.GroupNorm(1, channels)
    groups = math.gcd(channels, groups)
    if norm == "evonorm-s0":
        return EvoNorm2dS0(channels, groups, activation=activation)
    return nn.GroupNorm(groups, channels)  # gn, ws+gn


class ResidualBlock(nn.Module):
    """act(shortcut + branch). Subclasses set the three."""

    branch: nn.Sequential
    shortcut: Callable[[Tensor], Tensor]
    activation: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        # In-place saves a feature map: no layer saves the output of the branch.
        return self.activation(self.branch(x).add_(self.shortcut(x)))


class ResidualNetwork(nn.Module):
    """Base of networks with residual blocks: the initial gains of AGC."""

    def start_gains_(self) -> None:
        """Set the initial gains of AGC, as to_agc(init="scratch") does.

        Neurons start at CENTERING_GAIN, which makes up for the variance of the mean that they
        subtract, and the last neuron of a residual branch at branch_gain(number of blocks) times
        that. With gain 1 every block doubles the signal's variance, and a ResNet-50 of a quarter
        of the width diverged at learning rate 0.1 (dev/LOG.md). Call it again after he_init_, which
        sets all gains to 1. Other norms are not changed.
        """
        ends = [m.branch[-1] for m in self.modules() if isinstance(m, ResidualBlock)]
        for layer in self.modules():
            if isinstance(layer, (AGCConv2d, AGCConv3d)):
                factor = branch_gain(len(ends)) if layer in ends else 1.0
                nn.init.constant_(layer.gain, CENTERING_GAIN * factor)


def scaled(channels: int, width: float) -> int:
    """Scale a number of channels by `width`, to a multiple of 4 and at least 4."""
    if width <= 0:
        raise ValueError(f"width must be positive, got {width}")
    return max(4, 4 * round(channels * width / 4))
