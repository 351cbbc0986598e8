"""Small networks in the ways that people write them, with BatchNorm."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """A residual network in torchvision's manner: one ReLU module for all of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(Block(8, 8), Block(8, 16, stride=2))
        self.classify = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.bn(self.conv(x))))
        return self.classify(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def row(channels: int, out: int, **options: object) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1, **options), nn.BatchNorm2d(out), nn.ReLU()
    )


class UNet(nn.Module):
    """Down, up by a transposed convolution with BatchNorm behind it, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = row(3, 8), row(8, 16, dilation=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.up_norm = nn.BatchNorm2d(8)
        self.last = nn.Sequential(row(16, 8, padding_mode="reflect"), nn.Conv2d(8, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(x)
        below = functional.relu(self.up_norm(self.up(self.down2(functional.max_pool2d(skip, 2)))))
        return self.last(torch.cat([below, skip], 1))


class SqueezeExcite(nn.Module):
    """A gate of one position: its BatchNorm has a single value to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = row(3, 8)
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
        )
        self.excite = nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x * self.excite(self.squeeze(x)).sigmoid()


class SharedHead(nn.Module):
    """One block over two scales, one convolution with two norms, one norm in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = row(3, 8)
        self.head = row(8, 8)
        self.conv = nn.Conv2d(8, 8, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.again = self.head  # a second name

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        small = functional.avg_pool2d(x, 2)
        fine, coarse = self.head(x), self.again(small)
        fine, coarse = self.norms[0](self.conv(fine)), self.norms[1](self.conv(coarse))
        return fine + functional.interpolate(coarse, scale_factor=2)


class Untraceable(nn.Module):
    """Which way its data goes depends on the data: torch.fx gives up on it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(row(3, 8), row(8, 8))
        self.decide = Decide()
        self.conv = nn.Conv2d(8, 8, 1)
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.decide(self.blocks(x))
        return self.bn(self.conv(x)) if int(x.sum() > 0) else self.conv(x)


class Decide(nn.Sequential):
    """A Sequential that cannot be traced within either, but has an order."""

    def __init__(self) -> None:
        super().__init__(Flip(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


class Flip(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1) if int(x.mean() > 100) else x


class Padded(nn.Module):
    """Pads as TensorFlow does, by its input's shape, as the MobileNets of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        rows = 1 if height % 2 == 0 else max(3 - height % 2, 0)
        columns = 1 if width % 2 == 0 else max(3 - width % 2, 0)
        x = functional.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
        return self.act(self.bn(self.conv(x)))


class Volume(nn.Sequential):
    """Three dimensions, groups and stride."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv3d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm3d(8),
            nn.LeakyReLU(),
            nn.Conv3d(8, 8, 3, padding=2, dilation=2, groups=4),
            nn.SyncBatchNorm(8),
            nn.ReLU6(),
        )


class Signal(nn.Sequential):
    """One dimension, then features without any."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(3, 8, 5, padding="same"),
            nn.BatchNorm1d(8),
            nn.SiLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(8, 6),
            nn.BatchNorm1d(6),
            nn.ReLU(),
        )


INPUTS: dict[type[nn.Module], tuple[int, ...]] = {
    Residual: (2, 3, 20, 24),
    UNet: (2, 3, 12, 16),
    SqueezeExcite: (2, 3, 9, 9),
    SharedHead: (2, 3, 8, 10),
    Untraceable: (2, 3, 9, 7),
    Padded: (2, 3, 9, 8),
    Volume: (2, 3, 7, 8, 9),
    Signal: (2, 3, 17),
}


def trained(model: nn.Module) -> nn.Module:
    """The model as if trained: BatchNorms with statistics, gains and biases of their own."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
            nn.init.normal_(module.running_mean, 0.0, 0.5)
            nn.init.uniform_(module.running_var, 0.3, 2.0)
    return model
