"""Building block of all networks: convolution, normalization, activation.

`conv_block(norm)` is the only place that depends on the kind of normalization.
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
    """Factory of blocks from (N, in_channels, *) to (N, out_channels, *), with sides / stride."""

    def __call__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        activation: Literal["relu", "none"] = "relu",
    ) -> nn.Module: ...


def conv_block(norm: Norm, dims: Literal[2, 3] = 2) -> Block:
    """Return a factory of blocks with one kind of normalization.

    Args:
        norm: One of NORMS. frn has its own activation, a learned threshold, in place of ReLU.
        dims: Dimensions of the feature maps, 2 or 3. frn supports only 2.
    """
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}: choose one of {', '.join(NORMS)}")
    if norm == "frn" and dims != 2:
        raise ValueError(f"norm 'frn' supports only 2 dimensions, got {dims}: choose another norm")
    agc_convolution = {2: AGCConv2d, 3: AGCConv3d}[dims]
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
            return agc_convolution(*shape, activation=activation)
        if norm == "frn" and activation == "none":
            raise ValueError(
                "norm 'frn' needs activation 'relu', got 'none': its threshold is its activation"
            )
        layers: list[nn.Module] = [convolution(*shape, bias=norm == "none")]
        if norm != "none":
            layers.append(_LAYERS[norm, dims](out_channels))
        if norm != "frn" and activation == "relu":
            # In-place is safe: convolutions and norms save their inputs, not their outputs.
            layers.append(nn.ReLU(inplace=True))
        return nn.Sequential(*layers)

    return block


class FilterResponseNorm2d(nn.Module):
    """Filter Response Normalization with its thresholded linear unit (Singh & Krishnan, 2020).

        y = max(gamma * z / sqrt(mean(z^2) + eps) + beta, tau)

    The mean is over H and W, per sample and channel. The learned threshold tau replaces ReLU.

    Paper: https://arxiv.org/abs/1911.09737
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
    """Use 32 groups, or fewer if 32 does not divide the number of channels."""
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
    """Scale a number of channels by `width`, rounded to a multiple of 4 and at least 4."""
    if width <= 0:
        raise ValueError(f"width must be positive, got {width}")
    return max(4, 4 * round(channels * width / 4))
