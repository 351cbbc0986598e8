"""Eq. 1 and 2x2 pooling in plain PyTorch: the specification of every op.

    y = gamma * (z - lambda * mean(z)) + beta            mean over the map, per sample and filter

Imports only torch and registers nothing. Autograd differentiates these functions to any order,
torch.export traces them, and in fp64 they are the oracle of the tests.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

LEAKY_SLOPE = 0.01  # the default of torch.nn.LeakyReLU
SMALLEST_SQUARE = 2.0**-126  # lower bound of |W|^2: the smallest normal number in fp32

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": lambda u: functional.leaky_relu(u, LEAKY_SLOPE),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "none": lambda u: u,
}


class FilterNorm(NamedTuple):
    """Normalization of each filter before the gain.

        c W / |W|        or, centered,        c (W - mean(W)) / |W - mean(W)|

    The first is weight normalization, the second weight standardization. |W| is the Euclidean norm
    of a filter and mean(W) the mean of its weights.

    Attributes:
        norm: c, the norm that each filter is scaled to; positive.
        centered: Whether the mean of its weights is subtracted first.
    """

    norm: float
    centered: bool = False


def agc(z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor) -> Tensor:
    """Apply Eq. 1 to feature maps z (N, C, *).

    weight (gamma), bias (beta) and mean_scale (lambda) are (C,).
    """
    gamma, beta, lam = weight, bias, mean_scale
    centered = z.to(_wide(z.dtype)) - _over_maps(lam * _mean(z), z)
    return (_over_maps(gamma, z) * centered + _over_maps(beta, z)).to(z.dtype)


def center_bias_act(v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str) -> Tensor:
    """Return act(v - lambda * mean(v) + beta): Eq. 1 for v = conv(x, gamma W)."""
    beta, lam = bias, mean_scale
    centered = v.to(_wide(v.dtype)) - _over_maps(lam * _mean(v), v)
    return ACTIVATIONS[activation](centered + _over_maps(beta, v)).to(v.dtype)


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
    """Return conv(x, V) for 1 to 3 spatial dimensions; for V see scaled_filters."""
    filters = scaled_filters(weight, gain, x.dtype, filter_norm)
    return conv(x, filters, stride, padding, dilation, groups)


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
    """Return conv_transpose(x, V), with W and V of shape (C_in, C_out / groups, *)."""
    filters = scaled_filters(swap_channels(weight, groups), gain, x.dtype, filter_norm)
    filters = swap_channels(filters, groups)
    return torch.convolution(
        x, filters, None, stride, padding, dilation, True, output_padding, groups
    )


def swap_channels(weight: Tensor, groups: int) -> Tensor:
    """Return a transposed convolution's filters in a convolution's order, or back.

    (C_in, C_out / groups, *) <-> (C_out, C_in / groups, *); a view if there is one group.
    """
    if groups == 1:
        return weight.transpose(0, 1)
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def conv(
    x: Tensor,
    filters: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve x with filters in 1 to 3 dimensions, without a bias."""
    no_output_padding = [0] * len(stride)
    return torch.convolution(
        x, filters, None, stride, padding, dilation, False, no_output_padding, groups
    )


def scaled_filters(
    weight: Tensor, gain: Tensor, dtype: torch.dtype, filter_norm: FilterNorm | None = None
) -> Tensor:
    """Return V = gamma W, rounded once to the dtype of the convolution.

    With a filter_norm, W is normalized first (see FilterNorm).
    """
    if filter_norm is not None:
        weight = weight.to(_wide(weight.dtype))
        if filter_norm.centered:
            weight = weight - filter_mean(weight)
        gain = gain * norm_scale(weight, filter_norm.norm)
    return (weight * over_filter(gain, weight)).to(dtype)


def scaled_filters_backward(
    weight: Tensor, gain: Tensor, dscaled: Tensor, filter_norm: FilterNorm | None = None
) -> tuple[Tensor, Tensor]:
    """Return dW and dgamma for the gradient dV of the scaled filters.

    Without a filter_norm, dW = gamma dV and dgamma = <W, dV> over each filter. With a filter_norm c
    and s = c / |W|,

        dW = gamma s (dV - W <W, dV> / |W|^2)        dgamma = s <W, dV>

    Centered filters have W - mean(W) in place of W, and the mean of dW is subtracted.
    """
    wide = weight.to(_wide(weight.dtype))
    if filter_norm is not None and filter_norm.centered:
        wide = wide - filter_mean(wide)
    products = (wide * dscaled).sum(tuple(range(1, weight.dim())))
    if filter_norm is None:
        return scaled_filters(dscaled, gain, weight.dtype), products.to(gain.dtype)
    square = square_norm(wide, filter_norm.norm)
    scale = filter_norm.norm * square.rsqrt()
    # The gradient of a direction is orthogonal to it: the norm of W has no effect.
    orthogonal = dscaled - wide * over_filter(products / square, weight)
    if filter_norm.centered:
        orthogonal = orthogonal - filter_mean(orthogonal)
    dweight = scaled_filters(orthogonal, gain * scale, weight.dtype)
    return dweight, (scale * products).to(gain.dtype)


def normalized_filters(weight: Tensor, filter_norm: FilterNorm) -> Tensor:
    """Return the filters W (C_out, ...), normalized as FilterNorm says."""
    if filter_norm.centered:
        weight = weight - filter_mean(weight)
    return weight * over_filter(norm_scale(weight, filter_norm.norm), weight)


def filter_mean(weight: Tensor) -> Tensor:
    """Return the mean of each filter of W (C_out, ...), (C_out, 1, ...)."""
    return weight.mean(tuple(range(1, weight.dim())), keepdim=True)


def square_norm(weight: Tensor, norm: float) -> Tensor:
    """Return |W|^2 of each filter of W (C_out, ...), or norm^2 for a filter of zeros.

    A filter of zeros has no direction. It is not normalized, which is finite and lets it learn.
    """
    square = weight.square().sum(tuple(range(1, weight.dim())))
    return square.masked_fill(square < SMALLEST_SQUARE, norm * norm)


def norm_scale(weight: Tensor, norm: float) -> Tensor:
    """Return the factor (C_out,) that brings each filter of W (C_out, ...) to a norm."""
    return norm * square_norm(weight, norm).rsqrt()


def over_filter(a: Tensor, weight: Tensor) -> Tensor:
    """View a (C_out,) so that it broadcasts over the filters W (C_out, ...)."""
    return a.reshape(-1, *(1,) * (weight.dim() - 1))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp32 for half types.

    A bf16 sum of ones stops growing at 256.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _mean(z: Tensor) -> Tensor:
    if z.dim() == 2:  # torch reads "no dimensions" as "all dimensions"
        return z.to(_wide(z.dtype))
    return z.mean(tuple(range(2, z.dim())), dtype=_wide(z.dtype))


def _over_maps(a: Tensor, z: Tensor) -> Tensor:
    return a.reshape(a.shape + (1,) * (z.dim() - 2))


def subtract_background(
    z: Tensor,
    background: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_scale: Tensor | None,
    activation: str,
) -> Tensor:
    """Return act(gamma * (z - lambda * b) + beta): Eq. 1 with any background b.

    b broadcasts to z (N, C, *). None means gamma 1, beta 0 and lambda 1.
    """
    if mean_scale is not None:
        background = _over_maps(mean_scale, z) * background
    u = z.to(_wide(z.dtype)) - background
    if weight is not None:
        u = _over_maps(weight, z) * u
    if bias is not None:
        u = u + _over_maps(bias, z)
    return ACTIVATIONS[activation](u).to(z.dtype)


def window_mean(z: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Average z (N, C, *) over the window around each position, clipped at borders.

    spans has (before, after) for each spatial dimension: the window of position p reaches from
    p - before to p + after. The sum is divided by the number of positions that lie on the map.
    """
    dims = z.dim() - 2
    pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[dims - 1]
    mean = z.to(_wide(z.dtype))
    for i, (before, after) in enumerate(spans):
        size = before + after + 1
        kernel = [size if j == i else 1 for j in range(dims)]
        pad = [n for j in reversed(range(dims)) for n in ((before, after) if j == i else (0, 0))]
        total = size * pool(functional.pad(mean, pad), kernel, 1)
        mean = total / window_counts(z, i, before, after)
    return mean


def window_counts(z: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Count the positions of each clipped window along dim; broadcasts to z."""
    length = z.shape[2 + dim]
    p = torch.arange(length, device=z.device)
    count = (p + after).clamp(max=length - 1) - (p - before).clamp(min=0) + 1
    return count.to(_wide(z.dtype)).reshape(-1, *(1,) * (z.dim() - 3 - dim))


# 2x2 max pooling: x is (N, C, H, W); index is uint8 (N, C, H // 2, W // 2), 2 * dy + dx. These
# select elements with torch.where, so that autograd, torch.export and vmap handle them and a
# compiler fuses each into one loop.


def max_pool2x2(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each 2x2 window's maximum and its index: first maximum, or last NaN."""
    a, b, c, d = _corners(x)
    above, right_above = _larger(a, b)
    below, right_below = _larger(c, d)
    largest, lower = _larger(above, below)
    index = torch.where(lower, right_below.to(torch.uint8) + 2, right_above.to(torch.uint8))
    return largest, index


def pick2x2(x: Tensor, index: Tensor) -> Tensor:
    """Return the element of each window of x at `index`."""
    a, b, c, d = _corners(x)
    right = (index & 1).bool()
    return torch.where(index >= 2, torch.where(right, d, c), torch.where(right, b, a))


def place2x2(values: Tensor, index: Tensor, size: Sequence[int]) -> Tensor:
    """Write each value at `index` of its window into zeros (N, C, *size)."""
    rows, dy = _windows(size[0], index.shape[-2], index)
    columns, dx = _windows(size[1], index.shape[-1], index)
    # Gathered per output element, so that a compiler writes the map in one loop.
    chosen, value = (a.index_select(-2, rows).index_select(-1, columns) for a in (index, values))
    return torch.where(chosen == 2 * dy.unsqueeze(-1) + dx, value, 0)


def _windows(size: int, windows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the window of each of `size` positions and the offset in it.

    An odd last position belongs to no window. Its offset is 4, which no index equals.
    """
    position = torch.arange(size, device=like.device)
    offset = torch.where(position < 2 * windows, position % 2, 4)
    return (position // 2).clamp(max=windows - 1), offset


def _corners(x: Tensor) -> list[Tensor]:
    """Return x at (dy, dx) of each window: (0, 0), (0, 1), (1, 0), (1, 1)."""
    height, width = x.shape[-2:]
    # With these slice bounds torch.export can prove that all four have the same size.
    return [
        x[..., dy : height - 1 + dy : 2, dx : width - 1 + dx : 2] for dy in (0, 1) for dx in (0, 1)
    ]


def _larger(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the larger value and whether it is the second one.

    torch.maximum is no substitute: it may return -0 for max(0, -0).
    """
    later = (second > first) | second.isnan()
    return torch.where(later, second, first), later
