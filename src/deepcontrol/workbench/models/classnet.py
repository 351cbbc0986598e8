"""ClassNet, the paper's second network: many depths at once, classes and contours together."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .blocks import Block, Norm, conv_block, scaled

POOLINGS = 7
WIDTHS = (32, 64, 96, 128, 192, 256, 256, 256)
CONVOLUTIONS = (2, 2, 1, 1, 1, 1, 1, 1)  # of 3x3, in each encoder block
CONTOUR_WIDTH = 10
UNIT = 2**POOLINGS


class ClassesAndContour(NamedTuple):
    classes: Tensor  # logits (N, classes, H, W)
    contour: Tensor  # logit (N, 1, H, W): is this pixel on an instance's boundary?


class ClassNet(nn.Module):
    """The paper's ClassNet: images (N, 3, H, W) to class logits and contour logits of that size.

    From the paper's description, each with its name in the code:
    - 7 poolings in encoder and decoder (POOLINGS), up to 256 filters (WIDTHS), deeper and narrower
      than SegNet;
    - the down-sampled image goes to the first layer after each pooling (`EncoderBlock.forward`);
    - a 1x1 projection after every convolution (`ProjectedConvolution`), and a last 1x1 projection
      over all layers of a block, in the encoder and in the decoder (`project`);
    - lateral connections before each pooling that detect classes, and contours, at that resolution
      (`Level.lateral_classes`, `Level.lateral_contour`);
    - a decoder of total width classes + 10 that up-samples and merges the lateral class path,
      guided by the lateral contour path (`Level.merge_classes`, `Level.merge_contour`);
    - two outputs: class logits and contour;
    - paths of many depths: from 8 layers, through the finest lateral, to 53.

    Left open by the paper, whose drawings are lost, and chosen here: the widths and the number of
    convolutions at each resolution; max pooling for maps and average pooling for the image;
    bilinear up-sampling; laterals of 1x1; one projected convolution for each of the two merges;
    of the decoder's width, `classes` channels carry classes and 10 carry contours, and the contour
    channels of a level are handed to the class merge of that level: that is the guidance.
    The paper calls the decoder's width "typically 20" for 14 classes and in the same place
    NumClasses + 10; the rule is followed, which gives 24. The last layers, which give the logits,
    have no normalization and no activation.

    Sizes that 2^7 does not divide are padded at the bottom and right by repeating the border, and
    the outputs are cropped: the same as padding the image oneself. Below 256 pixels a side the
    deepest maps have a single row or column. Up to 128x128 they have a single position, where AGC
    at lambda 1 passes nothing, and bn (at batch 1) and in refuse to train.

    width: scales the encoder's widths. norm: agc, bn, gn, in, frn or none.

    >>> outputs = ClassNet(14, width=0.125)(torch.randn(1, 3, 200, 300))
    >>> outputs.classes.shape, outputs.contour.shape
    (torch.Size([1, 14, 200, 300]), torch.Size([1, 1, 200, 300]))
    """

    unit = UNIT  # on multiples of it all poolings fall alike, in an image and in a tile of it
    pads_to = UNIT
    # At most so far beyond a multiple of the unit see the pixels before it, the means of AGC apart.
    # Each 3x3 convolution sees its stride further: the encoder's, one for each level of the
    # decoder, and one more where a path changes from contours to classes. Up-sampling sees one
    # coarse cell further.
    reach = (
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
        x = functional.pad(x, (0, -breadth % UNIT, 0, -height % UNIT), mode="replicate")
        features = self._encode(x)
        state = None
        for level, feature in zip(reversed(self.decoder), reversed(features), strict=True):
            state = level(feature, state)
        assert state is not None
        classes, contour = state
        crop = (..., slice(height), slice(breadth))
        return ClassesAndContour(self.classify(classes)[crop], self.outline(contour)[crop])

    def _encode(self, image: Tensor) -> list[Tensor]:
        """What each block makes, finest first."""
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
    """A 3x3 convolution and the 1x1 projection after it, each with its normalization."""

    def __init__(self, block: Block, in_channels: int, out_channels: int) -> None:
        super().__init__(block(in_channels, out_channels, 3), block(out_channels, out_channels, 1))


class EncoderBlock(nn.Module):
    """Projected convolutions in a row, and a 1x1 projection over the outputs of all of them."""

    def __init__(self, block: Block, in_channels: int, channels: int, convolutions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            ProjectedConvolution(block, channels if i else in_channels, channels)
            for i in range(convolutions)
        )
        self.project = block(convolutions * channels, channels, 1)

    def forward(self, x: Tensor | None, image: Tensor) -> Tensor:
        # The first layer after each pooling also sees the image, down-sampled as often.
        x = image if x is None else torch.cat([x, image.to(x.dtype)], 1)
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return self.project(torch.cat(outputs, 1))


class Level(nn.Module):
    """One resolution of the decoder: laterals from the encoder, merged with what comes from below.

    Contours are merged first; the classes are merged under their guidance.
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
