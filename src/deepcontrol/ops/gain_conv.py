"""The convolution with the gain in its weights: v = conv(x, V), V = gamma W.

With dV the gradient of the scaled filters: dgamma = <W, dV> over each filter, dW = gamma dV. That
is exact for any gamma, zero included, and needs no output. V is made again in the backward, which
costs a pass over the weights and keeps a network's memory at its activations alone; but under
autocast it is kept, as the cast weights of every convolution are there.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from . import reference
from .backend import takes_kernels
from .beside import beside, can_go_beside, join
from .maps import accumulate_dtype
from .tracing import compiles_with_ops, wants_derivatives, wants_plain_ops


def gain_conv(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """conv(x, gamma W) in x's dtype, for x (N, C_in, *) and weight (C_out, C_in / groups, *)."""
    x = checked_input(x, weight, gain, groups)
    args = (list(stride), list(padding), list(dilation), groups)
    if wants_plain_ops() or (torch.compiler.is_compiling() and not compiles_with_ops()):
        return reference.gain_conv(x, weight, gain, *args)
    if torch.compiler.is_compiling():
        scaled = torch.ops.deepcontrol.scale_filters(weight, gain, x.dtype)
        return reference.conv(x, scaled, *args)
    return _GainConv.apply(x, weight, gain, *args)


def checked_input(x: Tensor, weight: Tensor, gain: Tensor, groups: int) -> Tensor:
    """x in the dtype that the convolution runs in; ValueError if it is not for these filters."""
    autocast = _autocast_dtype(x)
    _check(x, weight, groups, autocast)
    if gain.shape != weight.shape[:1]:
        raise ValueError(
            f"gain has shape {tuple(gain.shape)}, but there are {weight.shape[0]} filters"
        )
    # As torch's own convolutions do, so that what is kept is the small copy.
    return x if autocast is None else x.to(autocast)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for here, or None; torch's convolutions leave doubles alone."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):  # which raises for meta
        return None
    return torch.get_autocast_dtype(device) if x.dtype != torch.float64 else x.dtype


def _check(x: Tensor, weight: Tensor, groups: int, autocast: torch.dtype | None) -> None:
    if not x.is_floating_point():
        raise ValueError(f"expected a floating-point input, got {x.dtype}")
    if x.dim() != weight.dim():
        raise ValueError(
            f"expected an input of {weight.dim()} dimensions, got {x.dim()}: {tuple(x.shape)}"
        )
    channels = weight.shape[1] * groups
    if x.shape[1] != channels:
        raise ValueError(
            f"expected {channels} channels, got {x.shape[1]} in the input of shape {tuple(x.shape)}"
        )
    if x.dtype != weight.dtype and autocast is None:
        raise ValueError(f"expected an input of {weight.dtype} like the weights, got {x.dtype}")


class _GainConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gain: Tensor,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> Tensor:
        scaled = scale(weight, gain, x.dtype)
        ctx.save_for_backward(x, weight, gain, scaled if x.dtype != weight.dtype else None)
        ctx.geometry = geometry = (stride, padding, dilation, False, [0] * len(stride), groups)
        return torch.convolution(x, scaled, None, *geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gain, scaled = ctx.saved_tensors
        of = (grads[0], x, weight, gain, scaled, ctx.geometry, ctx.needs_input_grad[:3])
        return *backward(*of), None, None, None, None


def backward(
    dv: Tensor,
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    scaled: Tensor | None,
    geometry: tuple[Any, ...],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dW, dgamma, those that are needed; scaled is gamma W, if it was kept.

    geometry: what torch.convolution takes after the filters and their bias.
    """
    if scaled is None or torch.is_grad_enabled():  # a second derivative goes through V
        scaled = scale(weight, gain, x.dtype)

    def conv_backward(of_x: bool, of_filters: bool) -> tuple[Tensor | None, Tensor | None]:
        mask = [of_x, of_filters, False]
        of = (dv, x, scaled, None, *geometry, mask)
        dx, dscaled, _ = torch.ops.aten.convolution_backward(*of)
        return dx, dscaled

    dweight = dgain = None
    of_filters = needs[1] or needs[2]
    side_by_side = needs[0] and of_filters and can_go_beside(x)
    with beside(x) if side_by_side else nullcontext():
        dx, dscaled = conv_backward(needs[0] and not side_by_side, of_filters)
        if dscaled is not None:
            dweight, dgain = scale_backward(weight, gain, dscaled)
    if side_by_side:
        dx, _ = conv_backward(True, False)
        join(x)
    return dx, dweight, dgain


def scale(weight: Tensor, gain: Tensor, dtype: torch.dtype, traced: bool = False) -> Tensor:
    """gamma W in the dtype that the convolution runs in."""
    if (traced or not torch.is_grad_enabled()) and takes_kernels(weight, traced):
        from .kernels import gain as kernels

        if kernels.takes(weight):
            return kernels.scale(weight, gain, dtype, traced)
    return reference.gained(weight, gain, dtype)


def scale_backward(
    weight: Tensor, gain: Tensor, dscaled: Tensor, traced: bool = False
) -> tuple[Tensor, Tensor]:
    """dW = gamma dV and dgamma = <W, dV>; differentiable where somebody differentiates again."""
    if (traced or not wants_derivatives(dscaled)) and takes_kernels(weight, traced):
        from .kernels import gain as kernels

        if kernels.takes(weight):
            return kernels.scale_backward(weight, gain, dscaled, traced)
    dweight = reference.gained(dscaled, gain, weight.dtype)
    products = weight.to(accumulate_dtype(weight.dtype)) * dscaled
    return dweight, products.sum(tuple(range(1, weight.dim()))).to(gain.dtype)
