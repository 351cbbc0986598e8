"""The neuron's and the layer's step as torch.compile sees them: ops that open into kernel launches.

Beside the kernels and not with the functions they serve, because to register them is to import
Triton. Their arithmetic, plain or in kernels, is that of ops/center.py and ops/agc.py.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from ..agc import backward as layer_backward
from ..agc import forward as layer_forward
from ..backend import takes_kernels
from ..center import backward as neuron_backward
from ..center import forward as neuron_forward
from ..center import kept as kept_of
from ..maps import accumulate_dtype, like_layout, memory_order
from ..open_bits import empty_bits


@triton_op("deepcontrol::center_bias_act", mutates_args=())
def center_bias_act(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, bits, _ = neuron_forward(v, bias, mean_scale, activation, None, training, traced=True)
    return y, mean, _no_bits(v) if bits is None else bits


@triton_op("deepcontrol::center_bias_act_backward", mutates_args=())
def center_bias_act_backward(
    g: Tensor, kept: Tensor | None, bias: Tensor, mean_scale: Tensor, mean: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    return neuron_backward(g, kept, bias, mean_scale, mean, activation, traced=True)


@triton_op("deepcontrol::agc", mutates_args=())
def agc(z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor) -> tuple[Tensor, Tensor]:
    return layer_forward(z, weight, bias, mean_scale, traced=True)


@triton_op("deepcontrol::agc_backward", mutates_args=())
def agc_backward(
    g: Tensor, z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return layer_backward(g, z, weight, bias, mean_scale, mean, traced=True)


@center_bias_act.register_fake
def _(
    v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kernels = training and takes_kernels(v, traced=True)
    bits = empty_bits(v, activation) if kernels else None
    return torch.empty_like(v), _means(v), _no_bits(v) if bits is None else bits


@center_bias_act_backward.register_fake
def _(
    g: Tensor, kept: Tensor | None, bias: Tensor, mean_scale: Tensor, mean: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(g), torch.empty_like(bias), torch.empty_like(mean_scale)


@agc.register_fake
def _(z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(z), _means(z)


@agc_backward.register_fake
def _(
    g: Tensor, z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dz, dweight, dbias, dscale = (torch.empty_like(a) for a in (g, weight, bias, mean_scale))
    return dz, dweight, dbias, dscale


def _means(z: Tensor) -> Tensor:
    return z.new_empty(z.shape[:2], dtype=accumulate_dtype(z.dtype))


def _no_bits(v: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=v.device)  # an op cannot return None


def _keep_of_neuron(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    v, bias, mean_scale, activation, _ = inputs
    y, mean, bits = output
    of_maps = kept_of(activation, v, y, bits if len(bits) else None)
    ctx.save_for_backward(of_maps, bias, mean_scale, mean)
    ctx.activation, ctx.order = activation, memory_order(y)


def _neuron_backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    kept, bias, mean_scale, mean = ctx.saved_tensors
    g = like_layout(g, ctx.order)
    of = (g, kept, bias, mean_scale, mean, ctx.activation)
    return *center_bias_act_backward(*of), None, None


def _keep_of_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, mean = output
    ctx.save_for_backward(*inputs, mean)
    ctx.order = memory_order(y)


def _layer_backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return agc_backward(like_layout(g, ctx.order), *ctx.saved_tensors)


center_bias_act.register_autograd(_neuron_backward, setup_context=_keep_of_neuron)
agc.register_autograd(_layer_backward, setup_context=_keep_of_layer)
