"""The mean of a convolution's output, known from its input alone.

    mean of conv(x, V)[o] over the P output positions = sum over c, k of V[o, c, k] S[c, k] / P

S[c, k] is the sum of x over all that the kernel's tap k sees as the kernel moves. It is separable:
each dimension is summed by itself, the outermost first, so that only the first sum reads all of x.
With stride 1 a tap sees everything but a few rows at the borders: the sum of all, less those.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.layout import accumulate_dtype

# Borders up to here are sliced off. Wider ones (large dilations) are masked, since a slice would
# make torch.export demand maps that are larger than the border.
_SLICED = 2


def window_means(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """S / P of x (N, C, *): (N, C, *kernel_size), in fp32 for half types; padding is with zeros.

    What a convolution makes of this one window is the mean of what it makes of x.
    """
    count: list[int] = []
    for i, geometry in enumerate(zip(kernel_size, stride, padding, dilation, strict=True)):
        kernel, step, zeros, spacing = geometry
        # Before x is summed over that dimension: how often the kernel fits there.
        fits = (x.shape[2 + i] + 2 * zeros - spacing * (kernel - 1) - 1) // step + 1
        count.append(fits)
        heads = [max(0, tap * spacing - zeros) for tap in range(kernel)]
        tails = [max(0, (kernel - 1 - tap) * spacing - zeros) for tap in range(kernel)]
        if kernel == 1:  # sees every step-th position, up to the last
            seen = x[(slice(None),) * (2 + i) + (slice(-zeros % step, None, step),)]
            x = seen.sum(2 + i, keepdim=True, dtype=accumulate_dtype(x.dtype))
        elif step == 1 and max(heads + tails) <= _SLICED:
            x = _all_but_borders(x, 2 + i, heads, tails)
        else:
            x = _masked_sums(x, 2 + i, geometry, fits)
    return x / math.prod(count)


def _all_but_borders(x: Tensor, dim: int, heads: list[int], tails: list[int]) -> Tensor:
    """Sums over dim without its first `head` and last `tail` positions, one for each tap."""
    dtype = accumulate_dtype(x.dtype)
    before = (slice(None),) * dim
    everything = x.sum(dim, keepdim=True, dtype=dtype)
    taps = []
    for head, tail in zip(heads, tails, strict=True):
        seen = everything
        if head:
            seen = seen - x[(*before, slice(0, head))].sum(dim, keepdim=True, dtype=dtype)
        if tail:
            seen = seen - x[(*before, slice(-tail, None))].sum(dim, keepdim=True, dtype=dtype)
        taps.append(seen)
    return torch.cat(taps, dim)


def _masked_sums(x: Tensor, dim: int, geometry: tuple[int, ...], fits: int) -> Tensor:
    """Sums over dim of what each tap sees, by a product with zeros and ones."""
    kernel, step, zeros, spacing = geometry
    dtype = accumulate_dtype(x.dtype)
    position = torch.arange(x.shape[dim], device=x.device)
    first = torch.arange(kernel, device=x.device).unsqueeze(1) * spacing - zeros
    ahead = position - first  # of the first position that the tap sees, (kernel, positions)
    seen = (ahead >= 0) & (ahead < fits * step) & (ahead % step == 0)
    rest = x.shape[dim + 1 :]
    flat = x.to(dtype).reshape(*x.shape[: dim + 1], math.prod(rest))
    return torch.matmul(seen.to(dtype), flat).reshape(*x.shape[:dim], kernel, *rest)
