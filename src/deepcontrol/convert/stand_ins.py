"""BatchNorms that stand in the place of other norms while a conversion is planned.

The passes of the conversion know BatchNorms only. An InstanceNorm, a GroupNorm or a frozen
BatchNorm is planned and verified as a BatchNorm in its place: the dataflow around it is the same.
Stand-ins that are not converted are replaced by their norms again.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .norms import (
    NormKind,
    Where,
    find_norms,
    is_frozen_class,
    kind_of,
    select_norms,
    spatial_dims,
    trailing_layers,
)


def batchnorms_of_frozen(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return an nn.BatchNorm2d with the same values for each FrozenBatchNorm2d of a model.

    Its parameters do not require gradients.
    """
    found: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if is_frozen_class(module):
            frozen: Any = module
            norm = nn.BatchNorm2d(len(frozen.weight), eps=getattr(frozen, "eps", 1e-5))
            norm = norm.to(frozen.weight).train(frozen.training).requires_grad_(False)
            for name in ("weight", "bias", "running_mean", "running_var"):
                getattr(norm, name).data.copy_(getattr(frozen, name))
            found[module] = norm
    return found


def stand_ins(
    model: nn.Module, kinds: Sequence[NormKind], where: Where | None
) -> dict[nn.Module, nn.Module]:
    """Return a BatchNorm to plan with for each selected InstanceNorm and GroupNorm of a model.

    It shares gamma, beta and children. Norms that compute something else are left out.
    """
    found: dict[nn.Module, nn.Module] = {}
    if set(kinds) <= {"batch"}:
        return found
    like = next(model.parameters(), torch.empty(0)).detach()
    for norm in select_norms(find_norms(model, kinds), where):
        if kind_of(norm) != "batch":
            layers = trailing_layers(norm)
            if layers is not None:
                found[norm] = _stand_in(norm, layers, like)
    return found


def _stand_in(norm: Any, layers: list[nn.Module], like: Tensor) -> nn.Module:
    """Return a BatchNorm with the parameters and children of an InstanceNorm or GroupNorm."""
    own = next((p for p in norm.parameters(recurse=False)), like)
    dims = spatial_dims(norm)
    # SyncBatchNorm accepts any number of dimensions, as GroupNorm does.
    base: Any = nn.SyncBatchNorm if dims is None else getattr(nn, f"BatchNorm{dims}d")
    features = norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features
    new = _stand_in_class(base)(features, eps=norm.eps, affine=False)
    new = new.to(own.device, own.dtype if own.is_floating_point() else None).train(norm.training)
    # Code may read these. They differ from AGC's, so the verification finds it.
    for name in ("affine", "num_groups", "num_channels"):
        if hasattr(norm, name):
            setattr(new, name, getattr(norm, name))
    # Those of a parametrized or pruned norm are computed, and no parameters.
    for name in ("weight", "bias"):
        value = getattr(norm, name)
        if isinstance(value, nn.Parameter) or value is None:
            new.register_parameter(name, value)
        else:
            new.register_parameter(name, nn.Parameter(value.detach().clone()))
    for name, child in norm.named_children():
        if child in layers:
            new.add_module(name, child)
    return new


@functools.cache
def _stand_in_class(base: Any) -> Any:
    """Return a subclass of a BatchNorm that checks its input and calls its children afterwards."""

    class StandIn(base):
        def forward(self, input: Tensor) -> Tensor:
            if input.shape[1] != self.num_features:  # norms without parameters accept any number
                raise ValueError(
                    f"a norm of {self.num_features} channels gets maps {tuple(input.shape)}. AGC "
                    "has parameters for each channel: give every place a norm of its own with the "
                    "right number of channels, or exclude it with `where`"
                )
            output: Tensor = super().forward(input)
            for layer in self.children():
                output = layer(output)
            return output

    return StandIn
