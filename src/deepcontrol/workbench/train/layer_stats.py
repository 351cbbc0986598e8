"""Statistics of each layer after an epoch: gamma, lambda, beta and the active fraction.

The paper asks how lambda changes in training. layers.jsonl records, for each layer, the
distribution of gain (gamma), mean_scale (lambda) and bias (beta) over its filters, and the fraction
of positions where its nonlinearity is active ("open"), over one fixed validation batch. For the end
of a residual branch, which has no nonlinearity, this is the fraction of positive outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import AGCConv2d, AGCConv3d, AGCConvPool2d, AGCLinear
from ...nn.conv import padded
from ...ops import center_bias_act, gain_conv
from ...ops.background import check_background, subtract_background
from ..models.norms import FilterResponseNorm2d
from .distributed import Group, unshard

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}


class LayerStats:
    """Statistics of a model's AGC neurons or blocks of filters, norm and activation."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = {n: m for n, m in model.named_modules() if is_neuron(m) or is_block(m)}

    def compute(self, images: Tensor, group: Group, counted: bool = True) -> dict[str, Any]:
        """Return the statistics of each layer, in the order of the forward pass.

        Args:
            images: This process's images. All processes return the same result.
            group: The processes of the run.
            counted: False if this process only has a padding image.
        """
        return {
            name: {**parameter_statistics(self.layers[name]), "open": fraction}
            for name, fraction in self._active_fractions(images, group, counted).items()
        }

    def _active_fractions(self, images: Tensor, group: Group, counted: bool) -> dict[str, float]:
        counts: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[..., None]:
            def count(module: nn.Module, inputs: tuple[Tensor], output: Any) -> None:
                active = active_mask(module, inputs[0], output)
                total = torch.full((), active.numel(), device=active.device)
                counts[name] = torch.stack([active.sum(), total])

            return count

        handles = [layer.register_forward_hook(hook(n)) for n, layer in self.layers.items()]
        try:
            self.model(images)
        finally:
            for handle in handles:
                handle.remove()
        if not counts:  # a network of another library, without such layers
            return {}
        sums = group.sum_(int(counted) * torch.stack(list(counts.values())))
        # tolist() on the stacked tensor waits for the device only once.
        return {name: a / b for name, (a, b) in zip(counts, sums.tolist(), strict=True)}


def is_neuron(module: nn.Module) -> bool:
    return isinstance(module, (AGCConv2d, AGCConv3d, AGCLinear))


def is_block(module: nn.Module) -> bool:
    """Return whether a module is a block of a filter layer, its norm and its activation."""
    first = module[0] if isinstance(module, nn.Sequential) and len(module) > 1 else None
    return isinstance(first, (nn.Conv2d, nn.Conv3d, nn.Linear)) and not is_neuron(first)


def active_mask(module: nn.Module, input: Tensor, output: Any) -> Tensor:
    """Return where a layer's nonlinearity is active, before pooling (bool)."""
    if isinstance(module, AGCConvPool2d):
        output = unpooled(module, input)
    last = module[-1] if isinstance(module, nn.Sequential) else module
    if isinstance(last, FilterResponseNorm2d) and last.threshold is not None:
        # max(x, threshold) in place of ReLU
        return output > unshard(last.threshold)[:, None, None]
    return output > 0


def unpooled(neuron: AGCConvPool2d, input: Tensor) -> Tensor:
    """Return the output of a pooling neuron before its pooling."""
    # Computed from the parameters, because FSDP gathers them only inside the neuron's forward.
    weight, gain, bias, lam = (
        unshard(p) for p in (neuron.weight, neuron.gain, neuron.bias, neuron.mean_scale)
    )
    x, padding = padded(neuron, input)
    geometry = (neuron.stride, padding, neuron.dilation, neuron.groups)
    background = check_background(neuron.background)
    if background == "mean":
        v = gain_conv(x, weight, gain, *geometry, neuron.filter_norm)
        return center_bias_act(v, bias, lam, neuron.activation, overwrite=True)
    z = gain_conv(x, weight, torch.ones_like(gain), *geometry, neuron.filter_norm)
    return subtract_background(z, background, gain, bias, lam, neuron.activation)


def parameter_statistics(layer: nn.Module) -> dict[str, dict[str, float]]:
    """Summarize gain, mean_scale and bias over a layer's filters, if it has them."""
    if isinstance(layer, nn.Sequential):
        norm = layer[1] if len(list(layer[1].parameters())) else None
        names = {"gain": (norm, "weight"), "bias": (layer[0] if norm is None else norm, "bias")}
    else:
        names = {n: (layer, n) for n in ("gain", "mean_scale", "bias")}
    found = {name: getattr(module, own, None) for name, (module, own) in names.items()}
    return {name: statistics(unshard(a)) for name, a in found.items() if isinstance(a, Tensor)}


def statistics(values: Tensor) -> dict[str, float]:
    """Return mean, minimum, maximum and quantiles.

    >>> statistics(torch.tensor([1.0, 2.0, 3.0]))["q50"]
    2.0
    """
    values = values.detach().double().cpu()
    quantiles = torch.quantile(values, torch.tensor(list(QUANTILES.values()), dtype=values.dtype))
    summary = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    return {k: float(v) for k, v in summary.items()} | dict(
        zip(QUANTILES, quantiles.tolist(), strict=True)
    )
