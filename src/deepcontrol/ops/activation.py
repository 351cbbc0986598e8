"""The nonlinearities a neuron can end in, and what each one needs for its backward.

What decides a neuron's memory is whether the slope can be read off the *output*: the output is the
next convolution's input and is kept anyway. ReLU and leaky ReLU can; SiLU and GELU cannot (they are
not monotonic), so those neurons keep one more map.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# The keys of ACTIVATIONS below, spelled out for type checkers.
ActivationName = Literal["relu", "leaky_relu", "silu", "gelu", "none"]

LEAKY_SLOPE = 0.01  # torch.nn.LeakyReLU's default


@dataclass(frozen=True)
class Activation:
    """act(u), and g * act'(u) from whichever of (nothing, output, input) it needs."""

    apply: Callable[[Tensor], Tensor]
    apply_: Callable[[Tensor], Tensor]  # the same, over its argument
    backward: Callable[[Tensor, Tensor], Tensor]  # (g, output or input) -> g * act'
    needs: Literal["nothing", "output", "input"]


def _silu_backward(g: Tensor, u: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(g, u)
    # A second derivative is asked for, and torch's one-pass op has none.
    sigmoid = torch.sigmoid(u)
    return g * (sigmoid * (1 + u * (1 - sigmoid)))


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(
        torch.relu,
        torch.relu_,
        lambda g, y: torch.ops.aten.threshold_backward(g, y, 0),
        needs="output",
    ),
    "leaky_relu": Activation(
        lambda u: torch.nn.functional.leaky_relu(u, LEAKY_SLOPE),
        lambda u: torch.nn.functional.leaky_relu_(u, LEAKY_SLOPE),
        lambda g, y: torch.ops.aten.leaky_relu_backward(g, y, LEAKY_SLOPE, True),
        needs="output",
    ),
    "silu": Activation(
        torch.nn.functional.silu,
        lambda u: torch.nn.functional.silu(u, inplace=True),
        _silu_backward,
        needs="input",
    ),
    "gelu": Activation(
        torch.nn.functional.gelu,
        torch.ops.aten.gelu_,
        torch.ops.aten.gelu_backward,
        needs="input",
    ),
    "none": Activation(lambda u: u, lambda u: u, lambda g, _: g, needs="nothing"),
}


def get_activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}: choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
