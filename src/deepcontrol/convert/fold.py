"""Fold AGC for inference: convolutions with a bias computed from their input.

    y = act( conv(x, V) + beta - lambda * m )          V = gamma W, m = mean of conv(x, V)

The mean m follows from sums over the input x, so it is known before the convolution runs:

    m[o] = sum over c, k of V[o, c, k] S[c, k] / P

P is the number of output positions, and S[c, k] is the sum of x over the window that kernel tap k
covers; for a transposed convolution, over the positions that tap k carries into the output. Nothing
passes over the output of the convolution: at batch 1, beta - lambda * m is the convolution's own
bias.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, addcmul, nn
from torch.nn.functional import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import type_before_parametrizations

from ..nn import (
    AGCConv1d,
    AGCConv2d,
    AGCConv3d,
    AGCConvPool2d,
    AGCConvTranspose1d,
    AGCConvTranspose2d,
    AGCConvTranspose3d,
    AGCLinear,
)
from ..nn.agc import _AGC
from ..nn.conv import _AGCConv, check_input
from ..nn.conv_transpose import padding_of_output
from ..nn.layer import BatchNormFusionGuard, FxLeaf, require_mean
from ..nn.padding import FlexiblePadding, padded, same_padding
from ..ops import max_pool2x2
from ..ops.activation import ActivationName, get_activation
from ..ops.layout import accumulate_dtype, over_maps
from ..ops.one_call import conv_computed_bias_act, folds_to_one_call
from ..ops.reference import LEAKY_SLOPE, conv, scaled_filters, swap_channels
from .dataflow import has_hooks, trace_dataflow
from .dry_run import copy_model
from .plan import match_conv_norm_act
from .replace import conv_options, make_agc_conv, parameters_of, replace_modules

# autocast does not support torch.convolution
_CONVOLUTIONS = {1: conv1d, 2: conv2d, 3: conv3d}
_TRANSPOSED = {1: conv_transpose1d, 2: conv_transpose2d, 3: conv_transpose3d}

# Borders up to this width are sliced off. Wider ones (large dilations) are masked, because a slice
# would make torch.export require maps that are larger than the border.
_MAX_SLICED_BORDER = 2


def fold(model: nn.Module) -> nn.Module:
    """Return a copy of an AGC (automatic gain control) model for inference.

        y = act( conv(x, gamma W) + beta - lambda * mean )

    Every AGCConv and AGCConvTranspose becomes a convolution with gamma in its filters and
    beta - lambda * mean as its bias. The mean of the convolution's output is computed from its
    input, exactly for any stride, dilation, groups and padding, so nothing passes over the output.
    At batch 1 the bias is the convolution's own; larger batches have one bias per sample, which is
    added to the output.

    A convolution and the AGC1d/2d/3d that it feeds are folded in the same way. AGC layers in other
    places stay, AGCLinear becomes nn.Linear, and an AGCConv with lambda = 0 becomes a plain
    convolution.

    The copy computes the same function up to rounding. It is in eval mode and its parameters do not
    require gradients. It supports torch.compile and torch.export with dynamic batch, height and
    width. (Export it with a batch of 2 or more: torch.export turns sizes of 1 into constants.)

    Args:
        model: A model with AGC layers. It is not changed.

    Returns:
        The folded copy.

    Raises:
        ValueError: If the model is scripted, has no AGC layer, or has one with another background
            than the mean.

    >>> from deepcontrol import AGCConv2d
    >>> model = nn.Sequential(AGCConv2d(3, 8, 3, padding=1), AGCConv2d(8, 8, 3, stride=2))
    >>> x = torch.randn(1, 3, 16, 16)
    >>> torch.allclose(fold(model)(x), model(x), atol=1e-5)
    True
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "the model is scripted, and a scripted module cannot be changed: "
            "fold the model before it is scripted. Folded models can be traced (torch.jit.trace) "
            "or exported (torch.export), not scripted"
        )
    if not any(isinstance(m, (_AGC, _AGCConv, AGCLinear)) for m in model.modules()):
        raise ValueError(
            f"no AGC layer in {type(model).__name__}: convert it with to_agc first; a folded or "
            "calibrated model cannot be folded again"
        )
    require_mean(model, "fold")
    model = copy_model(model, isolate=False).model.eval().requires_grad_(False)
    model = replace_modules(model, _fuse_agc_layers(model))
    replacements: dict[nn.Module, nn.Module] = {}
    with torch.no_grad():
        for module in model.modules():
            if module._forward_pre_hooks:  # may compute its parameters, as weight norm does
                continue
            if _can_fold(module):
                replacements[module] = _fold_conv(module).eval()
            elif type(module) is AGCLinear:
                replacements[module] = _fold_linear(module).eval()
    return replace_modules(model, replacements)


def _fuse_agc_layers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return an AGCConv for each convolution that feeds only an AGC layer."""
    layers = [m for m in model.modules() if is_plain_agc(m) and not has_hooks(m)]
    flow = trace_dataflow(model, layers)
    replacements: dict[nn.Module, nn.Module] = {}
    for layer in layers:
        found = match_conv_norm_act(layer, flow)
        if isinstance(found, str):
            continue
        parameters = parameters_of(layer, found.conv.weight)
        neuron = make_agc_conv(found.conv, parameters, found.activation, found.conv.bias)
        replacements[found.conv] = neuron
        replacements[layer] = nn.Identity()
        if found.activation_module is not None:
            replacements[found.activation_module] = nn.Identity()
    return replacements


def is_plain_agc(module: nn.Module) -> TypeGuard[_AGC]:
    """Return whether a module is an AGC1d/2d/3d that does not override forward."""
    plain = isinstance(module, _AGC) and type(module).forward is _AGC.forward
    return plain and "forward" not in vars(module)


def _fold_linear(layer: AGCLinear) -> nn.Module:
    """Return a linear layer with centered filters, then the activation.

    AGC over features is linear in x.
    """
    linear = nn.Linear(layer.in_features, layer.out_features, device="meta")
    linear.weight, linear.bias = _constant(layer._centered_weight()), _constant(layer.bias)
    return _sequential([linear, *_activation_layers(layer.activation)])


class _FoldedConv(FxLeaf, BatchNormFusionGuard, FlexiblePadding, _ConvNd):
    bias: nn.Parameter
    mean_scale: nn.Parameter
    activation: ActivationName

    def __init__(self, neuron: _AGCConv) -> None:
        super().__init__(**conv_options(neuron), device="meta")
        weight, groups = neuron.weight, neuron.groups
        transposed = isinstance(neuron, _ConvTransposeNd)
        weight = swap_channels(weight, groups) if transposed else weight
        filters = scaled_filters(weight, neuron.gain, weight.dtype, neuron.filter_norm)
        self.weight = _constant(swap_channels(filters, groups) if transposed else filters)
        self.bias = _constant(neuron.bias.clone())
        self.mean_scale = _constant(neuron.mean_scale.clone())
        self.activation = neuron.activation

    def reset_parameters(self) -> None:
        """Do nothing: the parameters are those of a trained neuron."""

    def forward(self, input: Tensor) -> Tensor:
        check_input(self, input)
        if input.dim() < self.weight.dim():
            return self.forward(input.unsqueeze(0)).squeeze(0)
        x, padding = padded(self, input)
        geometry = (self.stride, padding, self.dilation, self.groups)
        operands = (x, self.weight, self.bias, self.mean_scale)
        if folds_to_one_call(*operands, *geometry):
            return conv_computed_bias_act(*operands, self.activation, *geometry)
        return get_activation(self.activation).apply_(self._pre_activation(x, padding))

    def _pre_activation(self, x: Tensor, padding: tuple[int, ...]) -> Tensor:
        """Compute conv(x, V) + beta - lambda * m."""
        bias = self._computed_bias(x, padding)
        if x.shape[0] == 1:
            return self._convolve(x, padding, bias.flatten())
        return self._convolve(x, padding).add_(over_maps(bias, x))

    def _convolve(self, x: Tensor, padding: tuple[int, ...], bias: Tensor | None = None) -> Tensor:
        run = _CONVOLUTIONS[x.dim() - 2]
        return run(x, self.weight, bias, self.stride, padding, self.dilation, self.groups)

    def _computed_bias(self, x: Tensor, padding: tuple[int, ...]) -> Tensor:
        """Compute beta - lambda * m, (N, C)."""
        bias = addcmul(self.bias, self.mean_scale, self._means(x, padding), value=-1)
        return bias.to(self.weight.dtype)

    def _means(self, x: Tensor, padding: tuple[int, ...]) -> Tensor:
        """Compute the mean of each map of conv(x, V), (N, C)."""
        window = window_means(x, self.kernel_size, self.stride, padding, self.dilation)
        ones, zeros = (1,) * (x.dim() - 2), (0,) * (x.dim() - 2)
        window = window.to(self.weight.dtype)
        return conv(window, self.weight, ones, zeros, ones, self.groups).flatten(1)

    def means(self, input: Tensor) -> Tensor:
        """Return the mean of each map of conv(x, V), (N, C); N = 1 if x has no batch."""
        batch = input if input.dim() == self.weight.dim() else input.unsqueeze(0)
        return self._means(*padded(self, batch))

    def _fusion_obstacle(self) -> str | None:
        return None if self.activation == "none" else "its activation lies between the two"

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class FoldedConv1d(_FoldedConv, nn.Conv1d):
    """AGCConv1d for inference: see FoldedConv2d."""


class FoldedConv2d(_FoldedConv, nn.Conv2d):
    """AGCConv2d for inference: a convolution with a computed bias and an activation.

    `weight` is gamma W, normalized if the neuron has weight_norm, `bias` is beta and `mean_scale`
    is lambda. None of them requires gradients.
    """


class FoldedConv3d(_FoldedConv, nn.Conv3d):
    """AGCConv3d for inference: see FoldedConv2d."""


class FoldedConvPool2d(FoldedConv2d):
    """AGCConvPool2d for inference: returns pooled maps and their one-byte index.

    ReLU runs before the pooling, although fewer elements are left after it: in a window without
    positive values the index must be the first position, because the unpooling reads it.
    """

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return max_pool2x2(super().forward(input))

    def _fusion_obstacle(self) -> str:
        return "its pooling lies between the two"


class _FoldedConvTranspose(_FoldedConv, _ConvTransposeNd):
    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        check_input(self, input)
        dims = len(self.stride)
        if input.dim() == dims + 1:
            size = None if output_size is None else output_size[-dims:]
            return self.forward(input.unsqueeze(0), size).squeeze(0)
        extra = padding_of_output(self, input, output_size)
        mean = self._transposed_means(input, extra)
        bias = addcmul(self.bias, self.mean_scale, mean, value=-1).to(self.weight.dtype)
        run, padding, weight = _TRANSPOSED[dims], self.padding, self.weight
        if input.shape[0] == 1:
            y = run(input, weight, bias.flatten(), self.stride, padding, extra, self.groups,
                    self.dilation)  # fmt: skip
        else:
            y = run(input, weight, None, self.stride, padding, extra, self.groups, self.dilation)
            y.add_(over_maps(bias, y))
        return get_activation(self.activation).apply_(y)

    def _transposed_means(self, x: Tensor, output_padding: Sequence[int]) -> Tensor:
        """Compute the mean of each map of conv_transpose(x, V), (N, C)."""
        window = transposed_window_means(
            x, self.kernel_size, self.stride, self.padding, output_padding, self.dilation
        ).to(self.weight.dtype)
        ones, zeros = (1,) * len(self.stride), (0,) * len(self.stride)
        filters = swap_channels(self.weight, self.groups)
        return conv(window, filters, ones, zeros, ones, self.groups).flatten(1)

    def means(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        batch = input if input.dim() == self.weight.dim() else input.unsqueeze(0)
        size = None if output_size is None else output_size[-len(self.stride) :]
        return self._transposed_means(batch, padding_of_output(self, batch, size))


class FoldedConvTranspose1d(_FoldedConvTranspose, nn.ConvTranspose1d):
    """AGCConvTranspose1d for inference: see FoldedConv2d."""


class FoldedConvTranspose2d(_FoldedConvTranspose, nn.ConvTranspose2d):
    """AGCConvTranspose2d for inference: see FoldedConv2d."""


class FoldedConvTranspose3d(_FoldedConvTranspose, nn.ConvTranspose3d):
    """AGCConvTranspose3d for inference: see FoldedConv2d."""


_FOLDED: dict[type[_AGCConv], type[_FoldedConv]] = {
    AGCConv1d: FoldedConv1d,
    AGCConv2d: FoldedConv2d,
    AGCConv3d: FoldedConv3d,
    AGCConvPool2d: FoldedConvPool2d,
    AGCConvTranspose1d: FoldedConvTranspose1d,
    AGCConvTranspose2d: FoldedConvTranspose2d,
    AGCConvTranspose3d: FoldedConvTranspose3d,
}


def _can_fold(module: nn.Module) -> TypeGuard[_AGCConv]:
    """Return whether a module is an AGCConv that does not override forward."""
    return type_before_parametrizations(module) in _FOLDED and "forward" not in vars(module)


def _fold_conv(neuron: _AGCConv) -> nn.Module:
    """Return the folded neuron, or a plain convolution if lambda is 0."""
    layer = _FOLDED[type_before_parametrizations(neuron)](neuron)
    lam = layer.mean_scale
    if lam.is_meta or lam.any() or isinstance(layer, FoldedConvPool2d):
        return layer
    return plain_conv(layer, layer.bias)


def plain_conv(layer: _FoldedConv, bias: Tensor) -> nn.Module:
    """Return torch's convolution with a constant bias (C,), then the activation."""
    transposed = isinstance(layer, _ConvTransposeNd)
    convolution = getattr(nn, f"Conv{'Transpose' * transposed}{layer.weight.dim() - 2}d")
    options = conv_options(layer)
    pad: list[nn.Module] = []
    if layer.has_own_padding:
        pad, options["padding"] = [_Pad(layer)], 0
    plain = convolution(**options, device="meta")
    plain.weight, plain.bias = layer.weight, _constant(bias.to(layer.weight))
    layers = [*pad, plain, *_activation_layers(layer.activation)]
    if isinstance(layer, FoldedConvPool2d):
        layers.append(_MaxPool2x2())
    return _WithOutputSize(*layers) if transposed and len(layers) > 1 else _sequential(layers)


class _WithOutputSize(nn.Sequential):
    """A transposed convolution and an activation, called as the convolution is."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        conv, activation = self
        y: Tensor = activation(conv(input, output_size))
        return y


class _Pad(FxLeaf, nn.Module):
    """The padding of a neuron as a layer, if torch's convolution does not have it."""

    def __init__(self, conv: _FoldedConv) -> None:
        super().__init__()
        self.mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        self.geometry = (conv.kernel_size, conv.stride, conv.dilation)
        same = conv.padding == "same"
        self.both_sides = None if same else list(conv._reversed_padding_repeated_twice)

    def forward(self, input: Tensor) -> Tensor:
        sizes = input.shape[-len(self.geometry[0]) :]
        both_sides = self.both_sides or same_padding(sizes, *self.geometry)
        return nn.functional.pad(input, both_sides, self.mode)


class _MaxPool2x2(FxLeaf, nn.Module):
    """The pooling of AGCConvPool2d as a layer."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return max_pool2x2(input)


def _activation_layers(name: ActivationName) -> list[nn.Module]:
    """Return an activation as torch's layers, in-place if possible; [] for "none"."""
    make: dict[str, Callable[[], nn.Module]] = {
        "relu": lambda: nn.ReLU(inplace=True),
        "leaky_relu": lambda: nn.LeakyReLU(LEAKY_SLOPE, inplace=True),
        "silu": lambda: nn.SiLU(inplace=True),
        "gelu": nn.GELU,
    }
    return [make[name]()] if name != "none" else []


def _sequential(layers: list[nn.Module]) -> nn.Module:
    return nn.Sequential(*layers) if len(layers) > 1 else layers[0]


def _constant(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach(), requires_grad=False)


def window_means(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Compute S / P: the mean of x over the window that each kernel tap covers.

    The convolution of this one window is the mean of the convolution of x. S is separable: each
    dimension is summed by itself, the outermost first, so only the first sum reads all of x. With
    stride 1 a tap covers everything except a few rows at the borders, so S is the sum of all rows
    minus those.

    Args:
        x: Input maps (N, C, *).
        kernel_size: One value per spatial dimension, as the other arguments.
        stride: Stride of the convolution.
        padding: Zeros on both sides.
        dilation: Dilation of the kernel.

    Returns:
        A tensor (N, C, *kernel_size), in fp32 if x has half precision.
    """
    count: list[int] = []
    for i, geometry in enumerate(zip(kernel_size, stride, padding, dilation, strict=True)):
        kernel, step, zeros, spacing = geometry
        # Number of output positions in this dimension, before x is summed over it.
        fits = (x.shape[2 + i] + 2 * zeros - spacing * (kernel - 1) - 1) // step + 1
        count.append(fits)
        heads = [max(0, tap * spacing - zeros) for tap in range(kernel)]
        tails = [max(0, (kernel - 1 - tap) * spacing - zeros) for tap in range(kernel)]
        if kernel == 1:  # covers every step-th position, up to the last
            seen = x[(slice(None),) * (2 + i) + (slice(-zeros % step, None, step),)]
            x = seen.sum(2 + i, keepdim=True, dtype=accumulate_dtype(x.dtype))
        elif step == 1 and max(heads + tails) <= _MAX_SLICED_BORDER:
            x = _sums_without_borders(x, 2 + i, heads, tails)
        else:
            x = _masked_sums(x, 2 + i, geometry, fits)
    return x / math.prod(count)


def transposed_window_means(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Compute S / P for a transposed convolution; see window_means.

    Tap k carries position i of x to i * stride - padding + k * dilation. S leaves out the positions
    at the borders of x that a tap carries beyond the output.
    """
    count: list[int] = []
    for i, geometry in enumerate(
        zip(kernel_size, stride, padding, output_padding, dilation, strict=True)
    ):
        kernel, step, cut, extra, spacing = geometry
        reach = spacing * (kernel - 1)
        count.append((x.shape[2 + i] - 1) * step - 2 * cut + reach + extra + 1)
        before = [cut - tap * spacing for tap in range(kernel)]
        after = [cut - extra - reach + tap * spacing for tap in range(kernel)]
        heads, tails = ([max(0, -(-a // step)) for a in each] for each in (before, after))
        both = any(head and tail for head, tail in zip(heads, tails, strict=True))
        if not both and max(heads + tails) <= _MAX_SLICED_BORDER:
            x = _sums_without_borders(x, 2 + i, heads, tails)
        else:
            position = torch.arange(x.shape[2 + i], device=x.device)
            first = torch.tensor(heads, device=x.device).unsqueeze(1)
            last = x.shape[2 + i] - torch.tensor(tails, device=x.device).unsqueeze(1)
            x = _matrix_sums(x, 2 + i, (position >= first) & (position < last))
    return x / math.prod(count)


def _sums_without_borders(x: Tensor, dim: int, heads: list[int], tails: list[int]) -> Tensor:
    """Sum over dim without the first `heads` and last `tails` positions, per tap."""
    dtype = accumulate_dtype(x.dtype)
    before = (slice(None),) * dim
    everything = x.sum(dim, keepdim=True, dtype=dtype)
    taps = []
    for head, tail in zip(heads, tails, strict=True):
        seen = everything
        if head:
            seen = seen - x[(*before, slice(0, head))].sum(dim, keepdim=True, dtype=dtype)
        if tail:
            seen = seen - x[(*before, slice(-tail, None))].sum(dim, keepdim=True, dtype=dtype)
        taps.append(seen)
    return torch.cat(taps, dim)


def _masked_sums(x: Tensor, dim: int, geometry: tuple[int, ...], fits: int) -> Tensor:
    """Sum over dim the positions that each tap covers, by a product with a 0/1 mask."""
    kernel, step, zeros, spacing = geometry
    position = torch.arange(x.shape[dim], device=x.device)
    first = torch.arange(kernel, device=x.device).unsqueeze(1) * spacing - zeros
    offset = position - first  # from the first position of the tap, (kernel, positions)
    return _matrix_sums(x, dim, (offset >= 0) & (offset < fits * step) & (offset % step == 0))


def _matrix_sums(x: Tensor, dim: int, seen: Tensor) -> Tensor:
    """Sum over dim by a product with a mask (kernel taps, positions)."""
    dtype, rest = accumulate_dtype(x.dtype), x.shape[dim + 1 :]
    flat = x.to(dtype).reshape(*x.shape[: dim + 1], math.prod(rest))
    return torch.matmul(seen.to(dtype), flat).reshape(*x.shape[:dim], len(seen), *rest)
