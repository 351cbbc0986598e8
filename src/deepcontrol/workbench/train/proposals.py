"""The paper's proposals as options of training: background, lambda, noise and its controls.

The paper names mechanisms that it does not show. `deepcontrol reproduce --preset proposals` judges
them. GEMS is a hook of the optimizer; see `start.open_run`.

Noise and dropout are random numbers of torch's default generators. A checkpoint holds the state of
these, and a captured step draws from them, so that a resumed run continues bit for bit.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ...nn import DeepNoise, Quantile, TrimmedMean, WindowMean, set_noise_
from .config import parse_background

PROCESSES = 2**16  # each process of a run has random numbers of its own


def set_background_(model: nn.Module, text: str) -> None:
    """Set the background of all AGC layers of a network."""
    name, value = parse_background(text)
    if name == "mean":
        return
    background = {
        "median": lambda: Quantile(0.5),
        "window": lambda: WindowMean(int(value)),
        "quantile": lambda: Quantile(value),
        "trimmed": lambda: TrimmedMean(value),
    }[name]()
    layers = [layer for layer in model.modules() if hasattr(layer, "background")]
    if not layers:
        raise ValueError(f"--background {text}: the network has no AGC layer with feature maps")
    for layer in layers:
        layer.background = background  # type: ignore[assignment]


def lambdas(model: nn.Module) -> list[nn.Parameter]:
    """Return lambda of every AGC layer."""
    return [p for name, p in model.named_parameters() if name.rpartition(".")[2] == "mean_scale"]


def add_noise_(
    model: nn.Module, noise: float, dropout: float, seed: int, rank: int
) -> Callable[[], None]:
    """Add --noise and --dropout to a network that is trained; return a function that removes them.

    Noise is added by each AGC layer, or behind each BatchNorm. Dropout sets whole maps of the
    classifier's input to 0. Neither has parameters or acts in evaluation.

    Args:
        model: The network, changed in place.
        noise: Standard deviation, relative to that of each map; 0 for none.
        dropout: Probability; 0 for none. The network must have a layer `classify`.
        seed: Seed of the run.
        rank: Rank of this process.
    """
    if not noise and not dropout:
        return lambda: None
    torch.manual_seed((seed * PROCESSES + rank) % 2**63)
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    has_own_noise = bool(noise) and (not norms or bool(lambdas(model)))
    hooks = []
    if has_own_noise:
        set_noise_(model, noise)  # raises if there is no layer that adds noise
    if noise:
        hooks += [norm.register_forward_hook(_NoiseHook(noise)) for norm in norms]
    if dropout:
        classify: Any = model.classify
        hooks.append(classify.register_forward_pre_hook(_DropoutHook(dropout)))

    def remove() -> None:
        if has_own_noise:
            set_noise_(model, 0.0)
        for hook in hooks:
            hook.remove()

    return remove


class _NoiseHook:
    """A forward hook that adds noise while its layer trains."""

    def __init__(self, relative: float) -> None:
        self.noise = DeepNoise(relative)

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        noisy: Tensor = self.noise(output) if layer.training else output
        return noisy


class _DropoutHook:
    """A forward pre-hook that drops maps of a layer's input while the layer trains."""

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        if not layer.training:
            return inputs[0]
        if inputs[0].dim() == 2:  # vectors, as in classification
            return functional.dropout(inputs[0], self.probability)
        return torch.feature_dropout(inputs[0], self.probability, train=True)
