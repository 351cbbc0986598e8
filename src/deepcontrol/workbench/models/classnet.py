"""ClassNet: a narrow encoder-decoder with paths of many depths, for classes and contours."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .blocks import Block, Norm, conv_block, scaled

POOLINGS = 7
WIDTHS = (32, 64, 96, 128, 192, 256, 256, 256)
CONVOLUTIONS = (2, 2, 1, 1, 1, 1, 1, 1)  # 3x3 convolutions per encoder block
CONTOUR_WIDTH = 10
TOTAL_STRIDE = 2**POOLINGS


class ClassesAndContour(NamedTuple):
    """Outputs of ClassNet."""

    classes: Tensor  # logits (N, classes, H, W)
    contour: Tensor  # logits (N, 1, H, W): the pixel is on the boundary of an instance


class ClassNet(nn.Module):
    """ClassNet: images (N, 3, H, W) to class and contour logits of the same size.

    Described in the paper (names in parentheses are in this file):
    - 7 poolings in encoder and decoder (POOLINGS), up to 256 filters (WIDTHS), deeper and narrower
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

    total_stride = TOTAL_STRIDE  # tiles that start at multiples of it have aligned poolings
    pad_multiple = TOTAL_STRIDE
    # Upper bound of the receptive field's radius in pixels, without the means of AGC, from a border
    # at a multiple of the total stride. Each 3x3 convolution adds its stride: those of the encoder,
    # one per level of the decoder, and one for the path from contours to classes. Each upsampling
    # adds one coarse cell.
    receptive_radius = (
        sum(convolutions * 2**i for i, convolutions in enumerate(CONVOLUTIONS))
        + sum(2**i + 2 ** (i + 1) for i in range(POOLINGS))
        + 2 ** (POOLINGS - 1)
    )

    def __init__(self, classes: int, width: float = 1.0, norm: Norm = "agc") -> None:
        super().__init__()
        block = conv_block(norm)
        self.encoder = nn.ModuleList()
        channels = 0
        for base, convolutions in zip(WIDTHS, CONVOLUTIONS, strict=True):
            c = scaled(base, width)
            if channels:
                self.encoder.append(nn.MaxPool2d(2))
            self.encoder.append(EncoderBlock(block, channels + 3, c, convolutions))
            channels = c
        self.decoder = nn.ModuleList(
            Level(block, scaled(c, width), classes, deepest=i == POOLINGS)
            for i, c in enumerate(WIDTHS)
        )
        self.classify = nn.Conv2d(classes, classes, 1)
        self.outline = nn.Conv2d(CONTOUR_WIDTH, 1, 1)

    def forward(self, x: Tensor) -> ClassesAndContour:
        if x.dim() != 4 or x.shape[1] != 3:
            raise ValueError(f"expected images (N, 3, H, W), got {tuple(x.shape)}")
        height, breadth = x.shape[2:]
        x = functional.pad(
            x, (0, -breadth % TOTAL_STRIDE, 0, -height % TOTAL_STRIDE), mode="replicate"
        )
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
    """A sequence of projected convolutions, and a 1x1 projection of all their outputs."""

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
    """One resolution of the decoder: merge lateral connections with the coarser level.

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
