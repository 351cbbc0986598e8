"""Networks with any norm: for segmentation, classification and volumes."""

from typing import Literal

from torch import nn

from .blocks import NORMS, Norm, is_agc, scaled
from .classifiers import MLP, CifarResNet, ResNet18, ResNet50
from .external import CUSTOM, ExternalNetwork, build_external, external_task, is_code, is_external
from .segmentation import ClassNet, SegNet, UNet
from .unet3d import NnUNet3d, UNet3d

_SEGMENTATION = ("segnet", "classnet", "unet", "unet3d")
_CIFAR = {
    f"{kind}{depth}": (kind, depth) for kind in ("resnet", "plain") for depth in (20, 56, 110)
}
MODELS = (*_SEGMENTATION, *_CIFAR, "resnet18", "resnet50", "mlp")

__all__ = [
    "CUSTOM",
    "MLP",
    "MODELS",
    "NORMS",
    "CifarResNet",
    "ClassNet",
    "ExternalNetwork",
    "NnUNet3d",
    "Norm",
    "ResNet18",
    "ResNet50",
    "SegNet",
    "UNet",
    "UNet3d",
    "build",
    "build_external",
    "external_task",
    "is_agc",
    "is_code",
    "is_external",
    "task_of",
]


def build(
    name: str,
    classes: int,
    norm: Norm,
    width: float = 1.0,
    in_channels: int = 3,
    size: tuple[int, int] = (32, 32),
) -> nn.Module:
    """Build a network by name.

    Args:
        name: One of MODELS. plain20 is resnet20 without its shortcuts, and so on.
        classes: Number of classes.
        norm: One of NORMS. mlp supports only agc, bn, ln and none.
        width: Factor for all inner widths. resnet50 supports only 1.
        in_channels: Channels of the images. segnet, classnet and resnet50 support only 3.
            For networks of other libraries see `build_external`.
        size: Height and width of the images. Only mlp depends on it.

    Raises:
        ValueError: The name is unknown, or the network does not support a value.

    >>> import torch
    >>> build("plain20", 100, "bn", in_channels=1)(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 100])
    """
    task_of(name)
    if name in _CIFAR:
        kind, depth = _CIFAR[name]
        return CifarResNet(depth, classes, norm, kind == "resnet", in_channels, width)
    if name == "mlp":
        hidden = [scaled(512, width)] * 3
        return MLP(classes, norm, in_channels * size[0] * size[1], hidden)
    if name == "unet":
        return UNet(classes, width, norm, in_channels)
    if name == "unet3d":
        return UNet3d(in_channels, classes, width, norm)
    if name == "resnet18":
        return ResNet18(classes, norm, in_channels, width)
    if in_channels != 3:
        others = ("unet",) if name in _SEGMENTATION else (*_CIFAR, "resnet18", "mlp")
        raise ValueError(
            f"{name} needs images with 3 channels, got {in_channels}: convert them to RGB, or "
            f"choose one of {', '.join(others)}"
        )
    if name == "resnet50":
        if width != 1:
            raise ValueError(f"resnet50 has a fixed width: expected --width 1, got {width:g}")
        return ResNet50(classes, norm)
    return (SegNet if name == "segnet" else ClassNet)(classes, width, norm)


def task_of(name: str) -> Literal["segmentation", "classification"]:
    """Return the task of a network.

    >>> task_of("segnet"), task_of("resnet20")
    ('segmentation', 'classification')
    """
    if name not in MODELS:
        raise ValueError(
            f"unknown network {name!r}: choose one of {', '.join(MODELS)}, or timm:NAME, "
            "smp:ARCHITECTURE/ENCODER, torchvision:NAME or module:function"
        )
    return "segmentation" if name in _SEGMENTATION else "classification"
