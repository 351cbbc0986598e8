"""A convolution, the norm that it feeds and the activation behind: what can become one neuron."""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..ops.activation import ActivationName
from ..ops.reference import LEAKY_SLOPE
from .links import Links
from .tree import has_hooks

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Neuron:
    """Modules that are only ever called one after the other; activation is "none" without one."""

    conv: _ConvNd
    activation: ActivationName = "none"
    activation_module: nn.Module | None = None


def find_neuron(norm: nn.Module, links: Links) -> Neuron | str:
    """The neuron around a norm, or why there is none."""
    conv = links.only_before(norm)
    if conv is None:
        return "no single convolution feeds it"
    reason = _why_not(conv)
    if reason is not None:
        return reason
    assert isinstance(conv, _ConvNd)
    if links.only_after(conv) is not norm:
        return "the convolution's output is used elsewhere too"
    if links.doubted & {conv, norm}:
        return "what calls its convolution was neither followed nor seen with an example"
    after = links.only_after(norm)
    if (
        after is not None
        and after not in links.doubted
        and links.only_before(after) is norm
        and not has_hooks(after)
    ):
        name = activation_name(after)
        if name is not None:
            return Neuron(conv, name, after)
    return Neuron(conv)


def activation_name(module: nn.Module) -> ActivationName | None:
    """The neuron's name for an activation, or None if it has none for it."""
    if type(module) is nn.ReLU:
        return "relu"
    if type(module) is nn.LeakyReLU and module.negative_slope == LEAKY_SLOPE:
        return "leaky_relu"
    if type(module) is nn.SiLU:
        return "silu"
    if type(module) is nn.GELU and module.approximate == "none":
        return "gelu"
    return None


def _why_not(conv: nn.Module) -> str | None:
    """Why a neuron cannot do what this module does."""
    kind = type(conv).__name__
    plain = next((c for c in _CONVOLUTIONS if isinstance(conv, c)), None)
    if plain is None:
        return f"{kind} feeds it"
    if hasattr(conv, "parametrizations"):
        return "the convolution's parameters are computed (parametrized)"
    own = [getattr(type(conv), method) for method in ("forward", "_conv_forward")]
    if own != [plain.forward, plain._conv_forward] or "forward" in vars(conv):
        return f"{kind} has a forward of its own"
    if not isinstance(conv.weight, nn.Parameter):
        return "the convolution's filters are no parameter"
    if has_hooks(conv):
        return "the convolution has hooks"
    return None
