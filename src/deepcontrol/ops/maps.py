"""Shapes, dtypes and layouts of maps (N, C, *): what every op here needs to know of its input."""

import math

import torch
from torch import Tensor

from .remember import remembered
from .tracing import is_batched


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Means and sums are taken in fp32 for half types: a bf16 sum stops growing at 256 ones."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def positions(z: Tensor) -> int:
    """How many positions a map of z (N, C, *) has; 1 for (N, C)."""
    return math.prod(z.shape[2:])  # not numel(), which makes constants of dynamic sizes


def map_sum(z: Tensor) -> Tensor:
    """The sum of each map: (N, C, *) -> (N, C), in the accumulation dtype."""
    if z.dim() == 2:  # torch takes "over no dimensions" for "over all"
        return z.to(accumulate_dtype(z.dtype))
    return z.sum(tuple(range(2, z.dim())), dtype=accumulate_dtype(z.dtype))


def map_mean(z: Tensor) -> Tensor:
    """The mean of each map: (N, C, *) -> (N, C), in the accumulation dtype."""
    if z.dim() == 2:
        return z.to(accumulate_dtype(z.dtype), copy=True)  # an op may not return its input
    return z.mean(tuple(range(2, z.dim())), dtype=accumulate_dtype(z.dtype))


def over_maps(a: Tensor, z: Tensor) -> Tensor:
    """View a (N, C) or (C,) so that it broadcasts over the positions of z (N, C, *)."""
    return a.reshape(a.shape + (1,) * (z.dim() - 2))


def like_layout(a: Tensor, order: tuple[int, ...]) -> Tensor:
    """a with its dimensions laid out in memory in `order`, outermost first; a copy only if needed.

    Written with permute and contiguous because these, unlike memory formats, work under vmap.
    """
    if not is_batched(a) and is_laid_out(a, order):
        return a
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return a.permute(order).contiguous().permute(inverse)


def is_laid_out(a: Tensor, order: tuple[int, ...]) -> bool:
    """Whether the dimensions of a lie in memory in `order`, without gaps."""
    return remembered(_is_dense, a.shape, a.stride(), order)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...]) -> bool:
    dense = 1
    for d in reversed(order):
        if shape[d] != 1 and strides[d] != dense:
            return False
        dense *= shape[d]
    return True


def memory_order(a: Tensor) -> tuple[int, ...]:
    """The dimensions of a from the outermost in memory to the innermost: NCHW or NHWC, say."""
    return remembered(_order, a.stride())


def _order(strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))


def check_maps(z: Tensor, **per_filter: Tensor | None) -> None:
    """ValueError, with the numbers, unless z is a floating (N, C, *) and the rest (C,) or None."""
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
