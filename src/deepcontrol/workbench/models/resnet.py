"""ResNet-50, the network that image classifiers are compared on (He et al., 2016)."""

from torch import Tensor, nn

from ...nn import AGCConv2d, he_init_
from .blocks import Block, Norm, conv_block

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # inner width of the blocks, and how many
EXPANSION = 4  # a block's output over its inner width


class ResNet50(nn.Module):
    """ResNet-50 v1.5: images (N, 3, H, W) to class logits (N, classes).

    A stem of 7x7 and a max pooling, 3 + 4 + 6 + 3 bottleneck blocks, the mean of each map, and a
    linear layer. v1.5 is torchvision's: where a stage halves the resolution, the 3x3 does it.

    norm: agc, bn, gn, in or none. frn has no block without a threshold, which the sums need.
    All filters start by He's rule, and with agc every block starts as its shortcut
    (`zero_branches_`). Without normalization there is no gain to start at 0: the sums grow from
    block to block, and the first logits are in the hundreds.

    The last maps have 1/32 of the image's height and width: up to 32x32 a single position, where
    AGC at lambda 1 passes nothing, and in and (at batch 1) bn refuse to train.

    >>> import torch
    >>> ResNet50(10)(torch.randn(1, 3, 64, 64)).shape
    torch.Size([1, 10])
    """

    def __init__(self, classes: int = 1000, norm: Norm = "agc") -> None:
        super().__init__()
        block = conv_block(norm)
        channels = STAGES[0][0]
        self.stem = nn.Sequential(block(3, channels, 7, stride=2), nn.MaxPool2d(3, 2, padding=1))
        self.stages = nn.Sequential()
        for stage, (width, blocks) in enumerate(STAGES):
            for i in range(blocks):
                stride = 2 if stage and not i else 1
                self.stages.append(Bottleneck(block, channels, width, stride))
                channels = EXPANSION * width
        self.classify = nn.Linear(channels, classes)
        he_init_(self)
        self.zero_branches_()

    def zero_branches_(self) -> None:
        """Start AGC's branches with gain 0; to be called again after he_init_, which sets 1.

        This is BatchNorm's zero-initialized residual (Goyal et al., 2017): AGC's gain plays gamma's
        part. The signal is sane with gain 1 too, but such a network, at a quarter of the width,
        diverged at rate 0.1 where with gain 0 it learned (LOG.md).
        """
        for block in self.stages:
            assert isinstance(block, Bottleneck)
            last = block.branch[-1]
            if isinstance(last, AGCConv2d):
                nn.init.zeros_(last.gain)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != 3:
            raise ValueError(f"expected images (N, 3, H, W), got {tuple(x.shape)}")
        return self.classify(self.stages(self.stem(x)).mean((2, 3)))


class Bottleneck(nn.Module):
    """relu(shortcut + branch): (N, C, H, W) to (N, 4 x width, H / stride, W / stride)."""

    def __init__(self, block: Block, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        channels = EXPANSION * width
        self.branch = nn.Sequential(
            block(in_channels, width, 1),
            block(width, width, 3, stride),
            block(width, channels, 1, activation="none"),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = block(in_channels, channels, 1, stride, activation="none")

    def forward(self, x: Tensor) -> Tensor:
        # In place, over the branch's output, which nobody keeps: the sum costs no map of its own.
        return self.branch(x).add_(self.shortcut(x)).relu_()
