"""Eq. 1 on maps: the op of the layer that replaces BatchNorm, and the neuron's.

    agc                y = gamma * (z - lambda * m) + beta
    center_bias_act    u = v - lambda * m + beta,  y = act(u)           v = conv(x, gamma W)

m is the mean of z or v over the map, (N, C). With g the gradient of y, h = g * act'(u), and sums
over positions p and samples s:

    agc                dz = gamma * (g - lambda * mean(g))    dgamma = sum g * (z - lambda * m)
                       dbeta = sum g                          dlambda = -gamma * sum_s m_s * sum_p g
    center_bias_act    dv = h - lambda * mean(h)
                       dbeta = sum h                          dlambda = -sum_s m_s * sum_p h

`agc` saves z for backward, as BatchNorm does. `center_bias_act` does not need v: for ReLU and leaky
ReLU, act' follows from y, which the next convolution saves as its input. So a neuron saves N x C
means and no map, as little as a layer without normalization. The kernels also save the signs of y,
one bit each (`activation.empty_relu_mask`).

Each op is an autograd.Function in eager mode, in which center_bias_act can write over v, and a
torch.library op under torch.compile (triton/agc.py).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference
from .activation import ACTIVATIONS, get_activation, unpack_relu_mask
from .dispatch import (
    compiles_with_ops,
    differentiate,
    kernel_switch,
    needs_differentiable_backward,
    needs_plain_ops,
    unwrap_if_dead,
    uses_kernels,
)
from .gain_conv import ConvOperands
from .layout import (
    accumulate_dtype,
    check_maps,
    like_layout,
    map_mean,
    map_sum,
    memory_order,
    over_maps,
    positions,
)
from .replay import Replay, replay_of


def agc(
    z: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean_scale: Tensor | None = None,
) -> Tensor:
    """Apply AGC (automatic gain control), Eq. 1 of the paper.

        y = gamma * (z - lambda * mean(z)) + beta

    The mean runs over the positions * of each sample and channel, in fp32 for half types.

    Args:
        z: Feature maps (N, C, *).
        weight: gamma, (C,); None means 1.
        bias: beta, (C,); None means 0.
        mean_scale: lambda, (C,); None means 1.

    Returns:
        y, with the shape, dtype and memory layout of z.

    >>> z = torch.tensor([[[1.0, 2.0, 6.0]]])
    >>> agc(z, weight=torch.tensor([2.0]), mean_scale=torch.tensor([1.0]))
    tensor([[[-4., -2.,  6.]]])
    """
    if weight is None or bias is None or mean_scale is None:
        check_maps(z, weight=weight, bias=bias, mean_scale=mean_scale)
    gamma = z.new_ones(z.shape[1]) if weight is None else weight
    beta = z.new_zeros(z.shape[1]) if bias is None else bias
    lam = z.new_ones(z.shape[1]) if mean_scale is None else mean_scale
    if torch.compiler.is_compiling() or needs_plain_ops():
        check_maps(z, weight=weight, bias=bias, mean_scale=mean_scale)
        if needs_plain_ops() or not compiles_with_ops():
            return reference.agc(z, gamma, beta, lam)
        return torch.ops.deepcontrol.agc(z, gamma, beta, lam)[0]
    z = unwrap_if_dead(z)
    return _run_agc(z, gamma, beta, lam, *agc_replays(z, gamma, beta, lam))


def agc_replays(z: Tensor, gamma: Tensor, beta: Tensor, lam: Tensor) -> tuple[Replay, Replay]:
    """Return the forward and backward of Eq. 1; check such tensors the first time."""
    # Everything that the checks and the launches depend on.
    key = (
        "agc", z.shape, z.stride(), z.dtype, z.device, type(z), kernel_switch(),
        gamma.shape, gamma.is_contiguous(), gamma.dtype, gamma.device,
        beta.shape, beta.is_contiguous(), beta.dtype, beta.device,
        lam.shape, lam.is_contiguous(), lam.dtype, lam.device,
    )  # fmt: skip

    def checked() -> tuple[Replay, Replay]:
        check_maps(z, weight=gamma, bias=beta, mean_scale=lam)
        return Replay(agc_forward), Replay(_agc_backward)

    return replay_of(key, checked)


def agc_given_mean(
    z: Tensor, mean: Tensor, weight: Tensor | None, bias: Tensor | None, mean_scale: Tensor | None
) -> Tensor:
    """Apply Eq. 1 with a constant mean (N, C): gamma * (z - lambda * m) + beta.

    For inference on tiles that share the mean of their image. None means 1, 0 and 1.
    """
    background = mean if mean_scale is None else mean_scale * mean
    y = z.to(accumulate_dtype(z.dtype)) - over_maps(background, z)
    if weight is not None:
        y = over_maps(weight, z) * y
    if bias is not None:
        y = y + over_maps(bias, z)
    return y.to(z.dtype)


def agc_forward(
    z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor, traced: bool = False
) -> tuple[Tensor, Tensor]:
    """Return y and the means (N, C)."""
    if uses_kernels(z, traced):
        from .triton import agc as kernels

        return kernels.forward(z, bias, mean_scale, "none", gamma=weight, traced=traced)[:2]
    mean = map_mean(z)
    y = torch.empty_like(z)
    # In fp32 and fp64 the centered map is written straight into y. Half types round only once.
    exact = y.dtype == mean.dtype
    centered = torch.sub(z, over_maps(mean_scale * mean, z), out=y if exact else None)
    torch.addcmul(over_maps(bias, z), centered, over_maps(weight, z), out=y)
    return y, mean


def agc_backward(
    g: Tensor,
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    mean: Tensor,
    grad_mean: Tensor | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dz, dweight, dbias, dmean_scale.

    The plain form is differentiable. Its second derivative reaches z through the mean, which then
    has the gradient grad_mean.
    """
    plain = not traced and needs_differentiable_backward(g, grad_mean)
    if not plain and uses_kernels(g, traced) and uses_kernels(z, traced):
        from .triton import agc as kernels

        dz, dweight, dbias, dscale = kernels.backward(
            g, z, mean, weight, bias, mean_scale, "none", traced=traced
        )
        assert dweight is not None
        return dz, dweight, dbias, dscale
    sum_g = map_sum(g)
    dz = (g - over_maps(mean_scale * sum_g / positions(z), g)) * over_maps(weight, g)
    if grad_mean is not None:
        dz = dz + over_maps(grad_mean / positions(z), g)
    centered = z - over_maps(mean_scale * mean, z)
    dweight = map_sum(g * centered).sum(0).to(weight.dtype)
    dbias = sum_g.sum(0).to(bias.dtype)
    dscale = (-weight * (mean * sum_g).sum(0)).to(mean_scale.dtype)
    return dz.to(z.dtype), dweight, dbias, dscale


class _AGC(torch.autograd.Function):
    """Eq. 1: (z, weight, bias, mean_scale, forward and backward as replays) -> y."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean_scale: Tensor,
        run: Replay,
        run_backward: Replay,
    ) -> Tensor:
        y, mean = run(z, weight, bias, mean_scale)
        ctx.save_for_backward(z, weight, bias, mean_scale, mean)
        ctx.run_backward = run_backward
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        found = norm_backward(ctx.run_backward, ctx.saved_tensors, g, ctx.needs_input_grad)
        return *found, None, None


def norm_backward(
    run: Replay, saved_tensors: Sequence[Tensor], g: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of z, weight, bias and mean_scale.

    Args:
        run: The backward as a Replay.
        saved_tensors: z, weight, bias, mean_scale and the means.
        g: Gradient of y.
        needs: Whether each input needs a gradient.
    """
    if needs_differentiable_backward(g):
        return tuple(differentiate(reference.agc, saved_tensors[:4], g, needs))
    return run(g, *saved_tensors)


# Function.apply looks for a functorch transform first, which `agc` has excluded.
_run_agc = super(torch.autograd.Function, _AGC).apply


def _agc_backward(
    g: Tensor, z: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = like_layout(g, memory_order(z))
    return agc_backward(g, z, weight, bias, mean_scale, mean)


def center_bias_act(
    v: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    activation: str = "relu",
    *,
    overwrite: bool = False,
) -> Tensor:
    """Return act(v - lambda * mean(v) + beta): a neuron after its convolution.

    Args:
        v: Feature maps (N, C, *) of conv(x, gamma W).
        bias: beta, (C,).
        mean_scale: lambda, (C,).
        activation: One of relu, leaky_relu, silu, gelu, none.
        overwrite: Allow the result to reuse the memory of v. This happens in eager mode, unless
            the backward needs v (SiLU, GELU).

    Returns:
        y in the shape and dtype of v.

    >>> v = torch.tensor([[[1.0, 3.0]]])
    >>> center_bias_act(v, bias=torch.zeros(1), mean_scale=torch.ones(1))
    tensor([[[0., 1.]]])
    """
    get_activation(activation)
    check_maps(v, bias=bias, mean_scale=mean_scale)
    if needs_plain_ops() or (torch.compiler.is_compiling() and not compiles_with_ops()):
        return reference.center_bias_act(v, bias, mean_scale, activation)
    if torch.compiler.is_compiling():
        training = torch.is_grad_enabled()
        y, *_ = torch.ops.deepcontrol.center_bias_act(v, bias, mean_scale, activation, training)
    else:
        y, _ = _CenterBiasAct.apply(v, bias, mean_scale, activation, overwrite)
    return y


def center_bias_act_given_mean(
    v: Tensor, mean: Tensor, bias: Tensor, mean_scale: Tensor, activation: str
) -> Tensor:
    """Return act(v - lambda * m + beta) for a given mean (N, C), written over v.

    For inference on tiles that share the mean of their image.
    """
    v.add_(over_maps(bias - mean_scale * mean, v))
    return get_activation(activation).apply_(v)


Forward = Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None]]


def forward_function(v: Tensor, traced: bool = False) -> Forward:
    """Return the forward of center_bias_act for v: the kernels' or `plain_forward`.

    Both have the arguments of `plain_forward`. Returning the function instead of calling it keeps
    the Python stack above a launch short.
    """
    if uses_kernels(v, traced):
        from .triton import agc as kernels

        return functools.partial(kernels.forward, traced=True) if traced else kernels.forward
    return plain_forward


def plain_forward(
    v: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    activation: str,
    out: Tensor | None = None,
    training: bool = False,
    consumer_ratio: float = 0.0,
    operands: ConvOperands | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run the forward in plain PyTorch.

    Args:
        out: Where to write y; may be v.
        training: Whether a backward follows.
        consumer_ratio: Output elements per input element of the consumer of y; 0 if unknown.
        operands: The operands of the convolution that computed v, if the mean can be derived.

    Returns:
        y, the means (N, C), the ReLU mask and the map sums. The last two are for the kernels: here
        they are None, and the arguments that concern them have no effect.
    """
    mean = map_mean(v)
    y = torch.empty_like(v) if out is None else out
    torch.add(v, over_maps(_shift(mean, bias, mean_scale), v), out=y)
    return ACTIVATIONS[activation].apply_(y), mean, None, None


def center_backward(
    g: Tensor,
    saved: Tensor | None,
    bias: Tensor,
    mean_scale: Tensor,
    mean: Tensor,
    activation: str,
    grad_mean: Tensor | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dv, dbias, dmean_scale.

    The plain form is differentiable. Its second derivative reaches v through the mean, which then
    has the gradient grad_mean.

    Args:
        saved: The result of `saved_map`.
    """
    plain = not traced and needs_differentiable_backward(g, grad_mean)
    is_mask = saved is not None and saved.dtype == torch.uint8
    supported = saved is None or is_mask or uses_kernels(saved, traced)
    if not plain and uses_kernels(g, traced) and supported:
        from .triton import agc as kernels

        dv, _, dbias, dscale = kernels.backward(
            g, saved, mean, None, bias, mean_scale, activation, traced=traced
        )
        return dv, dbias, dscale
    act = ACTIVATIONS[activation]
    if saved is not None and is_mask:
        saved = unpack_relu_mask(saved, g)
    elif saved is not None and act.needs == "input":
        saved = saved + over_maps(_shift(mean, bias, mean_scale), saved)
    h = act.backward(g, saved)  # type: ignore[arg-type]
    sum_h = map_sum(h)
    background = mean_scale * sum_h
    if grad_mean is not None:
        background = background - grad_mean
    dv = (h - over_maps(background / positions(h), h)).to(g.dtype)
    dbias = sum_h.sum(0).to(bias.dtype)
    dscale = -(mean * sum_h).sum(0).to(mean_scale.dtype)
    return dv, dbias, dscale


def _shift(mean: Tensor, bias: Tensor, mean_scale: Tensor) -> Tensor:
    """Return beta - lambda * m, (N, C), the number that a neuron adds to a map of v."""
    return torch.addcmul(bias, mean_scale, mean, value=-1)


def saved_map(activation: str, v: Tensor, y: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return the map that the backward needs: v, y, the ReLU mask or None."""
    output = y if mask is None else mask
    return {"nothing": None, "output": output, "input": v}[ACTIVATIONS[activation].needs]


class _CenterBiasAct(torch.autograd.Function):
    """Return y and the mean; second derivatives need the mean as an output."""

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, bias: Tensor, mean_scale: Tensor, activation: str, overwrite: bool
    ) -> tuple[Tensor, Tensor]:
        training = any(ctx.needs_input_grad)
        overwrite = overwrite and not (training and ACTIVATIONS[activation].needs == "input")
        out = v if overwrite else None
        y, mean, mask, _ = forward_function(v)(v, bias, mean_scale, activation, out, training)
        if overwrite:
            ctx.mark_dirty(v)
        ctx.save_for_backward(saved_map(activation, v, y, mask), bias, mean_scale, mean)
        ctx.activation = activation
        ctx.order, ctx.shape, ctx.dtype = memory_order(y), y.shape, y.dtype
        ctx.set_materialize_grads(False)  # a zero gradient of the mean would only cost time
        return y, mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, grad_mean = grads
        saved, bias, mean_scale, mean = ctx.saved_tensors
        g = mean.new_zeros(ctx.shape, dtype=ctx.dtype) if g is None else g
        g = like_layout(g, ctx.order)
        grads_in = center_backward(g, saved, bias, mean_scale, mean, ctx.activation, grad_mean)
        return *grads_in, None, None
