"""A start that fits AGC better than He's: what every neuron activates has variance 1.

He fan-in keeps a signal's second moment from layer to layer. AGC takes a part of that away at once,
the square of the map's mean: behind a ReLU that is a share of 1/pi, in every layer. SegNet's logits
and gradients then start at a thousandth of BatchNorm's (benchmarks/start.py), and for long it
learns nothing but the classes' frequencies. Here filters are scaled by what they do to an example
instead, layer after layer (Mishkin and Matas: All you need is a good init). The paper does not have
this.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.layout import map_mean, over_maps
from .agc import AGC1d, AGC2d, AGC3d
from .conv import AGCConv1d, AGCConv2d, AGCConv3d
from .init import he_init_, set_filters_

OUTPUTS = 0.1  # of He's start: what is random in the first outputs is only in the way


def unit_init_(
    model: nn.Module,
    example: Any,
    outputs: Iterable[nn.Module] = (),
    generator: torch.Generator | None = None,
) -> nn.Module:
    """He fan-in, then filters scaled so that each neuron activates maps of variance 1; in place.

    example is an input of the model, or a tuple of its inputs: a few typical images are enough.
    outputs are the layers that end the model, which start at a tenth of He's: without that, a
    network spends its first steps on unlearning what they say. AGC1d/2d/3d have their gamma scaled;
    AGCLinear stays as He has it.

    >>> neuron, end = AGCConv2d(3, 8, 3, activation="none"), nn.Conv2d(8, 2, 1)
    >>> images = 7 * torch.randn(2, 3, 16, 16)
    >>> model = unit_init_(nn.Sequential(neuron, end), images, outputs=[end])
    >>> f"{neuron(images).std().item():.3f}"
    '1.000'
    """
    return scale_to_unit_(he_init_(model, generator), example, outputs)


@torch.no_grad()
def scale_to_unit_(model: nn.Module, example: Any, outputs: Iterable[nn.Module] = ()) -> nn.Module:
    """The second half of unit_init_, of a model whose filters have been started already."""
    for layer in outputs:
        assert isinstance(layer.weight, Tensor)
        set_filters_(layer, OUTPUTS * layer.weight)
    scaled: set[nn.Module] = set()  # a module that is used twice is scaled once

    def scale(layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if layer in scaled:
            return output
        scaled.add(layer)
        if isinstance(layer.weight, Tensor):
            set_filters_(layer, _correction(layer, inputs[0]) * layer.weight)
        return layer.forward(*inputs)

    kinds = (AGCConv1d, AGCConv2d, AGCConv3d, AGC1d, AGC2d, AGC3d)
    hooks = [m.register_forward_hook(scale) for m in model.modules() if isinstance(m, kinds)]
    try:
        model(*example) if isinstance(example, tuple) else model(example)
    finally:
        for hook in hooks:
            hook.remove()
    return model


def _correction(layer: Any, x: Tensor) -> float:
    """1 / the deviation of what is activated; 1 where nothing is left, as on single positions."""
    z = x
    if isinstance(layer, (AGCConv1d, AGCConv2d, AGCConv3d)):
        z = layer._convolved(x if x.dim() == layer.weight.dim() else x.unsqueeze(0))
    centered = z - over_maps(layer.mean_scale * map_mean(z), z)
    before, after = z.float().std().item(), centered.float().std().item()
    return 1 / after if after > 1e-3 * before else 1.0
