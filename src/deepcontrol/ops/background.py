"""Background estimators for Eq. 1 in place of the map's mean.

    y = act( gamma * (z - lambda * b(z)) + beta )

The paper names a sliding-window mean, the median "or indeed any arbitrary background signal level
estimation". An estimator is a callable from maps z (N, C, *) to a tensor that broadcasts to z:

    WindowMean(size)        mean over the window around each position, clipped at the borders
    Quantile(q)             quantile of each map; Quantile(0.5) is the median
    TrimmedMean(fraction)   mean of each map without its lowest and highest values

All are differentiable. The window mean is linear: its adjoint is a window sum of g / count, so
nothing is saved for it. The backward of the whole neuron needs the ReLU mask and, for the gradient
of lambda,

    dlambda = -sum h * b(z) = -sum z * b'(h)        h = g * act'(u), b' the adjoint

the map z. It is saved only if lambda (or a separate gamma) is trained.

On a GPU the window mean, Eq. 1 and the activation are one pass over the maps per dimension
(triton/window.py). Elsewhere b is a tensor, and autograd differentiates Eq. 1. Sums run in fp32 for
half types.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .activation import ACTIVATIONS, get_activation, unpack_relu_mask
from .agc import saved_map
from .dispatch import (
    needs_differentiable_backward,
    needs_plain_ops,
    unwrap_if_dead,
    uses_kernels,
)
from .layout import (
    accumulate_dtype,
    check_maps,
    like_layout,
    map_sum,
    memory_order,
    over_maps,
    positions,
)

Estimator = Callable[[Tensor], Tensor]
Background = Estimator | Literal["mean", "median"]

Spans = tuple[tuple[int, int], ...]  # (before, after) for each spatial dimension


@dataclass(frozen=True)
class WindowMean:
    """The mean over a sliding window: a background that varies over the map.

    The window is clipped at the borders, and its sum is divided by the number of positions that
    lie on the map. Running sums make the cost independent of its size. A window that covers the
    whole map from every position gives the map's mean.

    Args:
        size: Window in positions, one number or one per spatial dimension. An even window reaches
            one position further to the end.

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, section 2.

    >>> WindowMean(3)(torch.tensor([[[0.0, 3.0, 6.0, 0.0]]]))
    tensor([[[1.5000, 3.0000, 3.0000, 3.0000]]])
    """

    size: int | tuple[int, ...]

    homogeneous = True  # b(a z) = a b(z) for every number a

    def __post_init__(self) -> None:
        sizes = self.size if isinstance(self.size, (tuple, list)) else (self.size,)
        if not sizes or any(not isinstance(s, int) or s < 1 for s in sizes):
            raise ValueError(f"a window needs 1 or more positions per dimension, got {self.size}")
        if isinstance(self.size, list):
            object.__setattr__(self, "size", tuple(self.size))

    def spans(self, dims: int) -> Spans:
        """Return the positions before and after the center, for each spatial dimension."""
        sizes = self.size if isinstance(self.size, tuple) else (self.size,) * dims
        if len(sizes) != dims:
            raise ValueError(
                f"{self!r} has {len(sizes)} sizes, but the maps have {dims} spatial dimensions"
            )
        return tuple(((s - 1) // 2, s // 2) for s in sizes)

    def __call__(self, z: Tensor) -> Tensor:
        """Return the window means of z (N, C, *), of the same shape; fp32 for half types."""
        if z.dim() not in (3, 4, 5):
            raise ValueError(
                f"a window needs maps of 1 to 3 spatial dimensions, got {tuple(z.shape)}"
            )
        spans = self.spans(z.dim() - 2)
        if torch.compiler.is_compiling() or needs_plain_ops():
            return reference.window_mean(z, spans)
        return _WindowMean.apply(unwrap_if_dead(z), spans, False)


@dataclass(frozen=True)
class Quantile:
    """A quantile of each map; 0.5 is the median.

    Between two ranks it is interpolated linearly, as in torch.quantile. The gradient goes to the
    elements of these ranks. Elements of equal value share the gradient of their rank equally.

    Args:
        q: From 0 (the minimum) to 1 (the maximum).

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, section 2 (the median).

    >>> Quantile(0.5)(torch.tensor([[[1.0, 5.0, 2.0]]]))
    tensor([[[2.]]])
    """

    q: float

    def __post_init__(self) -> None:
        if not 0 <= self.q <= 1:
            raise ValueError(f"a quantile lies between 0 and 1, got {self.q}")

    @property
    def homogeneous(self) -> bool:
        """Whether b(a z) = a b(z) for every number a: a negative one reverses the order."""
        return self.q == 0.5

    def __call__(self, z: Tensor) -> Tensor:
        """Return the quantiles of z (N, C, *) as (N, C, 1, ...); fp32 for half types."""
        flat = _flat_maps(z)
        last = flat.shape[2] - 1
        rank = self.q * last
        lower = math.floor(rank)
        value = _ranked(flat, lower)
        # A branch on the rank would fix the size of maps in a compiled model.
        if torch.compiler.is_compiling() or rank > lower:
            above = _ranked(flat, torch.sym_min(lower + 1, last))
            value = value + (rank - lower) * (above - value)
        return over_maps(value, z)


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of each map without its lowest and highest values.

    Of P positions, the floor(fraction * P) lowest and as many of the highest are left out. The
    others share the gradient equally. Elements of equal value at a threshold share that of the ones
    that stay.

    Args:
        fraction: Share left out at each end, from 0 (the mean) to less than 0.5.

    >>> TrimmedMean(0.25)(torch.tensor([[[1.0, 2.0, 4.0, 90.0]]]))
    tensor([[[3.]]])
    """

    fraction: float

    homogeneous = True

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 0.5:
            raise ValueError(f"fraction must be at least 0 and below 0.5, got {self.fraction}")

    def __call__(self, z: Tensor) -> Tensor:
        """Return the trimmed means of z (N, C, *) as (N, C, 1, ...); fp32 for half types."""
        flat = _flat_maps(z)
        positions = flat.shape[2]
        cut = math.floor(self.fraction * positions)
        kept = positions - 2 * cut
        with torch.no_grad():
            low, high = (_kth(flat, rank) for rank in (cut, positions - 1 - cut))
            between = (flat > low) & (flat < high)
            # Elements at the lower threshold that stay; the rest of the kept ones are at the upper.
            at_low = ((flat <= low).sum(2) - cut).clamp(max=kept)
            at_high = kept - between.sum(2) - at_low
        total = torch.where(between, flat, 0).sum(2)
        total = total + at_low * _mean_of_ties(flat, low) + at_high * _mean_of_ties(flat, high)
        return over_maps(total / kept, z)


def _flat_maps(z: Tensor) -> Tensor:
    """Return z (N, C, *) as (N, C, positions), in the accumulation dtype."""
    check_maps(z)
    return z.to(accumulate_dtype(z.dtype)).reshape(*z.shape[:2], positions(z))


def _kth(flat: Tensor, rank: int) -> Tensor:
    """Return the value of that rank, from 0 on, in each map: (N, C, 1)."""
    if flat.is_cuda and torch.are_deterministic_algorithms_enabled():
        # torch refuses kthvalue then, because of its indices, which are not used here.
        return flat.sort(2).values.narrow(2, rank, 1)
    # kthvalue has no limit on the size of a map; torch.quantile fails above 2^24 elements.
    return torch.kthvalue(flat, rank + 1, 2, keepdim=True).values


def _ranked(flat: Tensor, rank: int) -> Tensor:
    """Return the value of a rank in each map, (N, C); ties share its gradient."""
    with torch.no_grad():
        value = _kth(flat, rank)
    return _mean_of_ties(flat, value)


def _mean_of_ties(flat: Tensor, value: Tensor) -> Tensor:
    """Return `value` (N, C, 1) as the mean of the elements that have it, (N, C)."""
    with torch.no_grad():
        ties = flat == value
        count = ties.sum(2).clamp(min=1)  # a NaN equals nothing
    mean = torch.where(ties, flat, 0).sum(2) / count
    # The sum of many equal numbers is rounded; `value` is not.
    return mean + (value.squeeze(2) - mean.detach())


def check_background(background: Background) -> Estimator | Literal["mean"]:
    """Return "mean" or an estimator; raise ValueError for anything else.

    >>> check_background("mean"), check_background("median")
    ('mean', Quantile(q=0.5))
    """
    if isinstance(background, str):
        if background == "mean":
            return "mean"
        if background == "median":
            return Quantile(0.5)
    elif callable(background) and not isinstance(background, type):
        return background
    raise ValueError(
        f"unknown background {background!r}: expected 'mean', 'median', WindowMean(size), "
        "Quantile(q), TrimmedMean(fraction), or a function from maps (N, C, *) to a tensor that "
        "broadcasts to them"
    )


def is_homogeneous(background: Background) -> bool:
    """Return whether b(a z) = a b(z) for every a: gamma may then go into the filters."""
    estimator = check_background(background)
    return estimator == "mean" or bool(getattr(estimator, "homogeneous", False))


def subtract_background(
    z: Tensor,
    background: Estimator,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean_scale: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """Return act(gamma * (z - lambda * b(z)) + beta) for an estimator b.

    Args:
        z: Feature maps (N, C, *).
        background: The estimator. Its result must broadcast to z.
        weight: gamma, (C,); None means 1.
        bias: beta, (C,); None means 0.
        mean_scale: lambda, (C,); None means 1.
        activation: One of relu, leaky_relu, silu, gelu, none.

    Returns:
        y, with the shape and dtype of z.

    >>> z = torch.tensor([[[1.0, 2.0, 6.0]]])
    >>> subtract_background(z, Quantile(0.5))
    tensor([[[-1.,  0.,  4.]]])
    """
    act = get_activation(activation)
    check_maps(z, weight=weight, bias=bias, mean_scale=mean_scale)
    if isinstance(background, WindowMean) and act.needs != "input" and _runs_kernels(z):
        spans = background.spans(z.dim() - 2)
        return _WindowNeuron.apply(z, weight, bias, mean_scale, spans, activation)
    b = background(z)
    if not isinstance(b, Tensor) or not _broadcasts(b, z):
        got = tuple(b.shape) if isinstance(b, Tensor) else type(b).__name__
        raise ValueError(
            f"the background must be a tensor that broadcasts to {tuple(z.shape)}, got {got}"
        )
    if activation == "relu":
        # After rounding, which gives the same values: autograd saves the rounded output, which the
        # next convolution saves too.
        y = reference.subtract_background(z, b, weight, bias, mean_scale, "none")
        return torch.relu(y)
    return reference.subtract_background(z, b, weight, bias, mean_scale, activation)


def _broadcasts(b: Tensor, z: Tensor) -> bool:
    sizes = zip(reversed(b.shape), reversed(z.shape), strict=False)
    return b.dim() <= z.dim() and all(m == 1 or m == n for m, n in sizes)


def _runs_kernels(z: Tensor) -> bool:
    if torch.compiler.is_compiling() or needs_plain_ops() or z.dim() not in (3, 4, 5):
        return False
    return uses_kernels(z) and z.numel() < 2**31  # the kernels count in 32 bits


def window_mean(z: Tensor, spans: Spans, adjoint: bool = False) -> Tensor:
    """Return the window means of z, or their adjoint, by running sums.

    See reference.window_mean.
    """
    if _runs_kernels(z):
        from .triton import window as kernels

        return kernels.window_mean(z, spans, adjoint)
    total = z.to(accumulate_dtype(z.dtype))
    for dim, (before, after) in enumerate(spans):
        count = reference.window_counts(z, dim, before, after)
        if adjoint:  # position q reads p in its window: p - before <= q <= p + after
            total = running_sums(total / count, 2 + dim, after, before)
        else:
            total = running_sums(total, 2 + dim, before, after) / count
    return total


def running_sums(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Sum x over the clipped window around each position of one dimension.

    Running sums that restart at every window length: a window is the end of one block and the start
    of the next one. Nothing is subtracted, so nothing cancels.
    """
    length = x.shape[dim]
    before, after = min(before, length - 1), min(after, length - 1)
    size = before + after + 1
    if size == 1:
        return x
    blocks = -(-(length + size - 1) // size)
    rows = functional.pad(x.movedim(dim, -1), (before, blocks * size - length - before))
    rows = rows.unflatten(-1, (blocks, size))
    starts = rows.cumsum(-1).flatten(-2)[..., size - 1 : size - 1 + length]
    ends = rows.flip(-1).cumsum(-1).flip(-1).flatten(-2)[..., :length]
    whole_block = torch.arange(length, device=x.device) % size == 0  # in both sums
    return (starts + ends.masked_fill(whole_block, 0)).movedim(-1, dim)


class _WindowMean(torch.autograd.Function):
    """(z, spans, adjoint): the window means or their adjoint. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, spans: Spans, adjoint: bool) -> Tensor:
        ctx.spans, ctx.adjoint, ctx.dtype = spans, adjoint, z.dtype
        return window_mean(z, spans, adjoint)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        return _WindowMean.apply(g, ctx.spans, not ctx.adjoint).to(ctx.dtype), None, None


class _WindowNeuron(torch.autograd.Function):
    """Eq. 1 with a window mean, and the activation, by the kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean_scale: Tensor | None,
        spans: Spans,
        activation: str,
    ) -> Tensor:
        from .triton import window as kernels

        training = any(ctx.needs_input_grad)
        y, mask = kernels.forward(z, weight, bias, mean_scale, spans, activation, training)
        needs_z = ctx.needs_input_grad[1] or ctx.needs_input_grad[3]
        saved = saved_map(activation, z, y, mask)
        ctx.save_for_backward(z if needs_z else None, weight, bias, mean_scale, saved)
        ctx.spans, ctx.activation, ctx.order = spans, activation, memory_order(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g = like_layout(grads[0], ctx.order)
        arguments = (g, *ctx.saved_tensors, ctx.spans, ctx.activation)
        if needs_differentiable_backward(g) or not uses_kernels(g):
            return *window_backward(*arguments), None, None
        from .triton import window as kernels

        return *kernels.backward(*arguments), None, None


def window_backward(
    g: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_scale: Tensor | None,
    saved: Tensor | None,
    spans: Sequence[tuple[int, int]],
    activation: str,
) -> tuple[Tensor | None, ...]:
    """Return dz, dweight, dbias and dmean_scale in plain, differentiable PyTorch.

        a = adjoint(h)      dz = gamma * (h - lambda * a)      dbeta = sum h
        dgamma = sum z * (h - lambda * a)      dlambda = -gamma * sum z * a

    Args:
        g: Gradient of y.
        z: The maps, or None if neither gamma nor lambda needs a gradient.
        saved: y, its ReLU mask, or None for activation="none".
    """
    if saved is not None and saved.dtype == torch.uint8:
        saved = unpack_relu_mask(saved, g)
    h = ACTIVATIONS[activation].backward(g, saved)  # type: ignore[arg-type]
    h = h.to(accumulate_dtype(h.dtype))
    a = _WindowMean.apply(h, spans, True)
    centered = h - (a if mean_scale is None else over_maps(mean_scale, g) * a)
    dz = centered if weight is None else over_maps(weight, g) * centered
    dweight = dscale = None
    if z is not None and weight is not None:
        dweight = map_sum(z * centered).sum(0).to(weight.dtype)
    if z is not None and mean_scale is not None:
        dscale = -map_sum(z * a).sum(0)
        dscale = (dscale if weight is None else weight * dscale).to(mean_scale.dtype)
    dbias = None if bias is None else map_sum(h).sum(0).to(bias.dtype)
    return dz.to(g.dtype), dweight, dbias, dscale
