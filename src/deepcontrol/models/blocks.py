"""The block that every network here is built of: convolution, normalisation, activation.

A network asks for blocks and does not know which normalisation it gets; `conv_block(norm)` is the
one place that does.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..nn import AGCConv2d
from ..ops.maps import accumulate_dtype

Norm = Literal["agc", "bn", "gn", "in", "frn", "none"]
NORMS: tuple[str, ...] = get_args(Norm)

Block = Callable[[int, int, int], nn.Module]  # (in_channels, out_channels, kernel_size), same size


def conv_block(norm: Norm) -> Block:
    """A maker of blocks that keep the map's size and end in ReLU (frn: in its own threshold)."""
    if norm == "agc":
        return lambda a, b, k: AGCConv2d(a, b, k, padding=k // 2)
    if norm == "none":
        return lambda a, b, k: nn.Sequential(nn.Conv2d(a, b, k, padding=k // 2), nn.ReLU())
    if norm not in _LAYERS:
        raise ValueError(f"unknown norm {norm!r}: choose one of {', '.join(NORMS)}")
    layers = _LAYERS[norm]
    return lambda a, b, k: nn.Sequential(nn.Conv2d(a, b, k, padding=k // 2, bias=False), *layers(b))


class FilterResponseNorm2d(nn.Module):
    """Filter Response Normalisation with its thresholded linear unit (Singh & Krishnan, 2020).

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


_LAYERS: dict[str, Callable[[int], list[nn.Module]]] = {
    "bn": lambda c: [nn.BatchNorm2d(c), nn.ReLU()],
    # 32 groups as usual, or the largest power of two that divides the width.
    "gn": lambda c: [nn.GroupNorm(math.gcd(c, 32), c), nn.ReLU()],
    "in": lambda c: [nn.InstanceNorm2d(c, affine=True), nn.ReLU()],
    "frn": lambda c: [FilterResponseNorm2d(c)],
}


def scaled(channels: int, width: float) -> int:
    """channels x width, at least 4 and a multiple of 4, so that every norm and kernel is happy."""
    if width <= 0:
        raise ValueError(f"width must be positive, got {width}")
    return max(4, 4 * round(channels * width / 4))
