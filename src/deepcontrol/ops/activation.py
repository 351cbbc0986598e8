"""Activations of a neuron: names, derivatives, and tensors saved for backward.

The memory of a neuron depends on whether act' can be computed from the *output*, which the next
convolution saves anyway. ReLU and leaky ReLU allow it. SiLU and GELU are not monotonic, so their
neurons save one more feature map.

The Triton kernels save a bit mask in place of the output, as described at `empty_relu_mask`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .layout import like_layout, map_strides, memory_order, positions
from .reference import ACTIVATIONS as FORMULAS
from .reference import LEAKY_SLOPE

# The keys of ACTIVATIONS, for type checkers.
ActivationName = Literal["relu", "leaky_relu", "silu", "gelu", "none"]
MaskPacking = Literal["channels", "positions", "none"]


@dataclass(frozen=True)
class Activation:
    """act(u), its in-place form, and its backward.

    Attributes:
        apply: u -> act(u).
        apply_: u -> act(u), written over u.
        backward: (g, saved) -> g * act'(u), where `saved` is the output or the input.
        needs: The tensor that backward needs.
    """

    apply: Callable[[Tensor], Tensor]
    apply_: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    needs: Literal["nothing", "output", "input"]


def _silu_backward(g: Tensor, u: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(g, u)
    # For second derivatives: aten's fused op has none.
    sigmoid = torch.sigmoid(u)
    return g * (sigmoid * (1 + u * (1 - sigmoid)))


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(
        FORMULAS["relu"],
        torch.relu_,
        lambda g, y: torch.ops.aten.threshold_backward(g, y, 0),
        needs="output",
    ),
    "leaky_relu": Activation(
        FORMULAS["leaky_relu"],
        lambda u: nn.functional.leaky_relu_(u, LEAKY_SLOPE),
        lambda g, y: torch.ops.aten.leaky_relu_backward(g, y, LEAKY_SLOPE, True),
        needs="output",
    ),
    "silu": Activation(
        FORMULAS["silu"],
        lambda u: nn.functional.silu(u, inplace=True),
        _silu_backward,
        needs="input",
    ),
    "gelu": Activation(
        FORMULAS["gelu"],
        torch.ops.aten.gelu_,
        torch.ops.aten.gelu_backward,
        needs="input",
    ),
    "none": Activation(FORMULAS["none"], lambda u: u, lambda g, _: g, needs="nothing"),
}


def get_activation(name: str) -> Activation:
    """Return the activation of that name; raise ValueError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}: choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_name(activation: str | nn.Module | type[nn.Module] | None) -> ActivationName:
    """Return the name of an activation: a name, module, module class or None.

    Raises:
        ValueError: The name is unknown, or there is no fused form of the module.

    >>> activation_name(nn.ReLU), activation_name(nn.GELU()), activation_name(None)
    ('relu', 'gelu', 'none')
    """
    if activation is None:
        return "none"
    if isinstance(activation, str):
        get_activation(activation)
        return activation  # type: ignore[return-value]
    name = None
    if isinstance(activation, nn.Module):
        name = name_of_module(activation)
    elif activation in (nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Identity):
        name = name_of_module(activation())
    if name is None:
        raise ValueError(
            f"cannot fuse the activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}, "
            f"or nn.ReLU, nn.LeakyReLU (slope {LEAKY_SLOPE}), nn.SiLU, nn.GELU (not approximate) "
            'or nn.Identity. Use activation="none" and put the module after the layer.'
        )
    return name


def name_of_module(module: nn.Module) -> ActivationName | None:
    """Return the name of the fused activation equal to a module, or None."""
    if type(module) is nn.ReLU:
        return "relu"
    if type(module) is nn.LeakyReLU and module.negative_slope == LEAKY_SLOPE:
        return "leaky_relu"
    if type(module) is nn.SiLU:
        return "silu"
    if type(module) is nn.GELU and module.approximate == "none":
        return "gelu"
    if type(module) is nn.Identity:
        return "none"
    return None


def mask_packing(maps: Tensor) -> MaskPacking:
    """Return the dimension of dense maps (N, C, *) in which 8 elements share a byte.

    >>> mask_packing(torch.empty(2, 16, 3, 3).to(memory_format=torch.channels_last))
    'channels'
    >>> mask_packing(torch.empty(2, 16, 3, 3))
    'none'
    """
    strides = map_strides(maps)
    if strides is not None and strides[1] == 1 and maps.shape[1] % 8 == 0:
        return "channels"
    if strides is not None and strides[2] == 1 and positions(maps) % 8 == 0:
        return "positions"
    return "none"


def empty_relu_mask(v: Tensor, activation: str) -> Tensor | None:
    """Allocate the bit mask of v (uint8, numel / 8); return None if it has none.

    The backward of ReLU and leaky ReLU needs only the signs of the output y. Reading y would make
    five passes over maps: g and y for the mean, g and y again to compute dv, and writing dv. With
    the signs as bits, a sixteenth of a bf16 map, these are three and an eighth. The forward kernel
    writes the mask, and autograd saves it instead of y, which the next convolution saves.

    Bit k of byte b belongs to the element at memory offset 8 b + k, in any layout.
    """
    if ACTIVATIONS[activation].needs != "output" or mask_packing(v) == "none":
        return None
    return torch.empty(v.numel() // 8, dtype=torch.uint8, device=v.device)


def unpack_relu_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Return 1 where y > 0 and 0 elsewhere, for dense maps laid out as `like`."""
    each = mask[:, None] >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    like = like_layout(like, memory_order(like))
    return each.reshape(-1).as_strided(like.shape, like.stride()).to(like.dtype)
