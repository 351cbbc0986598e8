"""3-D U-Nets for medical volumes: plain (Cicek et al., 2016), and nnU-Net's two."""

import itertools

import torch
from torch import Tensor, nn

from ...nn import he_init_
from .blocks import Block, BlockActivation, Norm, ResidualBlock, ResidualNetwork, conv_block, scaled

WIDTHS = (32, 64, 128, 256, 320)
TOTAL_STRIDE = 2 ** (len(WIDTHS) - 1)
NNUNET_WIDTHS = (32, 64, 128, 256, 320, 320)
RESIDUAL_BLOCKS = (1, 3, 4, 6, 6, 6)  # per stage of the residual encoder


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
            _convolutions(block, "relu", a, b, 2, stride=2 if i else 1)
            for i, (a, b) in enumerate(itertools.pairwise([in_channels, *widths]))
        )
        self.decoder = nn.ModuleList(
            DecoderStage(block, "relu", below, here, 2)
            for below, here in itertools.pairwise(reversed(widths))
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


class NnUNet3d(ResidualNetwork):
    """nnU-Net: volumes (N, in_channels, D, H, W) to logits (N, classes, D, H, W).

    D, H and W must be multiples of 32. There are six stages. A stage of the plain encoder has two
    3x3x3 convolutions; a stage of the residual encoder has 1 to 6 residual blocks. The first
    convolution halves the resolution from stage 2 on. The decoder upsamples with a 2x2x2 transposed
    convolution, concatenates the encoder's feature maps, and has two 3x3x3 convolutions (one with
    the residual encoder). All of them end in LeakyReLU.

    Deep supervision, the additional losses of lower resolutions, is left out.

    Papers: https://doi.org/10.1038/s41592-020-01008-z and https://arxiv.org/abs/2404.09556

    Args:
        in_channels: Channels of the volumes.
        classes: Number of classes.
        width: Factor for all inner widths.
        norm: One of NORMS except frn and evonorm-s0. nnU-Net has in.
        residual: Residual encoder.

    >>> NnUNet3d(1, 3, width=0.125)(torch.randn(1, 1, 64, 32, 64)).shape
    torch.Size([1, 3, 64, 32, 64])
    """

    def __init__(
        self,
        in_channels: int,
        classes: int,
        width: float = 1.0,
        norm: Norm = "agc",
        residual: bool = False,
    ) -> None:
        super().__init__()
        block = conv_block(norm, dims=3)
        widths = [scaled(c, width) for c in NNUNET_WIDTHS]
        self.in_channels = in_channels
        self.stem = block(in_channels, widths[0], 3, 1, "leaky_relu") if residual else nn.Identity()
        first = widths[0] if residual else in_channels
        self.encoder = nn.ModuleList()
        for stage, (before, channels) in enumerate(itertools.pairwise([first, *widths])):
            stride = 2 if stage else 1
            if residual:
                self.encoder.append(
                    _residual_stage(block, before, channels, stride, RESIDUAL_BLOCKS[stage])
                )
            else:
                self.encoder.append(_convolutions(block, "leaky_relu", before, channels, 2, stride))
        self.decoder = nn.ModuleList(
            DecoderStage(block, "leaky_relu", below, here, 1 if residual else 2)
            for below, here in itertools.pairwise(reversed(widths))
        )
        self.classify = nn.Conv3d(widths[0], classes, 1)
        he_init_(self)
        if residual:
            self.start_gains_()

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 5 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"expected volumes (N, {self.in_channels}, D, H, W), got {tuple(x.shape)}"
            )
        total_stride = 2 ** len(self.decoder)
        if any(side == 0 or side % total_stride for side in x.shape[2:]):
            raise ValueError(
                f"expected D, H and W to be multiples of {total_stride}, got {tuple(x.shape[2:])}"
            )
        x = self.stem(x)
        skips = []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        skips.pop()
        for stage in self.decoder:
            x = stage(x, skips.pop())
        return self.classify(x)


class DecoderStage(nn.Module):
    """One stage of the decoder: upsample, concatenate the skip connection, convolve."""

    def __init__(
        self, block: Block, activation: BlockActivation, below: int, channels: int, count: int
    ) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(below, channels, 2, stride=2)
        self.convolutions = _convolutions(block, activation, 2 * channels, channels, count)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.convolutions(torch.cat([self.up(x), skip], 1))


class ResidualBlock3d(ResidualBlock):
    """act(shortcut + branch): (N, C, D, H, W) to (N, channels, D / s, H / s, W / s)."""

    def __init__(self, block: Block, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            block(in_channels, channels, 3, stride, "leaky_relu"),
            block(channels, channels, 3, 1, "none"),
        )
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut.append(nn.AvgPool3d(stride))
        if in_channels != channels:
            self.shortcut.append(block(in_channels, channels, 1, 1, "none"))
        self.activation = nn.LeakyReLU(inplace=True)


def _convolutions(
    block: Block,
    activation: BlockActivation,
    in_channels: int,
    channels: int,
    count: int,
    stride: int = 1,
) -> nn.Sequential:
    first = block(in_channels, channels, 3, stride, activation)
    more = (block(channels, channels, 3, 1, activation) for _ in range(count - 1))
    return nn.Sequential(first, *more)


def _residual_stage(
    block: Block, in_channels: int, channels: int, stride: int, count: int
) -> nn.Sequential:
    first = ResidualBlock3d(block, in_channels, channels, stride)
    return nn.Sequential(
        first, *(ResidualBlock3d(block, channels, channels, 1) for _ in range(count - 1))
    )
