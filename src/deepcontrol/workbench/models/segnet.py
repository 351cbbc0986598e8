"""SegNet: an encoder-decoder that unpools with the indices of its max poolings."""

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from ...nn import AGCConv2d, AGCConvPool2d
from ...ops import max_pool2x2, max_unpool2x2
from .blocks import Block, Norm, conv_block, scaled

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
TOTAL_STRIDE = 2 ** len(STAGES)


def _receptive_radius() -> int:
    """Return the radius of the receptive field in pixels, without the means of AGC.

    It is measured from a border at a multiple of TOTAL_STRIDE. Each 3x3 convolution adds its
    stride, and each pooling extends the field to whole cells. The first loop follows the decoder
    from the logits down, the sum follows the encoder up to the image.
    """
    radius = 0
    for i, stage in enumerate(STAGES):
        radius = -(-(radius + len(stage) * 2**i) // 2 ** (i + 1)) * 2 ** (i + 1)
    return radius + sum(len(stage) * 2**i for i, stage in enumerate(STAGES))


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

    total_stride = TOTAL_STRIDE  # tiles that start at multiples of it have aligned poolings
    receptive_radius = _receptive_radius()

    def __init__(self, classes: int, width: float = 1.0, norm: Norm = "agc") -> None:
        super().__init__()
        block = conv_block(norm)
        stages = [[scaled(c, width) for c in stage] for stage in STAGES]
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
        if x.dim() != 4 or x.shape[1] != 3 or min(x.shape[2:]) < TOTAL_STRIDE:
            raise ValueError(
                f"expected images (N, 3, H, W) of at least {TOTAL_STRIDE}x{TOTAL_STRIDE}, "
                f"got {tuple(x.shape)}"
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
    """nn.MaxUnpool2d(2) for the indices of BytePool; `output_size` is (H, W) before pooling."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(  # type: ignore[override]
        self, input: Tensor, indices: Tensor, output_size: Sequence[int]
    ) -> Tensor:
        return max_unpool2x2(input, indices, output_size)


def _conv_stack(block: Block, in_channels: int, widths: Sequence[int]) -> nn.Sequential:
    pairs = itertools.pairwise([in_channels, *widths])
    return nn.Sequential(*(block(a, b, 3) for a, b in pairs))
