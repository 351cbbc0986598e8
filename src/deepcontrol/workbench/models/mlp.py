"""A fully connected network, to compare norms of linear layers."""

import itertools
import math
from collections.abc import Sequence

from torch import Tensor, nn

from ...nn import AGCLinear, he_init_
from .blocks import Norm

MLP_NORMS = ("agc", "bn", "ln", "none")


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
