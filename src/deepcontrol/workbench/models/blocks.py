"""The block that every network here is built of: convolution, normalization, activation.

A network asks for blocks and does not know which normalization it gets; `conv_block(norm)` is the
one place that does.
"""

import math
from collections.abc import Callable
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from ...nn import AGCConv2d, AGCConv3d
from ...ops.layout import accumulate_dtype

Norm = Literal["agc", "bn", "gn", "in", "frn", "none"]
NORMS: tuple[str, ...] = get_args(Norm)


class Block(Protocol):
    """Makes a block from maps (N, in_channels, *) to (N, out_channels, *), each side / stride."""

    def __call__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        activation: Literal["relu", "none"] = "relu",
    ) -> nn.Module: ...


def conv_block(norm: Norm, dims: Literal[2, 3] = 2) -> Block:
    """A maker of blocks over maps of 2 or 3 dimensions, for one of the NORMS.

    frn is for 2 dimensions, and its blocks always end in its own threshold instead of ReLU.
    """
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}: choose one of {', '.join(NORMS)}")
    if norm == "frn" and dims != 2:
        raise ValueError(f"norm 'frn' is for maps of 2 dimensions, not {dims}: choose another")
    neuron = {2: AGCConv2d, 3: AGCConv3d}[dims]
    convolution = {2: nn.Conv2d, 3: nn.Conv3d}[dims]

    def block(
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        activation: Literal["relu", "none"] = "relu",
    ) -> nn.Module:
        shape = (in_channels, out_channels, kernel_size, stride, kernel_size // 2)
        if norm == "agc":
            return neuron(*shape, activation=activation)
        if norm == "frn" and activation == "none":
            raise ValueError("norm 'frn' ends in its own threshold: it has no block without one")
        layers: list[nn.Module] = [convolution(*shape, bias=norm == "none")]
        if norm != "none":
            layers.append(_LAYERS[norm, dims](out_channels))
        if norm != "frn" and activation == "relu":
            # In place, over a map that no layer keeps: convolutions and norms keep their inputs.
            layers.append(nn.ReLU(inplace=True))
        return nn.Sequential(*layers)

    return block


class FilterResponseNorm2d(nn.Module):
    """Filter Response Normalization with its thresholded linear unit (Singh & Krishnan, 2020).

    y = max(gamma * z / sqrt(mean(z^2) + eps) + beta, tau)       mean over H, W, per sample, channel

    It ends in its own threshold tau instead of ReLU; that is the method.
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.threshold = nn.Parameter(torch.zeros(channels))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.threshold)

    def forward(self, z: Tensor) -> Tensor:
        power = z.square().mean((2, 3), keepdim=True, dtype=accumulate_dtype(z.dtype))
        gain = self.weight[:, None, None] * torch.rsqrt(power + self.eps)
        y = gain * z + self.bias[:, None, None]
        return torch.maximum(y, self.threshold[:, None, None]).to(z.dtype)


def _group_norm(channels: int) -> nn.GroupNorm:
    """32 groups as usual, or the largest power of two that divides the width."""
    return nn.GroupNorm(math.gcd(channels, 32), channels)


_LAYERS: dict[tuple[str, int], Callable[[int], nn.Module]] = {
    ("bn", 2): nn.BatchNorm2d,
    ("bn", 3): nn.BatchNorm3d,
    ("gn", 2): _group_norm,
    ("gn", 3): _group_norm,
    ("in", 2): lambda c: nn.InstanceNorm2d(c, affine=True),
    ("in", 3): lambda c: nn.InstanceNorm3d(c, affine=True),
    ("frn", 2): FilterResponseNorm2d,
}


def scaled(channels: int, width: float) -> int:
    """channels x width, at least 4 and a multiple of 4, so that every norm and kernel is happy."""
    if width <= 0:
        raise ValueError(f"width must be positive, got {width}")
    return max(4, 4 * round(channels * width / 4))
