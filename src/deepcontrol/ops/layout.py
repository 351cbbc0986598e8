"""Shapes, strides and dtypes of feature maps (N, C, *), cached by shape."""

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def shape_cache(function: Callable[..., T], *arguments: object) -> T:
    """Return function(*arguments) from a cache.

    An eager training step repeats the same decisions about shapes and strides in every iteration.
    The result must depend only on the arguments.
    """
    try:
        return _cached(function, *arguments)
    except TypeError:  # a compiler's symbolic sizes have no hash
        return function(*arguments)


@functools.lru_cache(maxsize=1 << 14)
def _cached(function: Callable[..., T], *arguments: object) -> T:
    return function(*arguments)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of means and sums: fp32 for half types.

    A bf16 sum of ones stops growing at 256.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def positions(z: Tensor) -> int:
    """Return the number of positions of a map of z (N, C, *); 1 for (N, C)."""
    return math.prod(z.shape[2:])  # numel() would make constants of dynamic sizes


def map_sum(z: Tensor) -> Tensor:
    """Sum each map: (N, C, *) -> (N, C), in the accumulation dtype."""
    if z.dim() == 2:  # torch reads "no dimensions" as "all dimensions"
        return z.to(accumulate_dtype(z.dtype))
    return z.sum(tuple(range(2, z.dim())), dtype=accumulate_dtype(z.dtype))


def map_mean(z: Tensor) -> Tensor:
    """Average each map: (N, C, *) -> (N, C), in the accumulation dtype."""
    if z.dim() == 2:
        return z.to(accumulate_dtype(z.dtype), copy=True)  # an op may not return its input
    return z.mean(tuple(range(2, z.dim())), dtype=accumulate_dtype(z.dtype))


def over_maps(a: Tensor, z: Tensor) -> Tensor:
    """View a (N, C) or (C,) so that it broadcasts over the positions of z (N, C, *)."""
    return a.reshape(a.shape + (1,) * (z.dim() - 2))


def map_strides(z: Tensor) -> tuple[int, int, int] | None:
    """Return the strides of z (N, C, *) viewed as (N, C, positions), or None.

    Contiguous and channels_last maps of any dimension have one stride between positions. Sliced,
    transposed and expanded maps may not.

    >>> map_strides(torch.empty(2, 3, 4, 5))
    (60, 20, 1)
    >>> map_strides(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
    (60, 1, 3)
    >>> map_strides(torch.empty(2, 3, 4, 5)[..., ::2]) is None
    True
    """
    return shape_cache(flat_strides, z.shape, z.stride())


def flat_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Compute `map_strides` from a shape and strides."""
    stride, count = 0, 1  # stride and number of the innermost positions
    for size, step in zip(reversed(shape[2:]), reversed(strides[2:]), strict=True):
        if size == 1:
            continue
        if count == 1:
            stride = step
        elif step != stride * count:
            return None
        count *= size
    if 0 in (step for step, size in zip(strides, shape, strict=True) if size > 1):
        return None  # expanded: several elements share one address
    return strides[0], strides[1], stride


def is_batched(a: Tensor) -> bool:
    """Return whether tensor `a` is a batch of gradients.

    Such batches come from is_grads_batched=True and from autograd.grad in vmap. The former is the
    vmap from before torch.func, which torch.func's own check does not report.
    """
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(a) or functorch.is_batchedtensor(a)


def like_layout(a: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return a with its dimensions in memory in `order`, outermost first.

    Copies only if needed. Uses permute and contiguous because, unlike memory formats, these work
    under vmap.
    """
    if not is_batched(a) and is_laid_out(a, order):
        return a
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return a.permute(order).contiguous().permute(inverse)


def is_laid_out(a: Tensor, order: tuple[int, ...]) -> bool:
    """Return whether the dimensions of a lie in memory in `order`, without gaps."""
    return shape_cache(_is_dense, a.shape, a.stride(), order)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...]) -> bool:
    dense = 1
    for d in reversed(order):
        if shape[d] != 1 and strides[d] != dense:
            return False
        dense *= shape[d]
    return True


def memory_order(a: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a in memory, outermost first, such as NCHW or NHWC."""
    return shape_cache(_order, a.stride())


def _order(strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))


def is_channels_last(x: Tensor) -> bool:
    """Return whether x (N, C, H, W) has its channels innermost.

    Strides decide, for 1x1 maps too.
    """
    _, channel, row, column = x.stride()
    return 0 < channel < column and channel < row


def check_maps(z: Tensor, **per_filter: Tensor | None) -> None:
    """Raise ValueError unless z is floating-point (N, C, *), the others (C,) or None."""
    if not z.is_floating_point():
        raise ValueError(f"expected a floating-point input, got {z.dtype}")
    if z.dim() < 2:
        raise ValueError(
            f"expected an input of at least 2 dimensions (N, C, *), got {z.dim()}: {tuple(z.shape)}"
        )
    if 0 in z.shape[2:]:
        raise ValueError(f"maps of no positions have no mean: got an input of {tuple(z.shape)}")
    for name, parameter in per_filter.items():
        if parameter is not None and parameter.shape != z.shape[1:2]:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, but the input of shape "
                f"{tuple(z.shape)} has {z.shape[1]} channels"
            )
