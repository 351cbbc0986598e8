"""Residual U-Net: an encoder-decoder with skip connections, for images of any channels."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...nn import he_init_
from .blocks import Block, Norm, conv_block, projection, scaled, start_gains_, sum_activation

WIDTHS = (32, 64, 128, 256, 512)
TOTAL_STRIDE = 2 ** (len(WIDTHS) - 1)


class UNet(nn.Module):
    """Residual U-Net: images (N, in_channels, H, W) to logits (N, classes, H, W).

    Five levels with 32, 64, 128, 256 and 512 channels. Each level of the encoder and of the decoder
    is a residual block of two 3x3 convolutions, with a 1x1 convolution as its shortcut. The first
    convolution of a block, and pooling in its shortcut, halve the resolution from level 2 on. The
    decoder doubles it by nearest
    neighbor, after a 1x1 convolution, and concatenates the encoder's feature maps. A 1x1
    convolution without normalization and activation computes the logits.

    Images are padded at the bottom and right to multiples of 16 by repeating the border, and the
    logits are cropped. Filters have He initialization; with agc, the last gain of each branch
    starts at a third of the others (`start_gains_`).

    Papers: https://arxiv.org/abs/1505.04597, https://arxiv.org/abs/1711.10684

    Args:
        classes: Number of classes.
        width: Factor for all inner widths.
        norm: One of NORMS.
        in_channels: Channels of the images.

    >>> UNet(3, width=0.25, in_channels=5)(torch.randn(1, 5, 40, 64)).shape
    torch.Size([1, 3, 40, 64])
    """

    total_stride = TOTAL_STRIDE  # tiles that start at multiples of it have aligned poolings
    pad_multiple = TOTAL_STRIDE
    # Upper bound of the receptive field's radius in pixels, without the means of AGC, from a border
    # at a multiple of the total stride. A block has two 3x3 convolutions: the encoder's at the
    # stride before and after it, the decoder's at one stride. Each upsampling adds a coarse cell.
    receptive_radius = (
        sum(2 ** max(0, i - 1) + 2**i for i in range(len(WIDTHS)))
        + sum(2 * 2**i + 2 ** (i + 1) for i in range(len(WIDTHS) - 1))
    )  # fmt: skip

    def __init__(
        self, classes: int, width: float = 1.0, norm: Norm = "agc", in_channels: int = 3
    ) -> None:
        super().__init__()
        block = conv_block(norm)
        widths = [scaled(c, width) for c in WIDTHS]
        self.in_channels = in_channels
        self.encoder = nn.ModuleList(
            ResidualBlock(block, norm, a, b, stride=2 if i else 1)
            for i, (a, b) in enumerate(itertools.pairwise([in_channels, *widths]))
        )
        self.decoder = nn.ModuleList(
            DecoderLevel(block, norm, below, here)
            for below, here in itertools.pairwise(reversed(widths))
        )
        self.classify = nn.Conv2d(widths[0], classes, 1)
        he_init_(self)
        self.start_gains_()

    def start_gains_(self) -> None:
        """Set the initial gains of AGC: see blocks.start_gains_.

        Call it again after he_init_, which sets all gains to 1. Other norms are not changed.
        """
        start_gains_(self, [m.branch[-1] for m in self.modules() if isinstance(m, ResidualBlock)])

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"expected images (N, {self.in_channels}, H, W), got {tuple(x.shape)}")
        height, breadth = x.shape[2:]
        x = functional.pad(
            x, (0, -breadth % TOTAL_STRIDE, 0, -height % TOTAL_STRIDE), mode="replicate"
        )
        skips = []
        for level in self.encoder:
            x = level(x)
            skips.append(x)
        skips.pop()
        for level in self.decoder:
            x = level(x, skips.pop())
        return self.classify(x)[..., :height, :breadth]


class ResidualBlock(nn.Module):
    """act(shortcut + branch): (N, C, H, W) to (N, out_channels, H / stride, W / stride)."""

    def __init__(
        self, block: Block, norm: Norm, in_channels: int, out_channels: int, stride: int = 1
    ) -> None:
        super().__init__()
        self.shortcut = projection(block, in_channels, out_channels, stride)
        self.branch = nn.Sequential(
            block(in_channels, out_channels, 3, stride),
            block(out_channels, out_channels, 3, activation="none"),
        )
        self.activation = sum_activation(norm, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        # In-place saves a feature map: no layer saves the output of the branch.
        return self.activation(self.branch(x).add_(self.shortcut(x)))


class DecoderLevel(nn.Module):
    """One level of the decoder: upsample, concatenate the skip connection, residual block."""

    def __init__(self, block: Block, norm: Norm, below: int, channels: int) -> None:
        super().__init__()
        self.reduce = block(below, channels, 1)
        self.block = ResidualBlock(block, norm, 2 * channels, channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = functional.interpolate(self.reduce(x), scale_factor=2, mode="nearest")
        return self.block(torch.cat([x, skip], 1))
