"""The convolution with the gain in its weights, and its mean.

v = conv(x, V) with V = gamma W. With dV the gradient of the scaled filters, dgamma = <W, dV> over
each filter and dW = gamma dV. This is exact for any gamma, zero included, and needs no output. V is
recomputed in backward: that costs one pass over the weights and saves their memory. Under autocast
V is saved, like the cast weights of every convolution, unless it is larger than the input
(`saves_scaled`).

With a filter_norm the filters are normalized in the same pass (see reference.FilterNorm).

`gain_conv_transpose` is the same for the transposed convolution. Its filters have shape
(C_in, C_out / groups, *), so the gain scales their second dimension, in plain PyTorch.

The mean of v can be computed before v is read:

    sum over the map of conv(x, V)[o] = sum over c, k of V[o, c, k] S[c, k]

S[c, k] is the sum of x over the positions that tap k of the kernel reads. For a 3x3 kernel on a map
padded by 1, it is the sum of the whole map less a row and a column at its borders. The kernel that
wrote x had all of x in registers, so it can store the sums of its maps. A neuron then reads the
output of its convolution once, to rewrite it, without a first read for the mean. `convert.fold`
does the same at inference, for every convolution and in plain PyTorch.

Map sums are stored in a table keyed by the tensor and its version, not passed between modules. A
hook or a module that changes a map on its way makes a new tensor or a new version, and the sums no
longer apply.

This pays off for large maps only, and only the kernels in eager mode (a captured step included)
use it. Plain PyTorch and compiled models read the maps.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import reference
from .dispatch import (
    compiles_with_ops,
    needs_differentiable_backward,
    needs_plain_ops,
    uses_kernels,
)
from .layout import map_strides
from .reference import FilterNorm, swap_channels

MIN_ELEMENTS = 24 << 20  # a smaller output of a convolution is read from the L2 cache
HALF_TYPES = (torch.bfloat16, torch.float16)  # a TF32 convolution rounds x internally

_stored: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> (version, map sums)


def gain_conv(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    filter_norm: FilterNorm | None = None,
) -> Tensor:
    """Return conv(x, gamma W) in the dtype of x.

    Args:
        x: Input (N, C_in, *) of 1 to 3 spatial dimensions.
        weight: Filters W, (C_out, C_in / groups, *).
        gain: gamma, (C_out,).
        stride, padding, dilation: One number per spatial dimension.
        groups: As in torch.nn.Conv2d.
        filter_norm: Normalization of each filter before the gain, or None to use the filters as
            they are.

    Returns:
        v (N, C_out, *).

    >>> x, weight, gain = torch.ones(1, 1, 4), torch.ones(2, 1, 3), torch.tensor([1.0, 2.0])
    >>> gain_conv(x, weight, gain, stride=[1], padding=[0], dilation=[1], groups=1)
    tensor([[[3., 3.],
             [6., 6.]]])
    """
    _check_norm(filter_norm)
    x = cast_input(x, weight, gain, groups)
    args = (list(stride), list(padding), list(dilation), groups)
    if needs_plain_ops() or (torch.compiler.is_compiling() and not compiles_with_ops()):
        return reference.gain_conv(x, weight, gain, *args, filter_norm)
    if torch.compiler.is_compiling():
        norm, centered = filter_norm or (None, False)
        scaled = torch.ops.deepcontrol.scale_filters(weight, gain, x.dtype, norm, centered)
        return reference.conv(x, scaled, *args)
    geometry = (args[0], args[1], args[2], False, [0] * len(args[0]), groups)
    return _GainConv.apply(x, weight, gain, geometry, filter_norm)


def gain_conv_transpose(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    filter_norm: FilterNorm | None = None,
) -> Tensor:
    """Return conv_transpose(x, gamma W) in x's dtype; filter_norm as in gain_conv.

    Args:
        x: Input (N, C_in, *) of 1 to 3 spatial dimensions.
        weight: Filters W, (C_in, C_out / groups, *).
        gain: gamma, (C_out,). A filter is all of W that contributes to an output channel.
        stride, padding, output_padding, dilation: One number per spatial dimension.
        groups: As in torch.nn.ConvTranspose2d.
        filter_norm: As in gain_conv.

    Returns:
        v (N, C_out, *).
    """
    _check_norm(filter_norm)
    x = cast_input(x, weight, gain, groups, transposed=True)
    if torch.compiler.is_compiling() or needs_plain_ops():  # a compiler fuses the scaling itself
        args = (stride, padding, output_padding, dilation, groups)
        return reference.gain_conv_transpose(x, weight, gain, *args, filter_norm)
    geometry = (list(stride), list(padding), list(dilation), True, list(output_padding), groups)
    return _GainConv.apply(x, weight, gain, geometry, filter_norm)


def cast_input(
    x: Tensor, weight: Tensor, gain: Tensor, groups: int, transposed: bool = False
) -> Tensor:
    """Check x against the filters and cast it to the dtype of the convolution."""
    autocast = autocast_dtype(x)
    filters, channels = weight.shape[0], weight.shape[1] * groups
    if transposed:
        filters, channels = channels, filters
    _check(x, weight, channels, autocast)
    if gain.shape != (filters,):
        raise ValueError(f"gain has shape {tuple(gain.shape)}, but there are {filters} filters")
    # Cast before autograd saves x, as torch's convolutions do, so that it saves the smaller copy.
    return x if autocast is None else x.to(autocast)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast requests, or None.

    Like torch, it does not cast doubles.
    """
    device = "cuda" if x.is_cuda else x.device.type  # the name of a device takes a microsecond
    if device == "meta" or not torch.is_autocast_enabled(device):  # raises for meta
        return None
    return torch.get_autocast_dtype(device) if x.dtype != torch.float64 else x.dtype


def _check(x: Tensor, weight: Tensor, channels: int, autocast: torch.dtype | None) -> None:
    if not x.is_floating_point():
        raise ValueError(f"expected a floating-point input, got {x.dtype}")
    if x.dim() != weight.dim():
        raise ValueError(
            f"expected an input of {weight.dim()} dimensions, got {x.dim()}: {tuple(x.shape)}"
        )
    if x.shape[1] != channels:
        raise ValueError(
            f"expected {channels} channels, got {x.shape[1]} in the input of shape {tuple(x.shape)}"
        )
    if x.dtype != weight.dtype and autocast is None:
        raise ValueError(f"expected an input of {weight.dtype} like the weights, got {x.dtype}")


def _check_norm(filter_norm: FilterNorm | None) -> None:
    if filter_norm is not None and not filter_norm.norm > 0:
        raise ValueError(f"expected a positive norm in filter_norm, got {filter_norm.norm}")


class _GainConv(torch.autograd.Function):
    """(x, weight, gain, geometry, filter_norm) -> v.

    The geometry is that of torch.convolution after the bias.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gain: Tensor,
        geometry: tuple[Any, ...],
        filter_norm: FilterNorm | None,
    ) -> Tensor:
        scaled = _scaled(weight, gain, x.dtype, filter_norm, geometry)
        kept = scaled if saves_scaled(x.numel(), x.dtype, weight) else None
        ctx.save_for_backward(x, weight, gain, kept)
        ctx.geometry = geometry
        ctx.filter_norm = filter_norm
        return torch.convolution(x, scaled, None, *geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gain, scaled = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        dx, dweight, dgain = backward(
            grads[0], x, weight, gain, scaled, ctx.geometry, ctx.filter_norm, needs
        )
        return dx, dweight, dgain, None, None


def backward(
    dv: Tensor,
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    scaled: Tensor | None,
    geometry: tuple[Any, ...],
    filter_norm: FilterNorm | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dW and dgamma, with None for those not needed.

    Args:
        scaled: The scaled filters V, if they were saved.
        geometry: The arguments of torch.convolution after the filters and their bias.
        filter_norm: As in gain_conv.
        needs: Whether x, weight and gain need a gradient.
    """
    if scaled is None or torch.is_grad_enabled():  # second derivatives go through V
        scaled = _scaled(weight, gain, x.dtype, filter_norm, geometry)

    def conv_backward(of_x: bool, of_filters: bool) -> tuple[Tensor | None, Tensor | None]:
        dx, dscaled, _ = torch.ops.aten.convolution_backward(
            dv, x, scaled, None, *geometry, [of_x, of_filters, False]
        )
        return dx, dscaled

    dweight = dgain = None
    of_filters = needs[1] or needs[2]
    # Neither gradient needs the other, and with small maps neither fills a GPU. While a CUDA graph
    # is captured, the filters' gradient is recorded on a side stream, so that the graph has two
    # branches that run in parallel. They join before backward returns: no memory is freed early.
    parallel = needs[0] and of_filters and x.is_cuda and torch.cuda.is_current_stream_capturing()
    with on_side_stream(x.device) if parallel else nullcontext():
        dx, dscaled = conv_backward(needs[0] and not parallel, of_filters)
        if dscaled is not None:
            dweight, dgain = _scaled_backward(weight, gain, dscaled, filter_norm, geometry)
    if parallel:
        dx, _ = conv_backward(True, False)
        wait_for_side_stream(x.device)
    return dx, dweight, dgain


def _scaled(
    weight: Tensor,
    gain: Tensor,
    dtype: torch.dtype,
    filter_norm: FilterNorm | None,
    geometry: tuple[Any, ...],
) -> Tensor:
    """Return V in the layout of W, for a convolution or a transposed one."""
    if not geometry[3]:
        return scale_function(weight)(weight, gain, dtype, filter_norm)
    groups = geometry[5]
    filters = swap_channels(weight, groups)
    return swap_channels(reference.scaled_filters(filters, gain, dtype, filter_norm), groups)


def _scaled_backward(
    weight: Tensor,
    gain: Tensor,
    dscaled: Tensor,
    filter_norm: FilterNorm | None,
    geometry: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """Return dW and dgamma, for a convolution or a transposed one."""
    if not geometry[3]:
        return scale_backward(weight, gain, dscaled, filter_norm)
    groups = geometry[5]
    dfilters, dgain = reference.scaled_filters_backward(
        swap_channels(weight, groups), gain, swap_channels(dscaled, groups), filter_norm
    )
    return swap_channels(dfilters, groups), dgain


def saves_scaled(elements: int, dtype: torch.dtype, weight: Tensor) -> bool:
    """Return whether V is saved for backward, which computes it again otherwise.

    Without autocast V would be a second copy of the weights in their own dtype. Under autocast it
    is a smaller one, and saving it saves a launch. But in the deep layers of a classifier at batch
    size 1 the weights are larger than the maps, and V would take most of the memory.

    Args:
        elements: Number of elements of the convolution's input.
        dtype: Dtype of the convolution.
        weight: The filters W.

    >>> saves_scaled(4096, torch.bfloat16, torch.empty(16, 16, 3, 3))
    True
    >>> saves_scaled(512, torch.bfloat16, torch.empty(16, 16, 3, 3))
    False
    """
    return dtype != weight.dtype and weight.numel() <= elements


def on_side_stream(device: torch.device) -> torch.cuda.StreamContext:
    """Run the block on a side stream, after the work submitted so far."""
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def wait_for_side_stream(device: torch.device) -> None:
    """Let the current stream wait for the side stream."""
    torch.cuda.current_stream(device).wait_stream(_side_stream(device))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def scale_function(
    weight: Tensor, traced: bool = False
) -> Callable[[Tensor, Tensor, torch.dtype, FilterNorm | None], Tensor]:
    """Return the function (weight, gain, dtype, filter_norm) -> V for these filters.

    Returning the function instead of calling it keeps the Python stack above a launch short.
    """
    if (traced or not torch.is_grad_enabled()) and uses_kernels(weight, traced):
        from .triton import gain as kernels

        if kernels.supports(weight):
            return functools.partial(kernels.scale, traced=True) if traced else kernels.scale
    return reference.scaled_filters


def scale_backward(
    weight: Tensor,
    gain: Tensor,
    dscaled: Tensor,
    filter_norm: FilterNorm | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dW and dgamma (see reference.py); the plain form is differentiable."""
    plain = not traced and needs_differentiable_backward(dscaled)
    if not plain and uses_kernels(weight, traced):
        from .triton import gain as kernels

        if kernels.supports(weight):
            return kernels.scale_backward(weight, gain, dscaled, filter_norm, traced)
    return reference.scaled_filters_backward(weight, gain, dscaled, filter_norm)


class ConvOperands(NamedTuple):
    """The operands of a 3x3 convolution with padding 1, stride 1 and one group.

    Attributes:
        x: Input (N, C, H, W).
        filters: Filters (F, C, 3, 3), gain included.
        map_sums: Partial sums of the maps of x, (N, groups, parts, channels of a group), stored
            by the kernel that wrote x; or None.
    """

    x: Tensor
    filters: Tensor
    map_sums: Tensor | None


def is_large(v: Tensor) -> bool:
    """Return whether v is too large for the L2 cache: a second read takes time."""
    return v.numel() >= MIN_ELEMENTS


def derives_mean(v: Tensor, operands: ConvOperands | None) -> bool:
    """Return whether v's mean is cheaper to derive from its operands than to read."""
    if operands is None or v.dtype not in HALF_TYPES or not is_large(v):
        return False
    # Without stored sums, x must be read. That pays if x has few channels, as an image does.
    has_sums = operands.map_sums is not None or 4 * operands.x.shape[1] <= v.shape[1]
    return has_sums and map_strides(operands.x) is not None


def wants_map_sums(y: Tensor, consumer_ratio: float) -> bool:
    """Return whether the kernel that writes y should store the sums of its maps.

    Args:
        consumer_ratio: Output elements per input element of the consumer of y; 0 if unknown.
    """
    large = consumer_ratio > 0 and consumer_ratio * y.numel() >= MIN_ELEMENTS
    return y.dtype in HALF_TYPES and large


def store_map_sums(y: Tensor, map_sums: Tensor | None) -> None:
    """Store the map sums of y for its consumer."""
    if map_sums is not None and not y.is_inference():  # inference tensors have no version
        _stored[y] = (y._version, map_sums)


def stored_map_sums(x: Tensor) -> Tensor | None:
    """Return the stored map sums of x, or None if there are none or x has changed."""
    entry = _stored.get(x) if len(_stored) else None
    return entry[1] if entry is not None and entry[0] == x._version else None
