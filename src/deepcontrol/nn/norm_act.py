"""AGC with an activation as one layer, for libraries that expect a `norm_act` layer (timm)."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .agc import AGC2d


def norm_act(act_layer: Callable[[], nn.Module] = nn.ReLU) -> Callable[..., nn.Module]:
    """Return a factory for AGC2d followed by an activation: a `norm_act` layer for timm.

    EfficientNet, MobileNetV2, ResNetV2 and other models of timm take it as norm_layer:

        timm.create_model("efficientnet_b0", norm_layer=norm_act(nn.SiLU))

    timm passes an activation only to its own norm classes, which it finds by name. The factory is
    therefore a function that brings the activation along.

    Args:
        act_layer: Called without arguments to create the activation of each layer.

    Returns:
        A function (num_features, ..., apply_act=True, inplace=True) -> nn.Module with the arguments
        of timm's BatchNormAct2d. apply_act=False omits the activation; inplace has no effect.

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
