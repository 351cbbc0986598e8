"""What each layer has learned: gamma, lambda, beta, and how much of it is open.

The paper asks how lambda moves in training. After every epoch, each layer's gain (gamma),
mean_scale (lambda) and bias (beta) are summed up over its filters, and so is the share of positions
at which its nonlinearity lets the signal through, over one fixed validation batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import AGCConv2d, AGCConvPool2d
from ...nn.conv import padded
from ...ops import center_bias_act, gain_conv
from ..models.blocks import FilterResponseNorm2d
from .distributed import Group, whole

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}


class Watch:
    """The layers of a model: its AGC neurons, or its blocks of convolution, norm, activation."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = {n: m for n, m in model.named_modules() if is_neuron(m) or is_block(m)}

    def look(self, images: Tensor, group: Group, counts: bool = True) -> dict[str, Any]:
        """Each layer's statistics, in the order of the forward pass over these images.

        Several processes have different images and get the same answer; `counts` is False in one
        whose images are none of the batch's.
        """
        return {
            name: {**parameter_statistics(self.layers[name]), "open": share}
            for name, share in self._open(images, group, counts).items()
        }

    def _open(self, images: Tensor, group: Group, counts: bool) -> dict[str, float]:
        opened: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[..., None]:
            def count(module: nn.Module, inputs: tuple[Tensor], output: Any) -> None:
                is_open = where_open(module, inputs[0], output)
                total = torch.full((), is_open.numel(), device=is_open.device)
                opened[name] = torch.stack([is_open.sum(), total])

            return count

        handles = [layer.register_forward_hook(hook(n)) for n, layer in self.layers.items()]
        try:
            self.model(images)
        finally:
            for handle in handles:
                handle.remove()
        total = group.total(int(counts) * torch.stack(list(opened.values())))
        # Read in one go: the device is waited for once.
        return {name: a / b for name, (a, b) in zip(opened, total.tolist(), strict=True)}


def is_neuron(module: nn.Module) -> bool:
    return isinstance(module, AGCConv2d)


def is_block(module: nn.Module) -> bool:
    """A plain convolution and what follows it, as models.blocks builds it."""
    first = module[0] if isinstance(module, nn.Sequential) and len(module) > 1 else None
    return isinstance(first, nn.Conv2d) and not is_neuron(first)


def where_open(module: nn.Module, input: Tensor, output: Any) -> Tensor:
    """Where a layer's nonlinearity let the signal through: bool, of the unpooled map."""
    if isinstance(module, AGCConvPool2d):
        output = unpooled(module, input)
    last = module[-1] if isinstance(module, nn.Sequential) else module
    if isinstance(last, FilterResponseNorm2d):  # open above its own threshold
        return output > whole(last.threshold)[:, None, None]
    return output > 0


def unpooled(neuron: AGCConvPool2d, input: Tensor) -> Tensor:
    """What a neuron that pools would give if it did not."""
    # By hand: in a sharded model the neuron's parameters are whole within its forward alone.
    weight, gain, bias, lam = (
        whole(p) for p in (neuron.weight, neuron.gain, neuron.bias, neuron.mean_scale)
    )
    x, padding = padded(neuron, input)
    v = gain_conv(x, weight, gain, neuron.stride, padding, neuron.dilation, neuron.groups)
    return center_bias_act(v, bias, lam, neuron.activation, overwrite=True)


def parameter_statistics(layer: nn.Module) -> dict[str, dict[str, float]]:
    """Mean, extremes and quantiles over the filters of what the layer has: gain, lambda, bias."""
    if isinstance(layer, nn.Sequential):
        norm = layer[1] if len(list(layer[1].parameters())) else None
        names = {"gain": (norm, "weight"), "bias": (layer[0] if norm is None else norm, "bias")}
    else:
        names = {n: (layer, n) for n in ("gain", "mean_scale", "bias")}
    found = {name: getattr(module, own, None) for name, (module, own) in names.items()}
    return {name: statistics(whole(a)) for name, a in found.items() if isinstance(a, Tensor)}


def statistics(values: Tensor) -> dict[str, float]:
    """As plain numbers.

    >>> statistics(torch.tensor([1.0, 2.0, 3.0]))["q50"]
    2.0
    """
    values = values.detach().double().cpu()
    quantiles = torch.quantile(values, torch.tensor(list(QUANTILES.values()), dtype=values.dtype))
    summary = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    return {k: float(v) for k, v in summary.items()} | dict(
        zip(QUANTILES, quantiles.tolist(), strict=True)
    )
