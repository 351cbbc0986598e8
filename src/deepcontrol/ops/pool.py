"""2x2 max pooling that remembers its maxima in one byte each, and the unpooling that reads them.

    pooled[n, c, i, j] = max of x[n, c, 2i + dy, 2j + dx]      over dy, dx in {0, 1}
    index[n, c, i, j]  = 2 * dy + dx of that maximum           uint8, where torch keeps int64

Two more primitives do the rest: `pick` reads x at the index, `place` writes values there into a map
of zeros. Pooling is linear once the index is known, so its backward is place; unpooling is place,
and its backward is pick. Each is the other's adjoint, which gives derivatives of every order, and
each keeps for its backward the bytes of the index and no map.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import pool_plain as plain
from .backend import takes_kernels
from .tracing import compiles_with_ops, is_batched, wants_plain_ops
from .window_mean import leave_totals, totals_left


def max_pool2x2(x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each 2x2 window of x (N, C, H, W), and which of the four it was.

    Both are (N, C, H // 2, W // 2) and laid out in memory as x is: contiguous or channels_last. The
    index is 2 * dy + dx in 0..3, in uint8. As in torch's max_pool2d, an odd last row or column is
    left out, the first of equal maxima counts, and a NaN is larger than anything.

    >>> pooled, index = max_pool2x2(torch.tensor([[[[1.0, 2.0], [5.0, 3.0]]]]))
    >>> pooled.item(), index.item()
    (5.0, 2)
    """
    _check_pool(x)
    if wants_plain_ops():
        return plain.pool(x)
    if torch.compiler.is_compiling():
        return torch.ops.deepcontrol.max_pool2x2(x) if compiles_with_ops() else plain.pool(x)
    return _Pool.apply(x)


def max_unpool2x2(pooled: Tensor, index: Tensor, size: Sequence[int]) -> Tensor:
    """The map (N, C, *size) with each pooled value where max_pool2x2's index says, zeros elsewhere.

    size (H, W) is that of the map that was pooled: twice the pooled size, or one more. The result
    is laid out in memory as `pooled` is.

    >>> max_unpool2x2(torch.tensor([[[[5.0]]]]), torch.tensor([[[[2]]]], dtype=torch.uint8), (2, 3))
    tensor([[[[0., 0., 0.],
              [5., 0., 0.]]]])
    """
    _check_unpool(pooled, index, size)
    if wants_plain_ops():
        return plain.place(pooled, index, size)
    height, width = size
    if torch.compiler.is_compiling():
        if not compiles_with_ops():
            return plain.place(pooled, index, size)
        last = is_channels_last(pooled)
        return torch.ops.deepcontrol.place2x2(pooled, index, height, width, last)
    unpooled = _Place.apply(pooled, index, height, width, is_channels_last(pooled))
    leave_totals(unpooled, totals_left(pooled))  # zeros change no sum
    return unpooled


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of a pixel are x's neighbors in memory; by strides, so also for 1x1."""
    _, channel, row, column = x.stride()
    return 0 < channel < column and channel < row


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.last = last = is_channels_last(x)
        pooled, index = run_pool(x, last)
        ctx.size = x.shape[2:]
        ctx.save_for_backward(index)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)  # the index's would be a map of zeros
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


# What a backward calls. It may itself run under a transform, so it asks again.


def pick(x: Tensor, index: Tensor, last: bool) -> Tensor:
    if wants_plain_ops() or is_batched(x):
        return plain.pick(x, index)
    return _Pick.apply(x, index, last)


def place(values: Tensor, index: Tensor, size: Sequence[int], last: bool) -> Tensor:
    if wants_plain_ops() or is_batched(values):
        return plain.place(values, index, size)
    return _Place.apply(values, index, *size, last)


# What runs in the end: the kernels, torch's own ops on a CPU, or the formulas.


def run_pool(x: Tensor, last: bool) -> tuple[Tensor, Tensor]:
    if takes_kernels(x):
        from .kernels import pool as kernels

        return kernels.pool(x, last)
    pooled, index = plain.cpu_pool(x) if x.is_cpu else plain.pool(x)
    return plain.laid_out(pooled, last), plain.laid_out(index, last)


def _run_pick(x: Tensor, index: Tensor, last: bool) -> Tensor:
    if takes_kernels(x):
        from .kernels import pool as kernels

        return kernels.pick(x, index, last)
    if x.is_cpu:
        return plain.cpu_pick(x, index, last)
    return plain.laid_out(plain.pick(x, index), last)


def _run_place(values: Tensor, index: Tensor, size: Sequence[int], last: bool) -> Tensor:
    if takes_kernels(values):
        from .kernels import pool as kernels

        return kernels.place(values, index, size, last)
    if values.is_cpu:
        return plain.cpu_place(values, index, size, last)
    return plain.laid_out(plain.place(values, index, size), last)


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
