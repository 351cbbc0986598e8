"""ResNet-50 for image classification (He et al., 2016)."""

from torch import Tensor, nn

from ...nn import he_init_
from .blocks import Block, Norm, conv_block, start_gains_, sum_activation

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # inner width and number of blocks
EXPANSION = 4  # output width of a block / inner width


class ResNet50(nn.Module):
    """ResNet-50 v1.5: images (N, 3, H, W) to class logits (N, classes).

    A 7x7 stem and max pooling, 3 + 4 + 6 + 3 bottleneck blocks, global average pooling and a linear
    layer. As in torchvision (v1.5), the 3x3 convolution of a block has its stride.

    Filters have He initialization. With agc, the last gain of each branch starts at a quarter of
    the others (`start_gains_`). Without normalization there is no such gain: the sums grow from
    block to block, and the initial logits are in the hundreds.

    The last feature maps have 1/32 of the height and width of the image. For images of 32x32 or
    less they have a single position: AGC with lambda = 1 outputs only its bias there, and in and bn
    (at batch size 1) raise an error in training.

    Paper: https://arxiv.org/abs/1512.03385

    Args:
        classes: Number of classes.
        norm: One of NORMS. The branches of frn and evonorm-s0 end without their activation, which
            follows the addition.

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
                activation = sum_activation(norm, EXPANSION * width)
                self.stages.append(Bottleneck(block, activation, channels, width, stride))
                channels = EXPANSION * width
        self.classify = nn.Linear(channels, classes)
        he_init_(self)
        self.start_gains_()

    def start_gains_(self) -> None:
        """Set the initial gains of AGC: see blocks.start_gains_.

        Call it again after he_init_, which sets all gains to 1. With gain 1, a network of a quarter
        of the width diverged at learning rate 0.1 (dev/LOG.md). Other norms are not changed.
        """
        start_gains_(self, [b.branch[-1] for b in self.stages if isinstance(b, Bottleneck)])

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != 3:
            raise ValueError(f"expected images (N, 3, H, W), got {tuple(x.shape)}")
        return self.classify(self.stages(self.stem(x)).mean((2, 3)))


class Bottleneck(nn.Module):
    """act(shortcut + branch): (N, C, H, W) to (N, 4 x width, H / stride, W / stride)."""

    def __init__(
        self, block: Block, activation: nn.Module, in_channels: int, width: int, stride: int
    ) -> None:
        super().__init__()
        channels = EXPANSION * width
        self.activation = activation
        self.branch = nn.Sequential(
            block(in_channels, width, 1),
            block(width, width, 3, stride),
            block(width, channels, 1, activation="none"),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = block(in_channels, channels, 1, stride, activation="none")

    def forward(self, x: Tensor) -> Tensor:
        # In-place saves a feature map: no layer saves the output of the branch.
        return self.activation(self.branch(x).add_(self.shortcut(x)))
