"""An AGC model for inference: convolutions with computed biases."""

import copy

import torch
from torch import nn

from ..nn import AGCLinear
from ..nn.agc import _AGC
from ..nn.conv import _AGCConv
from .folded import activation_layers, can_fold, constant, folded
from .layers import control_of, make_neuron
from .links import find_links
from .neuron import find_neuron
from .tree import has_hooks, swap, warn_of_hooks


def fold(model: nn.Module) -> nn.Module:
    """A copy of an AGC (automatic gain control) model for inference; the model stays as it is.

    Every AGCConv becomes a convolution with gamma in its filters and beta - lambda * mean as its
    bias. The mean is that of the convolution's output, but it is computed from the input (exactly,
    for any stride, dilation, groups and padding), so nothing passes over the output. At batch 1
    the bias is the convolution's own; larger batches have one for each sample, which is added.
    A convolution and the AGC1d/2d/3d that it feeds are folded in the same way. An AGC layer
    elsewhere stays, AGCLinear becomes nn.Linear, and a neuron without any lambda a plain nn.Conv.

    The copy computes the same function up to rounding, is in eval mode and does not train.
    torch.compile and torch.export take it, with batch, height and width left open. (Export it with
    a batch of 2: of whatever is 1 in its example, torch.export makes a constant.)

    >>> from deepcontrol import AGCConv2d
    >>> model = nn.Sequential(AGCConv2d(3, 8, 3, padding=1), AGCConv2d(8, 8, 3, stride=2))
    >>> x = torch.randn(1, 3, 16, 16)
    >>> torch.allclose(fold(model)(x), model(x), atol=1e-5)
    True
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("a scripted module cannot be changed: fold the model first")
    if not any(isinstance(m, (_AGC, _AGCConv, AGCLinear)) for m in model.modules()):
        raise ValueError(f"no AGC layer in {type(model).__name__}: convert it first, with to_agc")
    model = copy.deepcopy(model).eval().requires_grad_(False)
    model = swap(model, _merged(model))
    replacements: dict[nn.Module, nn.Module] = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if module._forward_pre_hooks:  # may change its parameters, as weight norm does
                continue
            if can_fold(module):
                replacements[module] = folded(module).eval()
            elif type(module) is AGCLinear:
                replacements[module] = _linear(module).eval()
            if module in replacements:
                warn_of_hooks(name, module)
    return swap(model, replacements)


def _merged(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Neurons for the convolutions that feed an AGC layer and nothing else."""
    layers = [m for m in model.modules() if isinstance(m, _AGC) and not has_hooks(m)]
    links = find_links(model, layers)
    replacements: dict[nn.Module, nn.Module] = {}
    for layer in layers:
        found = find_neuron(layer, links)
        if isinstance(found, str):
            continue
        replacements[found.conv] = make_neuron(found.conv, control_of(layer), found.activation)
        replacements[layer] = nn.Identity()
        if found.activation_module is not None:
            replacements[found.activation_module] = nn.Identity()
    return replacements


def _linear(layer: AGCLinear) -> nn.Module:
    """AGC over features is linear in x: a linear layer with centered filters, then activation."""
    linear = nn.Linear(layer.in_features, layer.out_features, device="meta")
    linear.weight, linear.bias = constant(layer._centered_weight()), constant(layer.bias)
    layers = [linear, *activation_layers(layer.activation)]
    return nn.Sequential(*layers) if len(layers) > 1 else linear
