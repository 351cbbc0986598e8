"""3-D U-Net for medical volumes (Cicek et al., 2016), with the widths of nnU-Net."""

import itertools

import torch
from torch import Tensor, nn

from ...nn import he_init_
from .blocks import Block, Norm, conv_block, scaled

WIDTHS = (32, 64, 128, 256, 320)
TOTAL_STRIDE = 2 ** (len(WIDTHS) - 1)


class UNet3d(nn.Module):
    """3-D U-Net: volumes (N, in_channels, D, H, W) to logits (N, classes, D, H, W).

    D, H and W must be multiples of 16. There are five levels. The encoder has two 3x3x3
    convolutions per level, and the first one halves the resolution from level 2 on. The decoder
    upsamples with a 2x2x2 transposed convolution, concatenates the encoder's feature maps, and has
    two 3x3x3 convolutions per level. All of them end in ReLU. A 1x1x1 convolution without
    normalization and activation computes the logits.

    The deepest feature maps have D/16 x H/16 x W/16 positions. For volumes of 16x16x16 that is a
    single position: AGC with lambda = 1 outputs only its bias there, and in and bn (at batch size
    1) raise an error in training.

    Paper: https://arxiv.org/abs/1606.06650

    Args:
        in_channels: Channels of the volumes.
        classes: Number of classes.
        width: Factor for all inner widths.
        norm: One of NORMS except frn and evonorm-s0.

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
            _conv_pair(block, a, b, stride=2 if i else 1)
            for i, (a, b) in enumerate(itertools.pairwise([in_channels, *widths]))
        )
        self.decoder = nn.ModuleList(
            DecoderLevel(block, below, here) for below, here in itertools.pairwise(reversed(widths))
        )
        self.classify = nn.Conv3d(widths[0], classes, 1)
        he_init_(self)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 5 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"expected volumes (N, {self.in_channels}, D, H, W), got {tuple(x.shape)}"
            )
        if any(side == 0 or side % TOTAL_STRIDE for side in x.shape[2:]):
            raise ValueError(
                f"expected D, H and W to be multiples of {TOTAL_STRIDE}, got {tuple(x.shape[2:])}"
            )
        skips = []
        for level in self.encoder:
            x = level(x)
            skips.append(x)
        skips.pop()
        for level in self.decoder:
            x = level(x, skips.pop())
        return self.classify(x)


class DecoderLevel(nn.Module):
    """One level of the decoder: upsample, concatenate the skip connection, convolve."""

    def __init__(self, block: Block, below: int, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(below, channels, 2, stride=2)
        self.convolutions = _conv_pair(block, 2 * channels, channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.convolutions(torch.cat([self.up(x), skip], 1))


def _conv_pair(block: Block, in_channels: int, channels: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(block(in_channels, channels, 3, stride), block(channels, channels, 3))
