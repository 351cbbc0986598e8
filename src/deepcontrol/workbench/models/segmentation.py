"""Segmentation networks: the paper's SegNet and ClassNet, and a residual U-Net."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...nn import AGCConv2d, AGCConvPool2d, he_init_
from ...ops import max_pool2x2, max_unpool2x2
from .blocks import (
    Block,
    Norm,
    ResidualBlock,
    ResidualNetwork,
    conv_block,
    projection,
    scaled,
    sum_activation,
)

SEGNET_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def _segnet_radius() -> int:
    """Return the radius of the receptive field in pixels, without the means of AGC.

    It is measured from a border at a multiple of the total stride. Each 3x3 convolution adds its
    stride, and each pooling extends the field to whole cells. The first loop follows the decoder
    from the logits down, the sum follows the encoder up to the image.
    """
    radius = 0
    for i, stage in enumerate(SEGNET_STAGES):
        radius = -(-(radius + len(stage) * 2**i) // 2 ** (i + 1)) * 2 ** (i + 1)
    return radius + sum(len(stage) * 2**i for i, stage in enumerate(SEGNET_STAGES))


class SegNet(nn.Module):
    """SegNet: images (N, 3, H, W) to logits (N, classes, H, W).

    H and W must be at least 32.

    13 + 13 convolutions of 3x3 and 5 poolings. The encoder widths are [64, 64, 128, 128, 256 x3,
    512 x3, 512 x3], and the decoder mirrors them. The decoder unpools with the positions of the
    pooled maxima; there are no other skip connections. The last convolution computes the logits,
    without normalization and activation.

    Paper: https://arxiv.org/abs/1511.00561

    Args:
        classes: Number of classes.
        width: Factor for all inner widths.
        norm: One of NORMS.

    >>> import torch
    >>> SegNet(19, width=0.125)(torch.randn(1, 3, 64, 64)).shape
    torch.Size([1, 19, 64, 64])
    """

    total_stride = 2 ** len(
        SEGNET_STAGES
    )  # tiles that start at multiples of it have aligned poolings
    receptive_radius = _segnet_radius()

    def __init__(self, classes: int, width: float = 1.0, norm: Norm = "agc") -> None:
        super().__init__()
        block = conv_block(norm)
        stages = [[scaled(c, width) for c in stage] for stage in SEGNET_STAGES]
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        channels = 3
        for widths in stages:
            self.encoder.append(EncoderStage(block, channels, widths))
            channels = widths[-1]
        for widths, above in zip(reversed(stages), [*reversed(stages[:-1]), None], strict=True):
            # The last layer of a decoder stage has the width of the next higher-resolution stage.
            inner = widths[1:] if above is None else [*widths[1:], above[-1]]
            self.decoder.append(DecoderStage(block, channels, inner))
            channels = inner[-1]
        self.classify = nn.Conv2d(channels, classes, 3, padding=1)
        self._set_consumers()

    def forward(self, x: Tensor) -> Tensor:
        least = self.total_stride
        if x.dim() != 4 or x.shape[1] != 3 or min(x.shape[2:]) < least:
            raise ValueError(
                f"expected images (N, 3, H, W) of at least {least}x{least}, got {tuple(x.shape)}"
            )
        pooled = []
        for encode in self.encoder:
            x, indices, size = encode(x)
            pooled.append((indices, size))
        for decode in self.decoder:
            x = decode(x, *pooled.pop())
        return self.classify(x)

    def _set_consumers(self) -> None:
        """Set the consumer_ratio of each AGC layer, so that it can precompute sums."""
        stages = [*self.encoder, *self.decoder]
        for stage in stages:
            for a, b in itertools.pairwise(stage.convolutions):
                _set_consumer(a, b, 1)
        for i, (stage, following) in enumerate(itertools.pairwise(stages), 1):
            unpooled = 4 if i >= len(self.encoder) else 1
            _set_consumer(stage.convolutions[-1], following.convolutions[0], unpooled)


def _set_consumer(layer: nn.Module, consumer: nn.Module, upsampling: int) -> None:
    """Set the output elements of `consumer` per output element of `layer`.

    upsampling: positions of the consumer per position of the layer.
    """
    if isinstance(layer, AGCConv2d) and isinstance(consumer, AGCConv2d):
        layer.consumer_ratio = upsampling * consumer.out_channels / layer.out_channels


class EncoderStage(nn.Module):
    """Convolutions, then 2x2 max pooling that returns the indices of the maxima."""

    def __init__(self, block: Block, in_channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.convolutions = _conv_stack(block, in_channels, widths)
        last = self.convolutions[-1]
        self.pool: nn.Module
        if isinstance(last, AGCConv2d):  # AGC has a fused form with the pooling
            pooling = AGCConvPool2d(
                last.in_channels,
                last.out_channels,
                3,
                padding=1,
                weight_norm=last.weight_norm,
                weight_standardization=last.weight_standardization,
            )
            self.convolutions[-1], self.pool = pooling, nn.Identity()
        else:
            self.pool = BytePool()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Sequence[int]]:
        size = x.shape[2:]  # the convolutions do not change it
        pooled, indices = self.pool(self.convolutions(x))
        return pooled, indices, size


class DecoderStage(nn.Module):
    """Unpooling to the positions of the maxima, then convolutions."""

    def __init__(self, block: Block, in_channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.unpool = ByteUnpool()
        self.convolutions = _conv_stack(block, in_channels, widths)

    def forward(self, x: Tensor, indices: Tensor, size: Sequence[int]) -> Tensor:
        return self.convolutions(self.unpool(x, indices, size))


class BytePool(nn.MaxPool2d):
    """nn.MaxPool2d(2, return_indices=True) with indices of one byte."""

    def __init__(self) -> None:
        super().__init__(2, return_indices=True)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return max_pool2x2(input)


class ByteUnpool(nn.MaxUnpool2d):
    """nn.MaxUnpool2d(2) for the indices of BytePool.

    `output_size` is (H, W) before pooling.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(  # type: ignore[override]
        self, input: Tensor, indices: Tensor, output_size: Sequence[int]
    ) -> Tensor:
        return max_unpool2x2(input, indices, output_size)


def _conv_stack(block: Block, in_channels: int, widths: Sequence[int]) -> nn.Sequential:
    pairs = itertools.pairwise([in_channels, *widths])
    return nn.Sequential(*(block(a, b, 3) for a, b in pairs))


CLASSNET_POOLINGS = 7
CLASSNET_WIDTHS = (32, 64, 96, 128, 192, 256, 256, 256)
CLASSNET_CONVOLUTIONS = (2, 2, 1, 1, 1, 1, 1, 1)  # 3x3 convolutions per encoder block
CONTOUR_WIDTH = 10


class ClassesAndContour(NamedTuple):
    """Outputs of ClassNet."""

    classes: Tensor  # logits (N, classes, H, W)
    contour: Tensor  # logits (N, 1, H, W): the pixel is on the boundary of an instance


class ClassNet(nn.Module):
    """ClassNet: images (N, 3, H, W) to class and contour logits of the same size.

    Described in the paper (names in parentheses are in this file):
    - 7 poolings in encoder and decoder, up to 256 filters (CLASSNET_WIDTHS), deeper and narrower
      than SegNet;
    - the first layer after each pooling also gets the downsampled image (`EncoderBlock.forward`);
    - a 1x1 projection after each convolution (`ProjectedConvolution`), and a 1x1 projection over
      all layers of a block, in the encoder and in the decoder (`project`);
    - lateral connections before each pooling that detect classes and contours at that resolution
      (`Level.lateral_classes`, `Level.lateral_contour`);
    - a decoder of width classes + 10 that upsamples and merges the lateral class path, guided by
      the lateral contour path (`Level.merge_classes`, `Level.merge_contour`);
    - two outputs: class logits and contour logits;
    - paths of 8 layers (through the finest lateral connection) to 53 layers.

    Not specified in the paper and chosen here:
    - the widths and the number of convolutions per resolution;
    - max pooling for feature maps, average pooling for the image, bilinear upsampling;
    - 1x1 lateral connections, and one projected convolution per merge;
    - in the decoder, `classes` channels for classes and 10 for contours. The class merge of a level
      also gets its contour channels: this is the guidance. The paper gives the decoder width as
      "typically 20" for 14 classes and as NumClasses + 10; the latter is used, which is 24;
    - output layers without normalization and activation.

    Images are padded at the bottom and right to multiples of 2^7 by repeating the border, and the
    outputs are cropped. Below 256 pixels, the deepest feature maps have a single row or column. At
    128x128 or less they have a single position: AGC with lambda = 1 outputs only its bias there,
    and bn (at batch size 1) and in raise an error in training.

    Args:
        classes: Number of classes.
        width: Factor for the widths of the encoder.
        norm: One of NORMS.

    >>> outputs = ClassNet(14, width=0.125)(torch.randn(1, 3, 200, 300))
    >>> outputs.classes.shape, outputs.contour.shape
    (torch.Size([1, 14, 200, 300]), torch.Size([1, 1, 200, 300]))
    """

    # Tiles that start at multiples of it have aligned poolings.
    total_stride = 2**CLASSNET_POOLINGS
    pad_multiple = total_stride
    # Upper bound of the receptive field's radius in pixels, without the means of AGC, from a border
    # at a multiple of the total stride. Each 3x3 convolution adds its stride: those of the encoder,
    # one per level of the decoder, and one for the path from contours to classes. Each upsampling
    # adds one coarse cell.
    receptive_radius = (
        sum(convolutions * 2**i for i, convolutions in enumerate(CLASSNET_CONVOLUTIONS))
        + sum(2**i + 2 ** (i + 1) for i in range(CLASSNET_POOLINGS))
        + 2 ** (CLASSNET_POOLINGS - 1)
    )

    def __init__(self, classes: int, width: float = 1.0, norm: Norm = "agc") -> None:
        super().__init__()
        block = conv_block(norm)
        self.encoder = nn.ModuleList()
        channels = 0
        for base, convolutions in zip(CLASSNET_WIDTHS, CLASSNET_CONVOLUTIONS, strict=True):
            c = scaled(base, width)
            if channels:
                self.encoder.append(nn.MaxPool2d(2))
            self.encoder.append(EncoderBlock(block, channels + 3, c, convolutions))
            channels = c
        self.decoder = nn.ModuleList(
            Level(block, scaled(c, width), classes, deepest=i == CLASSNET_POOLINGS)
            for i, c in enumerate(CLASSNET_WIDTHS)
        )
        self.classify = nn.Conv2d(classes, classes, 1)
        self.outline = nn.Conv2d(CONTOUR_WIDTH, 1, 1)

    def forward(self, x: Tensor) -> ClassesAndContour:
        if x.dim() != 4 or x.shape[1] != 3:
            raise ValueError(f"expected images (N, 3, H, W), got {tuple(x.shape)}")
        height, breadth = x.shape[2:]
        x = _padded(x, self.pad_multiple)
        features = self._encode(x)
        state = None
        for level, feature in zip(reversed(self.decoder), reversed(features), strict=True):
            state = level(feature, state)
        assert state is not None
        classes, contour = state
        crop = (..., slice(height), slice(breadth))
        return ClassesAndContour(self.classify(classes)[crop], self.outline(contour)[crop])

    def _encode(self, image: Tensor) -> list[Tensor]:
        """Return the output of each encoder block, from fine to coarse."""
        features: list[Tensor] = []
        x = None
        for layer in self.encoder:
            if isinstance(layer, EncoderBlock):
                x = layer(x, image)
                features.append(x)
            else:
                x = layer(x)
                image = functional.avg_pool2d(image, 2)
        return features


class ProjectedConvolution(nn.Sequential):
    """A 3x3 convolution and a 1x1 projection, each with normalization."""

    def __init__(self, block: Block, in_channels: int, out_channels: int) -> None:
        super().__init__(block(in_channels, out_channels, 3), block(out_channels, out_channels, 1))


class EncoderBlock(nn.Module):
    """A sequence of projected convolutions, and a 1x1 projection of all outputs."""

    def __init__(self, block: Block, in_channels: int, channels: int, convolutions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            ProjectedConvolution(block, channels if i else in_channels, channels)
            for i in range(convolutions)
        )
        self.project = block(convolutions * channels, channels, 1)

    def forward(self, x: Tensor | None, image: Tensor) -> Tensor:
        # The first layer after each pooling also gets the downsampled image.
        x = image if x is None else torch.cat([x, image.to(x.dtype)], 1)
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return self.project(torch.cat(outputs, 1))


class Level(nn.Module):
    """One resolution of the decoder: merge lateral connections with the coarser one.

    Contours are merged first and guide the merge of the classes.
    """

    def __init__(self, block: Block, channels: int, classes: int, deepest: bool) -> None:
        super().__init__()
        self.lateral_classes = block(channels, classes, 1)
        self.lateral_contour = block(channels, CONTOUR_WIDTH, 1)
        if not deepest:
            self.merge_contour = ProjectedConvolution(block, 2 * CONTOUR_WIDTH, CONTOUR_WIDTH)
            self.merge_classes = ProjectedConvolution(block, 2 * classes + CONTOUR_WIDTH, classes)
            self.project = block(classes + CONTOUR_WIDTH, classes, 1)

    def forward(
        self, feature: Tensor, below: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        classes, contour = self.lateral_classes(feature), self.lateral_contour(feature)
        if below is None:
            return classes, contour
        classes_below, contour_below = (
            functional.interpolate(a, scale_factor=2, mode="bilinear") for a in below
        )
        contour = self.merge_contour(torch.cat([contour_below, contour], 1))
        classes = self.merge_classes(torch.cat([classes_below, classes, contour], 1))
        return self.project(torch.cat([classes, contour], 1)), contour


UNET_WIDTHS = (32, 64, 128, 256, 512)


class UNet(ResidualNetwork):
    """Residual U-Net: images (N, in_channels, H, W) to logits (N, classes, H, W).

    Five levels with 32, 64, 128, 256 and 512 channels. Each level of the encoder and of the decoder
    is a residual block of two 3x3 convolutions, with a 1x1 convolution as its shortcut. The first
    convolution of a block, and pooling in its shortcut, halve the resolution from level 2 on. The
    decoder doubles it by nearest neighbor, after a 1x1 convolution, and concatenates the encoder's
    feature maps. A 1x1 convolution without normalization and activation computes the logits.

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

    # Tiles that start at multiples of it have aligned poolings.
    total_stride = 2 ** (len(UNET_WIDTHS) - 1)
    pad_multiple = total_stride
    # Upper bound of the receptive field's radius in pixels, without the means of AGC, from a border
    # at a multiple of the total stride. A block has two 3x3 convolutions: the encoder's at the
    # stride before and after it, the decoder's at one stride. Each upsampling adds a coarse cell.
    receptive_radius = (
        sum(2 ** max(0, i - 1) + 2**i for i in range(len(UNET_WIDTHS)))
        + sum(2 * 2**i + 2 ** (i + 1) for i in range(len(UNET_WIDTHS) - 1))
    )  # fmt: skip

    def __init__(
        self, classes: int, width: float = 1.0, norm: Norm = "agc", in_channels: int = 3
    ) -> None:
        super().__init__()
        block = conv_block(norm)
        widths = [scaled(c, width) for c in UNET_WIDTHS]
        self.in_channels = in_channels
        self.encoder = nn.ModuleList(
            UNetBlock(block, norm, a, b, stride=2 if i else 1)
            for i, (a, b) in enumerate(itertools.pairwise([in_channels, *widths]))
        )
        self.decoder = nn.ModuleList(
            DecoderLevel(block, norm, below, here)
            for below, here in itertools.pairwise(reversed(widths))
        )
        self.classify = nn.Conv2d(widths[0], classes, 1)
        he_init_(self)
        self.start_gains_()

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"expected images (N, {self.in_channels}, H, W), got {tuple(x.shape)}")
        height, breadth = x.shape[2:]
        x = _padded(x, self.pad_multiple)
        skips = []
        for level in self.encoder:
            x = level(x)
            skips.append(x)
        skips.pop()
        for level in self.decoder:
            x = level(x, skips.pop())
        return self.classify(x)[..., :height, :breadth]


class UNetBlock(ResidualBlock):
    """Residual block: act(shortcut + branch).

    (N, C, H, W) to (N, out_channels, H / stride, W / stride).
    """

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


class DecoderLevel(nn.Module):
    """One level of the decoder: upsample, concatenate the skip, residual block."""

    def __init__(self, block: Block, norm: Norm, below: int, channels: int) -> None:
        super().__init__()
        self.reduce = block(below, channels, 1)
        self.block = UNetBlock(block, norm, 2 * channels, channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = functional.interpolate(self.reduce(x), scale_factor=2, mode="nearest")
        return self.block(torch.cat([x, skip], 1))


def _padded(x: Tensor, multiple: int) -> Tensor:
    """Pad images at bottom and right to multiples of a size, repeating the border."""
    height, breadth = x.shape[2:]
    return functional.pad(x, (0, -breadth % multiple, 0, -height % multiple), mode="replicate")
