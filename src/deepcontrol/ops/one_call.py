"""A neuron of a single sample as one convolution call.

    y = act( conv(x, V) + b )        b = beta - lambda * m        m = mean of conv(x, V), (C,)

The mean follows from sums of x (gain_conv.py), so b is known before the convolution runs. For one
sample it is the bias of the convolution, and cuDNN adds it and applies ReLU where it has the result
in registers: nothing passes over the output. Two kernels compute b (triton/one_call.py). Where
cuDNN's ReLU would hide a NaN, torch's follows the convolution.

This is for CUDA, half types and channels_last: 3x3 kernels with padding 1 and stride 1, and 1x1
kernels. `convert/fold.py` has the plain form of the same, for every convolution.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .activation import get_activation
from .dispatch import kernel_switch, needs_plain_ops, uses_kernels
from .gain_conv import HALF_TYPES, autocast_dtype
from .layout import is_channels_last, shape_cache
from .replay import Replay, replay_of


def is_supported(
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> bool:
    """Return whether the kernels sum the windows of such a convolution."""
    kernel = tuple(kernel_size)
    if groups != 1 or len(kernel) != 2:
        return False
    if kernel == (1, 1):
        return tuple(padding) == (0, 0)
    ones = (tuple(a) == (1, 1) for a in (stride, padding, dilation))
    return kernel == (3, 3) and all(ones)


def folds_to_one_call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> bool:
    """Return whether a convolution with a computed bias runs as one call now.

    Args:
        x: Input (N, C, *).
        weight: The filters V, gain included.
        bias: beta, (C_out,).
        mean_scale: lambda, (C_out,).
        stride, padding, dilation, groups: Of the convolution.
    """
    if torch.compiler.is_compiling() or x.dtype not in HALF_TYPES or x.dtype != weight.dtype:
        return False
    if x.shape[0] != 1 or needs_plain_ops():
        return False
    tensors = (x, weight, bias, mean_scale)
    if torch.is_grad_enabled() and any(a.requires_grad for a in tensors):
        return False
    if autocast_dtype(x) not in (None, x.dtype) or not _runs_cudnn():
        return False
    geometry = (tuple(a) for a in (weight.shape[2:], stride, padding, dilation))
    if not shape_cache(is_supported, *geometry, groups) or not is_channels_last(x):
        return False
    return uses_kernels(x) and uses_kernels(weight)


def conv_computed_bias_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_scale: Tensor,
    activation: str,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return act(conv(x, V) + beta - lambda * m) of one sample, without gradients.

    Args:
        x: Input (1, C, H, W), for which folds_to_one_call is true.
        weight: The filters V, gain included.
        bias: beta, (C_out,).
        mean_scale: lambda, (C_out,).
        activation: Its name.
        stride, padding, dilation, groups: Of the convolution.
    """
    geometry = (stride, padding, dilation, groups)
    key = (
        "computed bias", x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(),
        bias.dtype, bias.is_contiguous(), mean_scale.dtype, mean_scale.is_contiguous(), *stride,
        activation, kernel_switch(),
    )  # fmt: skip

    def of_shape() -> tuple[Replay, bool]:
        from .triton import one_call as kernels

        borders = weight.shape[2] > 1

        def computed_bias(x: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor) -> Tensor:
            window = kernels.Window.of(x, stride)
            sums, _ = kernels.input_sums(x, window, borders)
            operands = (weight, None, bias, mean_scale, x, window, sums, weight.dtype)
            return kernels.scale_with_mean(*operands)[2]

        fuses = activation == "relu" and _keeps_nan(x, weight, *geometry)
        return Replay(computed_bias), fuses

    compute, fuses_relu = replay_of(key, of_shape)
    computed = compute(x, weight, bias, mean_scale)
    if fuses_relu:
        return conv_relu(x, weight, computed, *geometry)
    y = torch.nn.functional.conv2d(x, weight, computed, *geometry)
    return get_activation(activation).apply_(y)


def _keeps_nan(x: Tensor, weight: Tensor, *geometry: Any) -> bool:
    """Return whether cuDNN's ReLU is NaN where torch's is, for such operands.

    Otherwise a NaN in x would become a map of zeros, and nobody would notice. cuDNN leaves this to
    the version and the engine, so it is tried once for each shape.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # a result cannot be read now
    nan = weight.new_full((weight.shape[0],), torch.nan)
    return bool(conv_relu(x, weight, nan, *geometry).isnan().all())


def conv_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return relu(conv(x, V) + b) by one call of cuDNN."""
    return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, groups)


def _runs_cudnn() -> bool:
    """Return whether torch uses cuDNN and allows nondeterministic algorithms.

    torch passes no wish for deterministic algorithms to the fused convolution.
    """
    cudnn = torch.backends.cudnn
    wanted = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return cudnn.enabled and not wanted
