"""SegNet, the paper's first network: deep, no skips, unpooling by the pooling's indices."""

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from ...nn import AGCConv2d, AGCConvPool2d
from ...ops import max_pool2x2, max_unpool2x2
from .blocks import Block, Norm, conv_block, scaled

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
UNIT = 2 ** len(STAGES)


def _reach() -> int:
    """How far beyond a multiple of UNIT the pixels before it see, the means of AGC apart.

    A 3x3 convolution sees its stride further, and whoever sees a part of a pooled cell sees it all:
    from the logits down the decoder, then up the encoder to the image.
    """
    seen = 0
    for i, stage in enumerate(STAGES):
        seen = -(-(seen + len(stage) * 2**i) // 2 ** (i + 1)) * 2 ** (i + 1)
    return seen + sum(len(stage) * 2**i for i, stage in enumerate(STAGES))


class SegNet(nn.Module):
    """13 + 13 convolutions of 3x3, 5 poolings; images (N, 3, H, W) to logits (N, classes, H, W).

    Encoder widths are [64, 64, 128, 128, 256 x3, 512 x3, 512 x3], the decoder mirrors them, and
    its last convolution, of width `classes`, gives the logits: no normalization, no activation.
    The only other way from encoder to decoder are the positions of the pooled maxima. Any H and W
    of at least 32 will do.

    width: scales all inner widths. norm: agc, bn, gn, in, frn or none.

    >>> import torch
    >>> SegNet(19, width=0.125)(torch.randn(1, 3, 64, 64)).shape
    torch.Size([1, 19, 64, 64])
    """

    unit = UNIT  # on multiples of it all poolings fall alike, in an image and in a tile of it
    reach = _reach()

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
            # The mirror: a stage keeps its width, and its last layer takes that of the stage above.
            inner = widths[1:] if above is None else [*widths[1:], above[-1]]
            self.decoder.append(DecoderStage(block, channels, inner))
            channels = inner[-1]
        self.classify = nn.Conv2d(channels, classes, 3, padding=1)
        self._tell_neurons_of_their_readers()

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != 3 or min(x.shape[2:]) < UNIT:
            raise ValueError(
                f"expected images (N, 3, H, W) of at least {UNIT}x{UNIT}, got {tuple(x.shape)}"
            )
        pooled = []
        for encode in self.encoder:
            x, indices, size = encode(x)
            pooled.append((indices, size))
        for decode in self.decoder:
            x = decode(x, *pooled.pop())
        return self.classify(x)

    def _tell_neurons_of_their_readers(self) -> None:
        """How much the next neuron writes decides whether one leaves the sums of its maps."""
        stages = [*self.encoder, *self.decoder]
        for stage in stages:
            for a, b in itertools.pairwise(stage.convolutions):
                _feed(a, b, 1)
        for i, (stage, following) in enumerate(itertools.pairwise(stages), 1):
            unpooled = 4 if i >= len(self.encoder) else 1
            _feed(stage.convolutions[-1], following.convolutions[0], unpooled)


def _feed(a: nn.Module, b: nn.Module, times: int) -> None:
    """Where b reads what a writes, unpooled to so many times the positions."""
    if isinstance(a, AGCConv2d) and isinstance(b, AGCConv2d):
        a.consumer_ratio = times * b.out_channels / a.out_channels


class EncoderStage(nn.Module):
    """Convolutions, then 2x2 max pooling that remembers where each maximum was."""

    def __init__(self, block: Block, in_channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.convolutions = _row(block, in_channels, widths)
        last = self.convolutions[-1]
        self.pool: nn.Module
        if isinstance(last, AGCConv2d):  # the neuron has a form that pools by itself
            pooling = AGCConvPool2d(last.in_channels, last.out_channels, 3, padding=1)
            self.convolutions[-1], self.pool = pooling, nn.Identity()
        else:
            self.pool = BytePool()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Sequence[int]]:
        size = x.shape[2:]  # which the convolutions keep
        pooled, indices = self.pool(self.convolutions(x))
        return pooled, indices, size


class DecoderStage(nn.Module):
    """Each value back to where its maximum was, zeros elsewhere, then convolutions."""

    def __init__(self, block: Block, in_channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.unpool = ByteUnpool()
        self.convolutions = _row(block, in_channels, widths)

    def forward(self, x: Tensor, indices: Tensor, size: Sequence[int]) -> Tensor:
        return self.convolutions(self.unpool(x, indices, size))


class BytePool(nn.MaxPool2d):
    """nn.MaxPool2d(2, return_indices=True) with indices of one byte; still a pooling to others."""

    def __init__(self) -> None:
        super().__init__(2, return_indices=True)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return max_pool2x2(input)


class ByteUnpool(nn.MaxUnpool2d):
    """nn.MaxUnpool2d(2) for BytePool's indices; `output_size` is the pooled map's (H, W)."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(  # type: ignore[override]
        self, input: Tensor, indices: Tensor, output_size: Sequence[int]
    ) -> Tensor:
        return max_unpool2x2(input, indices, output_size)


def _row(block: Block, in_channels: int, widths: Sequence[int]) -> nn.Sequential:
    pairs = itertools.pairwise([in_channels, *widths])
    return nn.Sequential(*(block(a, b, 3) for a, b in pairs))
