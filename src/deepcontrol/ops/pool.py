"""2x2 max pooling with one-byte indices, alone or in a neuron, and the unpooling.

    pooled[n, c, i, j] = max of x[n, c, 2i + dy, 2j + dx]      over dy, dx in {0, 1}
    index[n, c, i, j]  = 2 * dy + dx of that maximum           uint8, where torch uses int64

Two more primitives do the rest: `pick` reads x at the index, `place` writes values there into a map
of zeros.
Pooling is linear for a given index, so its backward is place. Unpooling is place, and its backward
is pick. Each is the adjoint of the other, which gives derivatives of every order, and each saves
only the index.

The formulas in reference.py are slow on a CPU when run op by op. There the eager path uses torch's
own pooling, gather and scatter, and converts between bytes and positions.

`center_bias_act_pool` is the end of an encoder stage, max_pool2x2(center_bias_act(v)). Only the
pooling reads the full map y. Its backward needs act' at the maxima, which follows from the pooled
map: with g the gradient of `pooled`, h = g * act'(pooled) and P the positions of v,

    dv = place(h, index) - lambda * sum(h) / P     dbeta = sum h     dlambda = -sum_s m_s * sum_p h

So y is neither saved nor, on a GPU, written. The stage saves a quarter of it, and one byte per
window.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from . import reference
from .activation import ACTIVATIONS, get_activation
from .agc import center_bias_act, plain_forward
from .dispatch import (
    compiles_with_ops,
    needs_differentiable_backward,
    needs_plain_ops,
    uses_kernels,
)
from .gain_conv import ConvOperands, store_map_sums, stored_map_sums
from .layout import (
    check_maps,
    is_batched,
    is_channels_last,
    like_layout,
    map_sum,
    over_maps,
    positions,
)
from .replay import Replay, replay_of


def max_pool2x2(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each 2x2 window of x and its index in the window.

    As in torch's max_pool2d, an odd last row or column is left out, the first of equal maxima
    counts, and a NaN is larger than any number.

    Args:
        x: Feature maps (N, C, H, W).

    Returns:
        pooled and index, both (N, C, H // 2, W // 2) and in the memory layout of x. The index is
        2 * dy + dx in 0..3, in uint8.

    >>> pooled, index = max_pool2x2(torch.tensor([[[[1.0, 2.0], [5.0, 3.0]]]]))
    >>> pooled.item(), index.item()
    (5.0, 2)
    """
    _check_pool(x)
    if needs_plain_ops():
        return reference.max_pool2x2(x)
    if torch.compiler.is_compiling():
        if not compiles_with_ops():
            return reference.max_pool2x2(x)
        return torch.ops.deepcontrol.max_pool2x2(x)
    return _Pool.apply(x)


def max_unpool2x2(pooled: Tensor, index: Tensor, size: Sequence[int]) -> Tensor:
    """Write each pooled value at its index into zeros (N, C, *size).

    Args:
        pooled: Values (N, C, h, w).
        index: The index of max_pool2x2, uint8 (N, C, h, w).
        size: (H, W) of the map that was pooled: 2h or 2h + 1, and 2w or 2w + 1.

    Returns:
        The map (N, C, H, W) in the memory layout of `pooled`.

    >>> max_unpool2x2(torch.tensor([[[[5.0]]]]), torch.tensor([[[[2]]]], dtype=torch.uint8), (2, 3))
    tensor([[[[0., 0., 0.],
              [5., 0., 0.]]]])
    """
    _check_unpool(pooled, index, size)
    if needs_plain_ops():
        return reference.place2x2(pooled, index, size)
    height, width = size
    if torch.compiler.is_compiling():
        if not compiles_with_ops():
            return reference.place2x2(pooled, index, size)
        last = is_channels_last(pooled)
        return torch.ops.deepcontrol.place2x2(pooled, index, height, width, last)
    unpooled = _Place.apply(pooled, index, height, width, is_channels_last(pooled))
    store_map_sums(unpooled, stored_map_sums(pooled))  # zeros change no sum
    return unpooled


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.last = last = is_channels_last(x)
        pooled, index = run_pool(x, last)
        ctx.size = x.shape[2:]
        ctx.save_for_backward(index)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)  # the index would get a map of zeros
        return pooled, index

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        (index,) = ctx.saved_tensors
        return None if grads[0] is None else place(grads[0], index, ctx.size, ctx.last)


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, last: bool) -> Tensor:
        ctx.size, ctx.last = x.shape[2:], is_channels_last(x)
        ctx.save_for_backward(index)
        return _run_pick(x, index, last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return place(grads[0], index, ctx.size, ctx.last), None, None


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, index: Tensor, height: int, width: int, last: bool
    ) -> Tensor:
        ctx.last = is_channels_last(values)
        ctx.save_for_backward(index)
        return _run_place(values, index, (height, width), last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return pick(grads[0], index, ctx.last), None, None, None, None


# Backward passes call these two. A backward may itself run under a transform, so they check again.


def pick(x: Tensor, index: Tensor, last: bool) -> Tensor:
    """Read x at index. last: whether the result is channels_last."""
    if needs_plain_ops() or is_batched(x):
        return reference.pick2x2(x, index)
    return _Pick.apply(x, index, last)


def place(values: Tensor, index: Tensor, size: Sequence[int], last: bool) -> Tensor:
    """Write values at index into zeros (N, C, *size).

    last: whether the result is channels_last.
    """
    if needs_plain_ops() or is_batched(values):
        return reference.place2x2(values, index, size)
    return _Place.apply(values, index, *size, last)


def run_pool(x: Tensor, last: bool) -> tuple[Tensor, Tensor]:
    """Pool x with the kernels, torch's CPU ops or the formulas."""
    if uses_kernels(x):
        from .triton import pool as kernels

        return _replay(kernels.pool, x, channels_last=last)
    pooled, index = _cpu_pool(x) if x.is_cpu else reference.max_pool2x2(x)
    return as_layout(pooled, last), as_layout(index, last)


def _run_pick(x: Tensor, index: Tensor, last: bool) -> Tensor:
    if uses_kernels(x):
        from .triton import pool as kernels

        return _replay(kernels.pick, x, index, channels_last=last)
    if x.is_cpu:
        return _cpu_pick(x, index, last)
    return as_layout(reference.pick2x2(x, index), last)


def _run_place(values: Tensor, index: Tensor, size: Sequence[int], last: bool) -> Tensor:
    if uses_kernels(values):
        from .triton import pool as kernels

        return _replay(kernels.place, values, index, size=tuple(size), channels_last=last)
    if values.is_cpu:
        return _cpu_place(values, index, size, last)
    return as_layout(reference.place2x2(values, index, size), last)


def _replay(kernel: Callable[..., Any], *maps: Tensor, **options: Any) -> Any:
    key = (kernel, *options.values(), *[b for a in maps for b in (a.shape, a.stride(), a.dtype)])
    make = functools.partial(Replay, functools.partial(kernel, **options))
    return replay_of((*key, maps[0].device), make)(*maps)


def as_layout(a: Tensor, channels_last: bool) -> Tensor:
    """Return a (N, C, H, W) in that layout; the formulas do not always keep it."""
    return like_layout(a, (0, 2, 3, 1) if channels_last else (0, 1, 2, 3))


def _cpu_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    pooled, position = max_pool2d(x, 2, return_indices=True)
    width = x.shape[3]
    # int32 is faster. On a map large enough to overflow it, both operands overflow alike.
    within = position.to(torch.int32).sub_(_first_corners(x.shape[2:], torch.int32))
    below = (within >= 2).view(torch.uint8)  # within is one of 0, 1, width, width + 1
    return pooled, within.sub_(below, alpha=width - 2).to(torch.uint8)


def _cpu_pick(x: Tensor, index: Tensor, channels_last: bool) -> Tensor:
    at = _positions(index, x.shape[2:], channels_last)
    picked = _in_memory_order(x, channels_last).gather(-1, at)
    return _as_maps(picked, index.shape, channels_last)


def _cpu_place(values: Tensor, index: Tensor, size: Sequence[int], channels_last: bool) -> Tensor:
    n, c, _, _ = index.shape
    area = size[0] * size[1]
    flat = values.new_zeros((n, area * c) if channels_last else (n, c, area))
    at = _positions(index, size, channels_last)
    flat.scatter_(-1, at, _in_memory_order(values, channels_last))
    return _as_maps(flat, (n, c, *size), channels_last)


def _positions(index: Tensor, size: Sequence[int], channels_last: bool) -> Tensor:
    """Return the positions of the indexed elements.

    They count along the last dimension of _in_memory_order(x).
    """
    channels, width = index.shape[1], size[1]
    pixel = channels if channels_last else 1  # distance to the next pixel of a row
    steps = torch.tensor([0, 1, width, width + 1], device=index.device) * pixel
    start = _first_corners(size, torch.int64) * pixel
    if channels_last:
        start = start.unsqueeze(-1) + torch.arange(channels)
        index = index.permute(0, 2, 3, 1)
    at = steps.index_select(0, index.flatten().int()).view(index.shape).add_(start)
    return at.flatten(1 if channels_last else 2)


def _first_corners(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the position y * W + x of each window's first element, (H // 2, W // 2)."""
    height, width = size
    rows = torch.arange(height // 2, dtype=dtype).unsqueeze(1)
    return rows * (2 * width) + torch.arange(width // 2, dtype=dtype) * 2


def _in_memory_order(a: Tensor, channels_last: bool) -> Tensor:
    """Flatten a (N, C, H, W) to (N, C, H * W), or (N, H * W * C) for channels_last."""
    return a.permute(0, 2, 3, 1).flatten(1) if channels_last else a.flatten(2)


def _as_maps(flat: Tensor, shape: Sequence[int], channels_last: bool) -> Tensor:
    n, c, h, w = shape
    return flat.view(n, h, w, c).permute(0, 3, 1, 2) if channels_last else flat.view(n, c, h, w)


def _check_pool(x: Tensor) -> None:
    _check_maps(x)
    if x.shape[2] < 2 or x.shape[3] < 2:
        raise ValueError(f"expected maps of at least 2x2, got {x.shape[2]}x{x.shape[3]}")


def _check_unpool(pooled: Tensor, index: Tensor, size: Sequence[int]) -> None:
    _check_maps(pooled)
    if index.dtype != torch.uint8:
        raise ValueError(f"expected an index of torch.uint8, from max_pool2x2, got {index.dtype}")
    if index.shape != pooled.shape or index.device != pooled.device:
        raise ValueError(
            f"expected an index of {tuple(pooled.shape)} on {pooled.device} like the pooled maps, "
            f"got {tuple(index.shape)} on {index.device}"
        )
    height, width = pooled.shape[2:]
    if len(size) != 2 or (size[0] // 2, size[1] // 2) != (height, width):
        raise ValueError(
            f"pooled maps of {height}x{width} come from a size of ({2 * height} or "
            f"{2 * height + 1}, {2 * width} or {2 * width + 1}), got {tuple(size)}"
        )


def _check_maps(x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"expected floating-point maps, got {x.dtype}")
    if x.dim() != 4:
        raise ValueError(f"expected maps (N, C, H, W), got {x.dim()} dimensions: {tuple(x.shape)}")


def center_bias_act_pool(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str = "relu"
) -> tuple[Tensor, Tensor]:
    """Return max_pool2x2(center_bias_act(v, ...)) without storing the full map.

    The backward of SiLU and GELU needs their input, so for them the two ops run one after the
    other.

    Args:
        v: Feature maps (N, C, H, W) of conv(x, gamma W).
        bias: beta, (C,).
        mean_scale: lambda, (C,).
        activation: One of relu, leaky_relu, silu, gelu, none.

    Returns:
        The pooled maps (N, C, H // 2, W // 2) and their index in uint8: see max_pool2x2.

    >>> v = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]])
    >>> pooled, index = center_bias_act_pool(v, bias=torch.zeros(1), mean_scale=torch.ones(1))
    >>> pooled, index
    (tensor([[[[3.]]]]), tensor([[[[3]]]], dtype=torch.uint8))
    """
    act = get_activation(activation)
    check_maps(v, bias=bias, mean_scale=mean_scale)
    if act.needs == "input":
        return max_pool2x2(center_bias_act(v, bias, mean_scale, activation, overwrite=True))
    check_windows(v)
    if needs_plain_ops() or (torch.compiler.is_compiling() and not compiles_with_ops()):
        return reference.max_pool2x2(reference.center_bias_act(v, bias, mean_scale, activation))
    if torch.compiler.is_compiling():
        pooled, index, _ = torch.ops.deepcontrol.center_bias_act_pool(
            v, bias, mean_scale, activation
        )
    else:
        pooled, index, _ = _CenterBiasActPool.apply(v, bias, mean_scale, activation)
    return pooled, index


def check_windows(v: Tensor) -> None:
    """Raise ValueError unless v is (N, C, H, W) of at least 2x2."""
    if v.dim() != 4 or min(v.shape[2:]) < 2:
        raise ValueError(f"expected maps (N, C, H, W) of at least 2x2, got {tuple(v.shape)}")


Forward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


def pool_forward_function(v: Tensor) -> Forward:
    """Return the forward of center_bias_act_pool for v, as agc.forward_function does."""
    if uses_kernels(v):
        from .triton import agc_pool as kernels

        return kernels.forward
    return _plain_forward


def _plain_forward(
    v: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    activation: str,
    consumer_ratio: float = 0.0,
    operands: ConvOperands | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return pooled, index, means (N, C), and None for the map sums of the kernels."""
    y, mean, *_ = plain_forward(v, bias, mean_scale, activation)
    return *run_pool(y, is_channels_last(v)), mean, None


def traced_forward(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pooled, index and the means (N, C) inside a registered op."""
    if uses_kernels(v, traced=True):
        from .triton import agc_pool as kernels

        return kernels.forward(v, bias, mean_scale, activation, traced=True)[:3]
    y, mean, *_ = plain_forward(v, bias, mean_scale, activation)
    pooled, index = reference.max_pool2x2(y)
    last = is_channels_last(v)
    return as_layout(pooled, last), as_layout(index, last), mean


def pool_backward(
    g: Tensor,
    pooled: Tensor | None,
    index: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    mean: Tensor,
    size: tuple[int, int],
    activation: str,
    channels_last: bool,
    grad_mean: Tensor | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dv, dbias and dmean_scale.

    The plain form is differentiable, as in agc.center_backward.

    Args:
        pooled: The pooled maps, if the activation needs its output.
        size: (H, W) of v.
        channels_last: The layout of v.
    """
    plain = not traced and needs_differentiable_backward(g, grad_mean)
    if not plain and uses_kernels(g, traced):
        from .triton import agc_pool as kernels

        return kernels.backward(
            g, pooled, index, bias, mean_scale, mean, size, activation, channels_last, traced=traced
        )
    h = ACTIVATIONS[activation].backward(g, pooled)  # type: ignore[arg-type]
    sum_h = map_sum(h)
    background = mean_scale * sum_h
    if grad_mean is not None:
        background = background - grad_mean
    placed = place(h, index, size, channels_last)
    dv = (placed - over_maps(background / positions(placed), placed)).to(g.dtype)
    dbias = sum_h.sum(0).to(bias.dtype)
    dscale = -(mean * sum_h).sum(0).to(mean_scale.dtype)
    return dv, dbias, dscale


def saved_pooled(activation: str, pooled: Tensor) -> Tensor | None:
    """Return the pooled maps if the backward needs them."""
    return pooled if ACTIVATIONS[activation].needs == "output" else None


class _CenterBiasActPool(torch.autograd.Function):
    """Return pooled, index and the mean.

    The mean is an output only so that second derivatives reach it.
    """

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        pooled, index, mean, _ = pool_forward_function(v)(v, bias, mean_scale, activation)
        ctx.save_for_backward(saved_pooled(activation, pooled), index, bias, mean_scale, mean)
        ctx.mark_non_differentiable(index)
        ctx.activation, ctx.size, ctx.last = activation, tuple(v.shape[2:]), is_channels_last(v)
        ctx.set_materialize_grads(False)
        return pooled, index, mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, _, grad_mean = grads
        pooled, index, bias, mean_scale, mean = ctx.saved_tensors
        if g is None:
            g = bias.new_zeros(index.shape) if pooled is None else torch.zeros_like(pooled)
        grads_in = pool_backward(
            g, pooled, index, bias, mean_scale, mean, ctx.size, ctx.activation, ctx.last, grad_mean
        )
        return *grads_in, None
