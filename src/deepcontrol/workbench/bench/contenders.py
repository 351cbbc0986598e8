"""Who takes part: this library's AGC, Eq. 1 as anybody would type it, and PyTorch's own peers.

The peers are *stock* PyTorch throughout. SegNet here pools with indices of a byte, which is no
part of AGC, so the peers get PyTorch's pooling instead; `bn-byte-pool` is BatchNorm with ours, so
that everybody sees what is the pooling's and what is AGC's.
"""

from typing import cast

import torch
from torch import Tensor, nn

from ...nn import AGCConv2d, AGCConv3d, he_init_
from ..models import Norm, ResNet50, SegNet, UNet3d
from ..models.segnet import BytePool, DecoderStage, EncoderStage

CLASSES = {"segnet": 19, "resnet50": 1000, "unet3d": 3}
CHANNELS = {"segnet": 3, "resnet50": 3, "unet3d": 1}
NAMES = {
    "agc": "AGC",
    "one-liner": "AGC, one line of PyTorch",
    "bn": "BatchNorm",
    "bn-byte-pool": "BatchNorm, byte pooling",
    "bn-folded": "BatchNorm, folded",
    "gn": "GroupNorm",
    "in": "InstanceNorm",
    "none": "no normalization",
}
BYTE_POOLING = ("agc", "bn-byte-pool")


def build(group: str, contender: str, width: float = 1.0) -> nn.Module:
    """A network of a group, as that contender has it."""
    norm = cast(Norm, {"one-liner": "agc", "bn-byte-pool": "bn"}.get(contender, contender))
    model: nn.Module
    if group == "segnet":
        model = he_init_(SegNet(CLASSES[group], width, norm))
    elif group == "resnet50":
        model = ResNet50(CLASSES[group], norm)
    elif group == "unet3d":
        model = UNet3d(CHANNELS[group], CLASSES[group], width, norm)
    else:
        raise ValueError(f"no network is called {group!r}")
    if contender == "one-liner":
        write_out_(model)
    if contender not in BYTE_POOLING:
        stock_pooling_(model)
    return model


def stock_pooling_(model: nn.Module) -> nn.Module:
    """PyTorch's own pooling and unpooling in a SegNet, in place."""
    for module in model.modules():
        if isinstance(module, EncoderStage):
            module.pool = nn.MaxPool2d(2, return_indices=True)
        elif isinstance(module, DecoderStage):
            module.unpool = nn.MaxUnpool2d(2)  # type: ignore[assignment]
    return model


def write_out_(model: nn.Module) -> nn.Module:
    """Each neuron's Eq. 1 as one line of PyTorch with the same parameters, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (AGCConv2d, AGCConv3d)):
                setattr(parent, name, OneLiner(child))
        if isinstance(parent, EncoderStage):
            parent.pool = BytePool()  # the neuron that pooled by itself is gone
    return model


class OneLiner(nn.Module):
    """A neuron with its Eq. 1 typed after a convolution, as one does without this library."""

    def __init__(self, neuron: AGCConv2d | AGCConv3d) -> None:
        super().__init__()
        self.over = (2, 3) if isinstance(neuron, AGCConv2d) else (2, 3, 4)
        convolution = nn.Conv2d if isinstance(neuron, AGCConv2d) else nn.Conv3d
        shape = (neuron.in_channels, neuron.out_channels, neuron.kernel_size)
        self.conv = convolution(*shape, neuron.stride, neuron.padding, bias=False)  # type: ignore[arg-type]
        parameters = (neuron.gain, neuron.mean_scale, neuron.bias)
        with torch.no_grad():
            self.conv.weight.copy_(neuron.weight)
            over_map = [p.clone().reshape(-1, *(1 for _ in self.over)) for p in parameters]
        self.w, self.l, self.b = (nn.Parameter(p) for p in over_map)
        self.act = nn.ReLU(inplace=True) if neuron.activation == "relu" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        return self.act(self.w * (z - self.l * z.mean(self.over, keepdim=True)) + self.b)
