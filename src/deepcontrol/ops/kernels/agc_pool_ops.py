"""The end of an encoder's stage as torch.compile sees it: see agc_ops.py."""

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from ..backend import takes_kernels
from ..center_pool import backward_pool, forward_pool, kept_of_pool
from ..maps import accumulate_dtype
from ..pool import is_channels_last
from ..window_mean import Origin, leaves_totals
from .agc_pool import empty_totals
from .pool import empty_maps


@triton_op("deepcontrol::center_bias_act_pool", mutates_args=())
def center_bias_act_pool(
    v: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    activation: str,
    leave: bool = False,
    x: Tensor | None = None,
    filters: Tensor | None = None,
    totals: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    origin = None if x is None or filters is None else Origin(x, filters, totals)
    pooled, index, mean, left = forward_pool(
        v, bias, mean_scale, activation, leave, origin, traced=True
    )
    return pooled, index, mean, _never_none(v, left)


@triton_op("deepcontrol::center_bias_act_pool_backward", mutates_args=())
def center_bias_act_pool_backward(
    g: Tensor,
    pooled: Tensor | None,
    index: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    mean: Tensor,
    height: int,
    width: int,
    activation: str,
    channels_last: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    size = (height, width)
    return backward_pool(
        g, pooled, index, bias, mean_scale, mean, size, activation, channels_last, traced=True
    )


@center_bias_act_pool.register_fake
def _(
    v: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    activation: str,
    leave: bool = False,
    x: Tensor | None = None,
    filters: Tensor | None = None,
    totals: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, c, height, width = v.shape
    shape, last = (n, c, height // 2, width // 2), is_channels_last(v)
    mean = v.new_empty((n, c), dtype=accumulate_dtype(v.dtype))
    takes = leave and takes_kernels(v, traced=True) and leaves_totals(v)
    left = _never_none(v, empty_totals(v, traced=True) if takes else None)
    pooled, index = (empty_maps(v, shape, dtype, last) for dtype in (v.dtype, torch.uint8))
    return pooled, index, mean, left


@center_bias_act_pool_backward.register_fake
def _(
    g: Tensor,
    pooled: Tensor | None,
    index: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    mean: Tensor,
    height: int,
    width: int,
    activation: str,
    channels_last: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dv = empty_maps(g, (*g.shape[:2], height, width), g.dtype, channels_last)
    return dv, torch.empty_like(bias), torch.empty_like(mean_scale)


def _never_none(v: Tensor, left: Tensor | None) -> Tensor:
    return v.new_empty(0, dtype=torch.float32) if left is None else left


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    v, bias, mean_scale, ctx.activation, *_ = inputs
    pooled, index, mean, _ = output
    ctx.save_for_backward(kept_of_pool(ctx.activation, pooled), index, bias, mean_scale, mean)
    ctx.size, ctx.last = v.shape[2:], is_channels_last(v)


def _backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grads = center_bias_act_pool_backward(
        g, *ctx.saved_tensors, *ctx.size, ctx.activation, ctx.last
    )
    return *grads, *(None,) * 5


center_bias_act_pool.register_autograd(_backward, setup_context=_keep)
