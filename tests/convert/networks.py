"""Small networks with BatchNorm, in common coding styles."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepcontrol import to_agc
from deepcontrol.nn.agc import _AGC
from deepcontrol.nn.conv import _AGCConv


class Residual(nn.Module):
    """A residual network as in torchvision: each block calls one ReLU module several times."""

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
    """A U-Net with a transposed convolution, BatchNorm behind it, and a skip connection."""

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
    """Squeeze-and-excitation: the BatchNorm in the gate runs on 1x1 maps."""

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
    """A block called at two scales, and a convolution that feeds two norms."""

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
    """Control flow depends on values, so torch.fx cannot trace it."""

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
    """A Sequential that torch.fx cannot trace; its order is still known."""

    def __init__(self) -> None:
        super().__init__(Flip(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


class Flip(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1) if int(x.mean() > 100) else x


class Padded(nn.Module):
    """Pads by the shape of its input, as TensorFlow and the MobileNets of transformers do."""

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
    """A 1-D network that ends in BatchNorm1d over features (N, C)."""

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
    """Give the BatchNorms random statistics, gains and biases, as if the model were trained."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
            nn.init.normal_(module.running_mean, 0.0, 0.5)
            nn.init.uniform_(module.running_var, 0.3, 2.0)
    return model


def agc_layers(model: nn.Module) -> dict[str, str]:
    """Map the name of each AGC layer to its class, and its activation if it has one."""
    return {
        name: f"{type(m).__name__} {getattr(m, 'activation', '')}".strip()
        for name, m in model.named_modules()
        if isinstance(m, (_AGC, _AGCConv))
    }


def with_random_parameters(model: nn.Module) -> nn.Module:
    """Give an AGC model random gains, biases and lambdas, as if it were trained; in eval mode."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            center = 0.0 if name.endswith("bias") else 0.8
            nn.init.normal_(parameter, center, 0.2)
    return model.eval()


def converted(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    """Build and convert a network; return it with an input."""
    x = torch.randn(INPUTS[make])
    return with_random_parameters(to_agc(make(), example=x)), x
