"""AGC and the activation behind it, for libraries that ask for the two as one layer."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .agc import AGC2d


def norm_act(act_layer: Callable[[], nn.Module] = nn.ReLU) -> Callable[..., nn.Module]:
    """A function that makes AGC2d with that activation behind it: a `norm_act` layer of timm.

    timm's EfficientNets, MobileNetV2s, ResNetV2s and others take it as their norm_layer. It must be
    a function, since timm knows its own classes by name, and it must bring the activation along,
    since timm hands one to its own classes alone:

        timm.create_model("efficientnet_b0", norm_layer=norm_act(nn.SiLU))

    The function has the arguments of timm's BatchNormAct2d that its models use. apply_act=False
    leaves the activation out; inplace is accepted and has no effect.

    >>> norm_act(nn.SiLU)(8)
    Sequential(
      (0): AGC2d(8, affine=True)
      (1): SiLU()
    )
    >>> norm_act(nn.SiLU)(8, apply_act=False)
    AGC2d(8, affine=True)
    """

    def layer(
        num_features: int,
        *batchnorm: Any,
        apply_act: bool = True,
        inplace: bool = True,
        **more_batchnorm: Any,
    ) -> nn.Module:
        norm = AGC2d(num_features, *batchnorm, **more_batchnorm)
        return nn.Sequential(norm, act_layer()) if apply_act else norm

    return layer
