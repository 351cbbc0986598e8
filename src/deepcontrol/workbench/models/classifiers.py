"""Classifiers: ResNet-18 and 50, CIFAR ResNets with plain versions, and an MLP.

The ResNets are those of He et al. (2016).
"""

import itertools
import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from ...nn import AGCLinear, he_init_
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

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # inner width and number of blocks
EXPANSION = 4  # output width of a block / inner width
RESNET18_WIDTHS = (64, 128, 256, 512)  # two blocks each
CIFAR_WIDTHS = (16, 32, 64)
# Groups of gn, ws+gn and evonorm-s0. With the usual 32, the first two stages would have one channel
# per group, which is InstanceNorm.
CIFAR_GROUPS = 8
MLP_NORMS = ("agc", "bn", "ln", "none")


class _ResNet(ResidualNetwork):
    """Stem, stages, global average pooling, and a linear layer, which subclasses set."""

    in_channels: int
    stem: nn.Module
    stages: nn.Sequential
    classify: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"expected images (N, {self.in_channels}, H, W), got {tuple(x.shape)}")
        return self.classify(self.stages(self.stem(x)).mean((2, 3)))


class ResNet50(_ResNet):
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
        self.in_channels = 3
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


class Bottleneck(ResidualBlock):
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
        self.shortcut = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = block(in_channels, channels, 1, stride, activation="none")


class ResNet18(_ResNet):
    """ResNet-18: images (N, in_channels, H, W) to class logits (N, classes).

    A 7x7 stem and max pooling, four stages of two blocks with 64, 128, 256 and 512 channels, global
    average pooling and a linear layer. A block has two 3x3 convolutions. Shortcuts that change the
    shape have average pooling before their 1x1 convolution (ResNet-D).

    Filters have He initialization. With agc, the last gain of each branch starts at 1 / sqrt(8) of
    the others (`start_gains_`). As in ResNet50, the last feature maps have 1/32 of the height and
    width of the image: use images of 64x64 or more.

    Paper: https://arxiv.org/abs/1512.03385

    Args:
        classes: Number of classes.
        norm: One of NORMS.
        in_channels: Channels of the images.
        width: Factor for all inner widths.

    >>> import torch
    >>> ResNet18(5, width=0.25, in_channels=1)(torch.randn(2, 1, 64, 64)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self, classes: int = 1000, norm: Norm = "agc", in_channels: int = 3, width: float = 1.0
    ) -> None:
        super().__init__()
        block = conv_block(norm)
        self.in_channels = in_channels
        channels = scaled(RESNET18_WIDTHS[0], width)
        self.stem = nn.Sequential(
            block(in_channels, channels, 7, stride=2), nn.MaxPool2d(3, 2, padding=1)
        )
        self.stages = nn.Sequential()
        for stage, base in enumerate(RESNET18_WIDTHS):
            own = scaled(base, width)
            for i in range(2):
                stride = 2 if stage and not i else 1
                activation = sum_activation(norm, own)
                self.stages.append(BasicBlock(block, activation, channels, own, stride))
                channels = own
        self.classify = nn.Linear(channels, classes)
        he_init_(self)
        self.start_gains_()


class BasicBlock(ResidualBlock):
    """act(shortcut + branch): (N, C, H, W) to (N, channels, H / stride, W / stride)."""

    def __init__(
        self, block: Block, activation: nn.Module, in_channels: int, channels: int, stride: int
    ) -> None:
        super().__init__()
        self.activation = activation
        self.branch = nn.Sequential(
            block(in_channels, channels, 3, stride),
            block(channels, channels, 3, activation="none"),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = projection(block, in_channels, channels, stride)


class CifarResNet(_ResNet):
    """CIFAR ResNet: images (N, in_channels, H, W) to class logits (N, classes).

    A 3x3 convolution, three stages of n blocks with 16, 32 and 64 channels, global average pooling
    and a linear layer. A block has two 3x3 convolutions, and the first one of stages 2 and 3 has
    stride 2: 6n + 2 layers. Shortcuts have no parameters (option A of the paper): they skip every
    other row and column and append channels of zeros. An activation follows each addition: that of
    frn and evonorm-s0, or ReLU. So the maps that are averaged have different means with AGC too.

    Filters have He initialization. With agc, the last gain of each branch starts at 1 / sqrt(number
    of blocks) of the others (`start_gains_`). Other norms start with gamma = 1. Residual networks
    with norm none explode: the variance of the signal doubles with every block.

    Paper: https://arxiv.org/abs/1512.03385

    Args:
        depth: 6n + 2: 20, 56 and 110 in the paper.
        classes: Number of classes.
        norm: One of NORMS. gn, ws+gn and evonorm-s0 have 8 groups.
        residual: False leaves out the shortcuts: the plain network of the same depth.
        in_channels: Channels of the images.
        width: Factor for all inner widths.

    >>> import torch
    >>> CifarResNet(20)(torch.randn(1, 3, 32, 32)).shape
    torch.Size([1, 10])
    """

    def __init__(
        self,
        depth: int,
        classes: int = 10,
        norm: Norm = "agc",
        residual: bool = True,
        in_channels: int = 3,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(
                f"depth must be 6n + 2 with n at least 1, such as 20, 56 or 110; got {depth}"
            )
        block = conv_block(norm, groups=CIFAR_GROUPS)
        self.in_channels = in_channels
        channels = scaled(CIFAR_WIDTHS[0], width)
        self.stem = block(in_channels, channels, 3)
        self.stages = nn.Sequential()
        for stage, base in enumerate(CIFAR_WIDTHS):
            for i in range((depth - 2) // 6):
                out_channels = scaled(base, width)
                stride = 2 if stage and not i else 1
                shape = (channels, out_channels, stride)
                if residual:
                    activation = sum_activation(norm, out_channels, CIFAR_GROUPS)
                    self.stages.append(CifarBlock(block, activation, *shape))
                else:
                    self.stages.append(plain_block(block, *shape))
                channels = out_channels
        self.classify = nn.Linear(channels, classes)
        he_init_(self)
        self.start_gains_()


class CifarBlock(ResidualBlock):
    """Residual block: act(shortcut + branch).

    (N, C, H, W) to (N, out_channels, H / stride, W / stride).
    """

    def __init__(
        self, block: Block, activation: nn.Module, in_channels: int, out_channels: int, stride: int
    ) -> None:
        super().__init__()
        self.activation = activation
        self.stride, self.new_channels = stride, out_channels - in_channels
        self.branch = nn.Sequential(
            block(in_channels, out_channels, 3, stride),
            block(out_channels, out_channels, 3, activation="none"),
        )

    def shortcut(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(x, (0, 0, 0, 0, 0, self.new_channels)) if self.new_channels else x


def plain_block(block: Block, in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return the layers of a CifarBlock without its shortcut."""
    return nn.Sequential(
        block(in_channels, out_channels, 3, stride), block(out_channels, out_channels, 3)
    )


class MLP(nn.Module):
    """Fully connected network: images (N, *) to class logits (N, classes).

    Hidden layers are linear layers with normalization and ReLU, and a linear layer follows. With
    agc, the mean of a sample is taken over the features of a layer (see AGCLinear), as with ln.
    Filters have He initialization.

    Args:
        classes: Number of classes.
        norm: agc, bn (BatchNorm1d), ln (LayerNorm) or none. bn needs a batch of at least 2 in
            training.
        in_features: Pixels of an image times its channels.
        hidden: Features of the hidden layers.

    >>> import torch
    >>> MLP()(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        norm: Norm = "agc",
        in_features: int = 784,
        hidden: Sequence[int] = (512, 512, 512),
    ) -> None:
        super().__init__()
        if norm not in MLP_NORMS:
            raise ValueError(
                f"norm {norm!r} is not defined for fully connected layers: "
                f"choose one of {', '.join(MLP_NORMS)}"
            )
        widths = [in_features, *hidden]
        self.in_features = in_features
        self.layers = nn.Sequential(*(_layer(norm, a, b) for a, b in itertools.pairwise(widths)))
        self.classify = nn.Linear(widths[-1], classes)
        he_init_(self)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or math.prod(x.shape[1:]) != self.in_features:
            raise ValueError(
                f"expected a batch of images with {self.in_features} values each, "
                f"got {tuple(x.shape)}"
            )
        return self.classify(self.layers(x.flatten(1)))


def _layer(norm: Norm, in_features: int, out_features: int) -> nn.Module:
    if norm == "agc":
        return AGCLinear(in_features, out_features)
    layers: list[nn.Module] = [nn.Linear(in_features, out_features, bias=norm == "none")]
    if norm != "none":
        layers.append((nn.BatchNorm1d if norm == "bn" else nn.LayerNorm)(out_features))
    return nn.Sequential(*layers, nn.ReLU(inplace=True))
