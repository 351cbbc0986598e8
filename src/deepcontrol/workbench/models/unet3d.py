"""The 3-D U-Net for medical volumes (Cicek et al., 2016), with nnU-Net's widths."""

import itertools

import torch
from torch import Tensor, nn

from ...nn import he_init_
from .blocks import Block, Norm, conv_block, scaled

WIDTHS = (32, 64, 128, 256, 320)


class UNet3d(nn.Module):
    """Volumes (N, in_channels, D, H, W) to logits (N, classes, D, H, W); D, H, W multiples of 16.

    Five levels, each with two convolutions of 3x3x3 on the way down and, but for the deepest, two
    on the way up. The first of a level halves the resolution, a transposed convolution of 2x2x2
    doubles it again, and what the level had on the way down is concatenated. The last convolution,
    of 1x1x1, gives the logits: no normalization, no activation. All others end in ReLU.

    The deepest maps have D/16 x H/16 x W/16 positions. Where that is one position (16x16x16), AGC
    at lambda 1 passes nothing there, and in and (at batch 1) bn refuse to train.

    width: scales all inner widths. norm: agc, bn, gn, in or none.

    >>> UNet3d(1, 3, width=0.125)(torch.randn(1, 1, 16, 32, 32)).shape
    torch.Size([1, 3, 16, 32, 32])
    """

    def __init__(
        self, in_channels: int, classes: int, width: float = 1.0, norm: Norm = "agc"
    ) -> None:
        super().__init__()
        block = conv_block(norm, dims=3)
        widths = [scaled(c, width) for c in WIDTHS]
        self.in_channels = in_channels
        self.encoder = nn.ModuleList(
            _two(block, a, b, stride=2 if i else 1)
            for i, (a, b) in enumerate(itertools.pairwise([in_channels, *widths]))
        )
        self.decoder = nn.ModuleList(
            UpLevel(block, below, here) for below, here in itertools.pairwise(reversed(widths))
        )
        self.classify = nn.Conv3d(widths[0], classes, 1)
        he_init_(self)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 5 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"expected volumes (N, {self.in_channels}, D, H, W), got {tuple(x.shape)}"
            )
        unit = 2 ** len(self.decoder)
        if any(side == 0 or side % unit for side in x.shape[2:]):
            raise ValueError(
                f"expected D, H and W to be multiples of {unit}, got {tuple(x.shape[2:])}"
            )
        skips = []
        for level in self.encoder:
            x = level(x)
            skips.append(x)
        skips.pop()
        for level in self.decoder:
            x = level(x, skips.pop())
        return self.classify(x)


class UpLevel(nn.Module):
    """One level on the way up: twice the resolution, the level's own maps from the way down."""

    def __init__(self, block: Block, below: int, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(below, channels, 2, stride=2)
        self.convolutions = _two(block, 2 * channels, channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.convolutions(torch.cat([self.up(x), skip], 1))


def _two(block: Block, in_channels: int, channels: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(block(in_channels, channels, 3, stride), block(channels, channels, 3))
