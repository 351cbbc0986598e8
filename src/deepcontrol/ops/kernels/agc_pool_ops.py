"""The end of an encoder's stage as torch.compile sees it: see agc_ops.py."""

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from ..center_pool import backward_pool, forward_pool, kept_of_pool
from ..maps import accumulate_dtype
from ..pool import is_channels_last
from .pool import empty_maps


@triton_op("deepcontrol::center_bias_act_pool", mutates_args=())
def center_bias_act_pool(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    pooled, index, mean, _ = forward_pool(v, bias, mean_scale, activation, traced=True)
    return pooled, index, mean


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
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    n, c, height, width = v.shape
    shape, last = (n, c, height // 2, width // 2), is_channels_last(v)
    mean = v.new_empty((n, c), dtype=accumulate_dtype(v.dtype))
    return empty_maps(v, shape, v.dtype, last), empty_maps(v, shape, torch.uint8, last), mean


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


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    v, bias, mean_scale, ctx.activation = inputs
    pooled, index, mean = output
    ctx.save_for_backward(kept_of_pool(ctx.activation, pooled), index, bias, mean_scale, mean)
    ctx.size, ctx.last = v.shape[2:], is_channels_last(v)


def _backward(ctx: Any, g: Tensor, _: Any, __: Tensor) -> tuple[Tensor | None, ...]:
    grads = center_bias_act_pool_backward(
        g, *ctx.saved_tensors, *ctx.size, ctx.activation, ctx.last
    )
    return *grads, None


center_bias_act_pool.register_autograd(_backward, setup_context=_keep)
