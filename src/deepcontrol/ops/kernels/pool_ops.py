"""2x2 pooling as torch.compile sees it: three ops that open into kernel launches or formulas.

Beside the kernels and not in ops/pool.py, because to register them is to import Triton.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from .. import pool_plain as plain
from ..backend import why_plain
from ..pool import is_channels_last
from .pool import empty_maps
from .pool import pick as launch_pick
from .pool import place as launch_place
from .pool import pool as launch_pool


@triton_op("deepcontrol::max_pool2x2", mutates_args=())
def max_pool2x2(x: Tensor) -> tuple[Tensor, Tensor]:
    last = is_channels_last(x)
    if why_plain(x) is None:
        return launch_pool(x, last, traced=True)
    pooled, index = plain.pool(x)
    return plain.laid_out(pooled, last), plain.laid_out(index, last)


@triton_op("deepcontrol::pick2x2", mutates_args=())
def pick2x2(x: Tensor, index: Tensor, channels_last: bool) -> Tensor:
    if why_plain(x) is None:
        return launch_pick(x, index, channels_last, traced=True)
    return plain.laid_out(plain.pick(x, index), channels_last)


@triton_op("deepcontrol::place2x2", mutates_args=())
def place2x2(values: Tensor, index: Tensor, height: int, width: int, channels_last: bool) -> Tensor:
    if why_plain(values) is None:
        return launch_place(values, index, (height, width), channels_last, traced=True)
    return plain.laid_out(plain.place(values, index, (height, width)), channels_last)


@max_pool2x2.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2)
    last = is_channels_last(x)
    return empty_maps(x, shape, x.dtype, last), empty_maps(x, shape, torch.uint8, last)


@pick2x2.register_fake
def _(x: Tensor, index: Tensor, channels_last: bool) -> Tensor:
    return empty_maps(x, index.shape, x.dtype, channels_last)


@place2x2.register_fake
def _(values: Tensor, index: Tensor, height: int, width: int, channels_last: bool) -> Tensor:
    return empty_maps(values, (*index.shape[:2], height, width), values.dtype, channels_last)


def _keep_of_pool(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    (x,) = inputs
    ctx.save_for_backward(output[1])
    ctx.size, ctx.last = x.shape[2:], is_channels_last(x)
    ctx.set_materialize_grads(False)  # the index's would be a map of zeros


def _pool_backward(ctx: Any, grad: Tensor | None, _: None) -> Tensor | None:
    return None if grad is None else place2x2(grad, *ctx.saved_tensors, *ctx.size, ctx.last)


def _keep_of_pick(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index, _ = inputs
    ctx.save_for_backward(index)
    ctx.size, ctx.last = x.shape[2:], is_channels_last(x)


def _pick_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return place2x2(grad, *ctx.saved_tensors, *ctx.size, ctx.last), None, None


def _keep_of_place(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, index, *_ = inputs
    ctx.save_for_backward(index)
    ctx.last = is_channels_last(values)


def _place_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return pick2x2(grad, *ctx.saved_tensors, ctx.last), None, None, None, None


max_pool2x2.register_autograd(_pool_backward, setup_context=_keep_of_pool)
pick2x2.register_autograd(_pick_backward, setup_context=_keep_of_pick)
place2x2.register_autograd(_place_backward, setup_context=_keep_of_place)
