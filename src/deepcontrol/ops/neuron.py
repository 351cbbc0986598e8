"""The paper's neuron: convolution, Eq. 1, activation, optionally 2x2 max pooling.

    v = conv(x, gamma W)      u = v - lambda * m + beta      y = act(u)      m = mean of v, (N, C)

With a filter_norm, W is normalized first (see reference.FilterNorm).

There are two forms of the same arithmetic:

- `FusedNeuron`, the whole neuron as one autograd.Function, for eager mode. At small batches Python
  dominates the time of a training step, and one Function costs less than two. It also has the
  operands of the convolution, from which the mean can be derived (gain_conv.py). Everything that
  depends only on shapes is decided once, in a `NeuronPlan`, and kernel launches are repeated
  (replay.py).
- `unfused_neuron`, the ops one after the other, for everything else.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .activation import get_activation
from .agc import center_backward, center_bias_act, forward_function, plain_forward, saved_map
from .dispatch import differentiate, needs_differentiable_backward, needs_plain_ops
from .gain_conv import (
    HALF_TYPES,
    ConvOperands,
    gain_conv,
    is_large,
    on_side_stream,
    saves_scaled,
    scale_backward,
    scale_function,
    wait_for_side_stream,
)
from .layout import check_maps, is_channels_last, like_layout, memory_order, positions
from .pool import (
    center_bias_act_pool,
    check_windows,
    pool_backward,
    pool_forward_function,
    saved_pooled,
)
from .reference import FilterNorm
from .replay import Replay


class Geometry(NamedTuple):
    """Stride, padding, dilation per spatial dimension, and groups of a convolution."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


def runs_fused(activation: str) -> bool:
    """Return whether a neuron runs as a FusedNeuron now.

    It does in eager mode, unless the backward needs v (SiLU, GELU).
    """
    if torch.compiler.is_compiling() or needs_plain_ops():
        return False
    return get_activation(activation).needs != "input"


def unfused_neuron(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    geometry: Geometry,
    activation: str,
    filter_norm: FilterNorm | None = None,
    pools: bool = False,
) -> Any:
    """Run the ops one after the other; return y, or the pooled maps and their index."""
    v = gain_conv(x, weight, gain, *geometry, filter_norm)
    if pools:
        return center_bias_act_pool(v, bias, mean_scale, activation)
    return center_bias_act(v, bias, mean_scale, activation, overwrite=True)


class NeuronPlan:
    """A neuron for inputs of one shape, layout and dtype, and parameters of one kind.

    It holds the decisions that depend only on these, and the four parts of a neuron around its
    convolution as replays: the scaled filters, the forward and backward of the maps, and the
    gradients of the filters.

    Args:
        geometry: Geometry of the convolution.
        activation: Name of the activation: relu, leaky_relu or none.
        dtype: Dtype of x, after autocast.
        elements: Number of elements of x.
        weight: Filters of the shape and dtype that the neuron has.
        filter_norm: Normalization of each filter before the gain, or None.
        consumer_ratio: Output elements per input element of the consumer of y; 0 if unknown. It
            decides whether the kernel stores the sums of its maps.
        pools: Whether 2x2 max pooling follows.
        training: Whether a backward may follow.
        pad: Arguments of functional.pad for what the convolution cannot pad, or None.

    Attributes:
        single_position: Whether the maps of y have one position, known after the first call.
    """

    def __init__(
        self,
        geometry: Geometry,
        activation: str,
        dtype: torch.dtype,
        elements: int,
        weight: Tensor,
        filter_norm: FilterNorm | None,
        consumer_ratio: float,
        pools: bool,
        training: bool,
        pad: tuple[list[int], str] | None = None,
    ) -> None:
        stride, padding, dilation, groups = geometry
        self.geometry = geometry
        self.convolution = (stride, padding, dilation, False, [0] * len(stride), groups)
        self.activation = activation
        self.dtype = dtype
        self.filter_norm = filter_norm
        self.consumer_ratio = consumer_ratio
        self.pools = pools
        self.training = training
        self.pad = pad
        self.single_position = False
        self.saves_scaled = saves_scaled(elements, dtype, weight)
        ones = all(tuple(a) == (1, 1) for a in (stride, padding, dilation)) and groups == 1
        self.mean_from_operands = dtype in HALF_TYPES and ones and weight.shape[2:] == (3, 3)
        self.order: tuple[int, ...] | None = None  # of v's dimensions, outermost first
        # Whether one kernel computes the gradients of the filters, bias and mean_scale.
        self.joint_gradients = self.scales_in_kernel = False
        self.may_derive_mean = False  # whether stored map sums make a difference
        self.scale = Replay(self._scale)
        self.forward = Replay(self._forward)
        self.backward = Replay(self._backward)
        self.backward_sums = Replay(self._backward_sums)
        self.filter_gradients = Replay(self._filter_gradients)

    def _scale(self, weight: Tensor, gain: Tensor) -> Tensor:
        scale = scale_function(weight)
        self.scales_in_kernel = scale is not reference.scaled_filters
        return scale(weight, gain, self.dtype, self.filter_norm)

    def _forward(
        self,
        v: Tensor,
        bias: Tensor,
        mean_scale: Tensor,
        x: Tensor,
        scaled: Tensor,
        map_sums: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
        """Return y or the pooled maps, index, means, the map to save, and map sums."""
        check_maps(v, bias=bias, mean_scale=mean_scale)
        if self.order is None:
            self.order, self.single_position = memory_order(v), positions(v) == 1
            self.may_derive_mean = self.mean_from_operands and is_large(v)
        # For a single sample, the backward of the maps computes these without another launch.
        kernels = forward_function(v) is not plain_forward
        self.joint_gradients = self.scales_in_kernel and kernels and v.shape[0] > 1
        v = like_layout(v, self.order)  # torch may choose another layout in a later call
        operands = ConvOperands(x, scaled, map_sums) if self.mean_from_operands else None
        if self.pools:
            check_windows(v)
            self.size, self.channels_last = (v.shape[2], v.shape[3]), is_channels_last(v)
            pooled, index, mean, sums = pool_forward_function(v)(
                v, bias, mean_scale, self.activation, self.consumer_ratio, operands
            )
            return pooled, index, mean, saved_pooled(self.activation, pooled), sums
        y, mean, mask, sums = forward_function(v)(
            v, bias, mean_scale, self.activation, v, self.training, self.consumer_ratio, operands
        )
        return y, None, mean, saved_map(self.activation, v, y, mask), sums

    def _backward(
        self,
        g: Tensor,
        saved: Tensor | None,
        index: Tensor | None,
        mean: Tensor,
        bias: Tensor,
        mean_scale: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dv, dbias and dmean_scale."""
        if index is not None:
            return pool_backward(
                g, saved, index, bias, mean_scale, mean,
                self.size, self.activation, self.channels_last,
            )  # fmt: skip
        assert self.order is not None
        g = like_layout(g, self.order)
        return center_backward(g, saved, bias, mean_scale, mean, self.activation)

    def _backward_sums(
        self,
        g: Tensor,
        saved: Tensor | None,
        index: Tensor | None,
        mean: Tensor,
        bias: Tensor,
        mean_scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return dv and the sums of h per map, (N, C), by the kernels."""
        if index is not None:
            from .triton import agc_pool

            return agc_pool.backward(
                g, saved, index, bias, mean_scale, mean,
                self.size, self.activation, self.channels_last, sums_only=True,
            )[:2]  # fmt: skip
        from .triton import agc

        assert self.order is not None
        g = like_layout(g, self.order)
        dv, _, sum_h, _ = agc.backward(
            g, saved, mean, None, bias, mean_scale, self.activation, sums_only=True
        )
        return dv, sum_h

    def _filter_gradients(
        self,
        dscaled: Tensor,
        weight: Tensor,
        gain: Tensor,
        sum_h: Tensor | None,
        mean: Tensor,
        bias: Tensor,
        mean_scale: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Return dW, dgamma and, given the sums of h per map, dbias and dmean_scale."""
        if sum_h is None:
            return *scale_backward(weight, gain, dscaled, self.filter_norm), None, None
        from .triton import gain as kernels

        sums = kernels.MapGradients(
            sum_h, mean, torch.empty_like(bias), torch.empty_like(mean_scale)
        )
        of_filters = kernels.scale_backward(
            weight, gain, dscaled, self.filter_norm, map_gradients=sums
        )
        return *of_filters, sums.dbeta, sums.dlam

    def reference(
        self, x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, mean_scale: Tensor
    ) -> Tensor:
        """Return y or the pooled maps in plain, differentiable PyTorch."""
        v = reference.gain_conv(x, weight, gain, *self.geometry, self.filter_norm)
        y = reference.center_bias_act(v, bias, mean_scale, self.activation)
        return reference.max_pool2x2(y)[0] if self.pools else y


class FusedNeuron(torch.autograd.Function):
    """The whole neuron: (x, weight, gain, bias, mean_scale, plan, map sums of x).

    x has the dtype of the convolution. Returns y or the pooled maps, their index or None, and the
    map sums or None. No gradient flows through map sums: the mean is that of v, however it is
    computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gain: Tensor,
        bias: Tensor,
        mean_scale: Tensor,
        plan: NeuronPlan,
        map_sums: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scaled = plan.scale(weight, gain)
        v = torch.convolution(x, scaled, None, *plan.convolution)
        y, index, mean, saved, sums = plan.forward(v, bias, mean_scale, x, scaled, map_sums)
        if plan.training:
            operands: tuple[Tensor | None, ...] = (None, None, None, None)
            if any(ctx.needs_input_grad[:3]):
                operands = (x, weight, gain, scaled if plan.saves_scaled else None)
            ctx.save_for_backward(*operands, saved, index, bias, mean_scale, mean)
            ctx.plan = plan
            ctx.set_materialize_grads(False)
            if index is not None or sums is not None:
                ctx.mark_non_differentiable(*(a for a in (index, sums) if a is not None))
        return y, index, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, needs = grads[0], ctx.needs_input_grad
        if g is None:
            return (None,) * 7
        return *neuron_backward(ctx.plan, ctx.saved_tensors, g, needs), None, None


def neuron_backward(
    plan: NeuronPlan, saved_tensors: Sequence[Tensor | None], g: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, gain, bias and mean_scale.

    Args:
        plan: The plan of the forward.
        saved_tensors: The tensors that FusedNeuron saves, in its order.
        g: Gradient of y or of the pooled maps.
        needs: Whether each input needs a gradient.
    """
    x, weight, gain, scaled, saved, index, bias, mean_scale, mean = saved_tensors
    assert bias is not None
    assert mean_scale is not None
    assert mean is not None
    plain = needs_differentiable_backward(g)
    if plain and x is not None:
        inputs: Any = (x, weight, gain, bias, mean_scale)
        return tuple(differentiate(plan.reference, inputs, g, needs))
    of_x, of_filters = needs[0], needs[1] or needs[2]
    # Neither gradient of a convolution needs the other, and with small maps neither fills a GPU.
    # While a CUDA graph is captured, that of the filters is recorded on a side stream, so that the
    # graph has two branches. They join before backward returns: no memory is freed early.
    parallel = x is not None and of_x and of_filters and x.is_cuda and is_capturing()
    scaled_aside = parallel and scaled is None
    if scaled_aside:
        with on_side_stream(g.device):
            scaled = plan.scale(weight, gain)
    sum_h = dbias = dscale = dx = dweight = dgain = None
    if of_filters and plan.joint_gradients:
        dv, sum_h = plan.backward_sums(g, saved, index, mean, bias, mean_scale)
    else:
        backward = plan.backward.function if plain else plan.backward
        dv, dbias, dscale = backward(g, saved, index, mean, bias, mean_scale)
    if x is None:
        return None, None, None, dbias, dscale
    if scaled_aside:
        wait_for_side_stream(x.device)
    elif scaled is None:
        scaled = plan.scale(weight, gain)
    with on_side_stream(x.device) if parallel else _nothing:
        dx, dscaled, _ = convolution_backward(
            dv, x, scaled, None, *plan.convolution, (of_x and not parallel, of_filters, False)
        )
        if of_filters:
            dweight, dgain, *rest = plan.filter_gradients(
                dscaled, weight, gain, sum_h, mean, bias, mean_scale
            )
            if sum_h is not None:
                dbias, dscale = rest
    if parallel:
        dx = convolution_backward(dv, x, scaled, None, *plan.convolution, (True, False, False))[0]
        wait_for_side_stream(x.device)
    return dx, dweight, dgain, dbias, dscale


_nothing = nullcontext()
# Function.apply looks for a functorch transform first, which `runs_fused` has excluded.
run_fused = super(torch.autograd.Function, FusedNeuron).apply
convolution_backward = torch.ops.aten.convolution_backward.default
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
