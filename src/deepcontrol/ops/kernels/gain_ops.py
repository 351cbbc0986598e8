"""The gain in the weights as torch.compile sees it: see agc_ops.py.

Left to itself the compiler makes two kernels of the backward, one for dW and one for dgamma.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from ..gain_conv import scale, scale_backward


@triton_op("deepcontrol::scale_filters", mutates_args=())
def scale_filters(weight: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    return scale(weight, gain, dtype, traced=True)


@triton_op("deepcontrol::scale_filters_backward", mutates_args=())
def scale_filters_backward(weight: Tensor, gain: Tensor, dscaled: Tensor) -> tuple[Tensor, Tensor]:
    return scale_backward(weight, gain, dscaled, traced=True)


@scale_filters.register_fake
def _(weight: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(weight, dtype=dtype)


@scale_filters_backward.register_fake
def _(weight: Tensor, gain: Tensor, dscaled: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), torch.empty_like(gain)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, gain, _ = inputs
    ctx.save_for_backward(weight, gain)


def _backward(ctx: Any, dscaled: Tensor) -> tuple[Tensor | None, ...]:
    return *scale_filters_backward(*ctx.saved_tensors, dscaled), None


scale_filters.register_autograd(_backward, setup_context=_keep)
