"""A neuron of a single sample as one convolution call.

    y = act( conv(x, V) + b )        b = beta - lambda * m        m = mean of conv(x, V), (C,)

The mean follows from sums of x (gain_conv.py), so b is known before the convolution runs. For one
sample it is the bias of the convolution, and cuDNN adds it and applies ReLU where it has the result
in registers: nothing passes over the output. Two kernels compute b (triton/one_call.py). Where
cuDNN's ReLU would hide a NaN, torch's follows the convolution.

This is for CUDA, half types, channels_last and one group: 3x3 kernels with padding, stride and
dilation 1, and 1x1 kernels without padding. `convert/fold.py` has the plain form of the same, for
every convolution.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from .activation import get_activation
from .dispatch import kernel_switch, needs_plain_ops, uses_kernels
from .gain_conv import HALF_TYPES, autocast_dtype
from .layout import is_channels_last, shape_cache
from .replay import Replay, replay_of

ALIGNMENT = 32  # bytes; torch looks for a cuDNN engine for each alignment up to this


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
        stride, padding, dilation, groups: Geometry of the convolution.
    """
    # The plain form is made of aten ops, which tracers record and FLOP counters know.
    if torch.compiler.is_compiling() or needs_plain_ops() or _len_torch_dispatch_stack() > 0:
        return False
    if x.shape[0] != 1 or x.dtype not in HALF_TYPES or x.dtype != weight.dtype:
        return False
    tensors = (x, weight, bias, mean_scale)
    if any(a.device != x.device for a in tensors):
        return False  # the convolution raises the error
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
        activation: Name of the activation.
        stride, padding, dilation, groups: Geometry of the convolution.
    """
    geometry = (stride, padding, dilation, groups)
    key = (
        "computed bias", x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(),
        bias.dtype, bias.is_contiguous(), mean_scale.dtype, mean_scale.is_contiguous(), *stride,
        activation, kernel_switch(), torch.backends.cudnn.benchmark, x.data_ptr() % ALIGNMENT,
    )  # fmt: skip

    def of_shape() -> _OneCall:
        from .triton import one_call as kernels

        borders = weight.shape[2] > 1

        def computed_bias(x: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor) -> Tensor:
            window = kernels.Window.of(x, stride)
            sums, _ = kernels.input_sums(x, window, borders)
            operands = (weight, None, bias, mean_scale, x, window, sums, weight.dtype)
            return kernels.scale_with_mean(*operands)[2]

        return _OneCall(Replay(computed_bias))

    call = replay_of(key, of_shape)
    computed = call.compute(x, weight, bias, mean_scale)
    if activation == "relu" and call.fuses_relu(x, weight, *geometry):
        return conv_relu(x, weight, computed, *geometry)
    y = torch.nn.functional.conv2d(x, weight, computed, *geometry)
    return get_activation(activation).apply_(y)


class _OneCall:
    """The call of a layer on inputs of one shape.

    Attributes:
        compute: Computes the bias.
        keeps_nan: Whether cuDNN's ReLU runs and keeps a NaN; None if not tried.
    """

    def __init__(self, compute: Replay) -> None:
        self.compute = compute
        self.keeps_nan: bool | None = None
        self._is_first = True

    def fuses_relu(self, x: Tensor, weight: Tensor, *geometry: Any) -> bool:
        """Return whether cuDNN applies ReLU now.

        The trial (`_keeps_nan`) runs a convolution and waits for the device, so it is made at the
        second call of a shape. A captured call cannot wait and leaves the trial to a later call.
        """
        if self.keeps_nan is None and not self._is_first and not _is_captured(x):
            self.keeps_nan = _keeps_nan(x, weight, *geometry)
        self._is_first = False
        return self.keeps_nan is True


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _keeps_nan(x: Tensor, weight: Tensor, *geometry: Any) -> bool:
    """Return whether cuDNN's ReLU is NaN where torch's is, for such operands.

    Otherwise a NaN in x would silently become a map of zeros. This depends on cuDNN's version and
    engine, so it is tried once for each shape and alignment.
    """
    nan = weight.new_full((weight.shape[0],), torch.nan)
    try:
        y = conv_relu(x, weight, nan, *geometry)
    except RuntimeError:  # cuDNN has no engine with a bias and ReLU for some shapes
        return False
    return bool(y.isnan().all())


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

    torch does not pass the deterministic flag on to the fused convolution.
    """
    cudnn = torch.backends.cudnn
    wanted = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return cudnn.enabled and cudnn.is_available() and not wanted
