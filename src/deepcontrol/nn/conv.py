"""The paper's neuron in one layer: convolution, AGC and activation.

AGC is automatic gain control.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..ops import gain_conv, max_pool2x2, native
from ..ops.activation import ActivationName, activation_name, get_activation
from ..ops.agc import center_bias_act, center_bias_act_given_mean
from ..ops.background import Background, check_background, is_homogeneous, subtract_background
from ..ops.dispatch import kernel_switch, unwrap_if_dead
from ..ops.gain_conv import autocast_dtype, cast_input, store_map_sums, stored_map_sums
from ..ops.layout import positions
from ..ops.neuron import NeuronPlan, neuron_backward, run_fused, runs_fused, unfused_neuron
from ..ops.reference import FilterNorm
from ..ops.replay import replay_of
from .init import he_filter_norm, he_normal_, reset_all_but_filters_
from .layer import (
    BatchNormFusionGuard,
    FxLeaf,
    LoadHint,
    extras_repr,
    is_plain,
    warn_if_single_position,
)
from .noise import HasNoise, deep_noise
from .padding import FlexiblePadding, split_padding
from .shared_means import SharedMeans

STANDARDIZED_START = 0.5  # initial lambda with weight standardization
_PARAMETERS = ("weight", "gain", "bias", "mean_scale")
# The attributes that a plan depends on.
_SETTINGS = (
    "stride",
    "padding",
    "_reversed_padding_repeated_twice",
    "dilation",
    "groups",
    "padding_mode",
    "activation",
    "weight_norm",
    "weight_standardization",
    "background",
    "_noise",
    "consumer_ratio",
    "pools",
    "shared_means",
)


class _AGCConv(FxLeaf, HasNoise, BatchNormFusionGuard, LoadHint, FlexiblePadding, _ConvNd):
    bias: nn.Parameter
    activation: ActivationName
    shared_means: SharedMeans | None = None  # set while the input is a tile of a larger image
    # Output elements per input element of the consumer, set by models that know it; 0 if unknown.
    consumer_ratio = 0.0
    pools = False  # whether 2x2 max pooling follows

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        *,
        activation: ActivationName | nn.Module | type[nn.Module] | None = "relu",
        weight_norm: bool = False,
        weight_standardization: bool = False,
        background: Background = "mean",
        noise: float = 0.0,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not bias:
            raise ValueError(
                f"{type(self).__name__} does not support bias=False: its bias is beta of Eq. 1 and "
                "replaces the bias of the normalization layer. Leave out bias=False; to keep beta "
                "at 0, freeze it with layer.bias.requires_grad_(False)."
            )
        # Set before torch's constructor, which resets the parameters.
        self.activation = activation_name(activation)
        self.weight_norm = weight_norm
        self.weight_standardization = weight_standardization
        super().__init__(
            in_channels,
            out_channels,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=True,
            padding_mode=padding_mode,
            device=device,
            dtype=dtype,
        )
        self.gain = nn.Parameter(torch.ones(out_channels, device=device, dtype=dtype))
        start = torch.full((out_channels,), self.start_mean_scale, device=device, dtype=dtype)
        self.mean_scale = nn.Parameter(start)
        # Set last: a background may be a module, and its parameters follow those of the neuron.
        self.background = check_background(background)
        self.noise = noise

    def reset_parameters(self) -> None:
        """Initialize filters with He fan-in, gain to 1, bias to 0, and mean_scale.

        mean_scale starts at 1, or at 0.5 with weight_standardization.

        AGC does not normalize the scale of the signal, so the filters must start at the right one.
        With torch's default for convolutions the signal vanishes within a few layers.
        """
        he_normal_(self)
        reset_all_but_filters_(self)  # torch's constructor calls this before the gain exists

    def forward(self, input: Tensor) -> Any:
        if not torch.compiler.is_compiling() and native.run is not None:
            found = native.run(self, input)
            if found is not None:
                return found
        if self.shared_means is not None or not runs_fused(self.activation) or not is_plain(self):
            return self._forward_unfused(input)
        if input.dim() == len(self.stride) + 1 and not self.pools:  # without a batch
            check_input(self, input)
            return self.forward(input.unsqueeze(0)).squeeze(0)
        weight, gain, bias, mean_scale = _parameters(self)
        x = unwrap_if_dead(input)
        autocast = autocast_dtype(x)
        map_sums = stored_map_sums(x) if autocast is None or autocast is x.dtype else None
        # Everything that a plan depends on; a plan in the cache has passed the checks of its input.
        key = (
            "neuron", x.shape, x.stride(), x.dtype, x.device, type(x), autocast,
            weight.shape, weight.stride(), weight.dtype, weight.device, type(weight),
            gain.shape, gain.is_contiguous(), gain.dtype, gain.device,
            bias.shape, bias.is_contiguous(), bias.dtype, bias.device,
            mean_scale.shape, mean_scale.is_contiguous(), mean_scale.dtype, mean_scale.device,
            self.stride, self.padding, *self._reversed_padding_repeated_twice,
            self.dilation, self.groups, self.padding_mode,
            self.activation, self.weight_norm, self.weight_standardization,
            self.consumer_ratio, self.pools,
            None if map_sums is None else map_sums.shape,
            torch.is_grad_enabled(), kernel_switch(),
        )  # fmt: skip
        plan = replay_of(key, lambda: self._plan(x, weight, gain))
        if plan.dtype != x.dtype:
            x = x.to(plan.dtype)  # before autograd saves x, so that it saves the smaller copy
        if plan.pad is not None:
            # CPU autocast pads with "reflect" and "replicate" in fp32.
            x = nn.functional.pad(x, *plan.pad).to(plan.dtype)
        y, index, sums = run_fused(x, weight, gain, bias, mean_scale, plan, map_sums)
        if sums is not None:
            store_map_sums(y, sums)
        if native.active and plan.forward.recorded:
            self._prepare_native(input, plan, (weight, gain, bias, mean_scale), map_sums)
        if self.pools:
            return y, index
        if plan.single_position:
            warn_if_single_position(self, 1)
        return y

    @property
    def filter_norm(self) -> FilterNorm | None:
        """The normalization of the filters before the gain, or None."""
        if not (self.weight_norm or self.weight_standardization):
            return None
        # The filters of a depthwise convolution read one channel. Centered, they would pass nothing
        # of a constant map, and with a single weight nothing at all.
        return FilterNorm(
            he_filter_norm(self), self.weight_standardization and self.in_channels > self.groups
        )

    @property
    def start_mean_scale(self) -> float:
        """The value of lambda at the start: 1, or 0.5 if the filters are centered."""
        filter_norm = self.filter_norm
        return STANDARDIZED_START if filter_norm is not None and filter_norm.centered else 1.0

    def _plan(self, x: Tensor, weight: Tensor, gain: Tensor) -> NeuronPlan:
        """Check the input; return the plan of the layer for such inputs and parameters."""
        check_input(self, x)
        pad, geometry = split_padding(self, x.shape[2:])
        dtype = cast_input(x, weight, gain, self.groups).dtype
        return NeuronPlan(
            geometry, self.activation, dtype, x.numel(), weight, self.filter_norm,
            self.consumer_ratio, self.pools, torch.is_grad_enabled(), pad,
        )  # fmt: skip

    def _prepare_native(
        self,
        input: Tensor,
        plan: NeuronPlan,
        parameters: tuple[Tensor, ...],
        map_sums: Tensor | None,
    ) -> None:
        """Hand over the launches to the compiled helper once they are recorded."""
        # Noise depends on the mode, which the helper does not check.
        if self.is_noisy or plan.pad is not None or plan.single_position or not plan.scale.recorded:
            return
        geometry = plan.geometry
        native.prepare(
            self, input, dict(zip(_PARAMETERS, parameters, strict=True)), _SETTINGS,
            plan=plan, backward_in_python=neuron_backward, map_sums=map_sums,
            scale=plan.scale, forward=plan.forward, backward=plan.backward,
            backward_sums=plan.backward_sums, filter_gradients=plan.filter_gradients,
            dtype=plan.dtype, stride=geometry.stride, padding=geometry.padding,
            dilation=geometry.dilation, groups=geometry.groups, training=plan.training,
            saves_scaled=plan.saves_scaled, joint_gradients=plan.joint_gradients,
            derives_mean=plan.may_derive_mean, pools=plan.pools,
        )  # fmt: skip

    def _forward_unfused(self, input: Tensor) -> Any:
        """Run the ops one by one: for torch.compile, export, torch.func and tiles."""
        check_input(self, input)
        has_batch = input.dim() == self.weight.dim()
        if self.pools and not has_batch:
            raise ValueError(f"expected a batch (N, C, H, W), got {tuple(input.shape)}")
        x = input if has_batch else input.unsqueeze(0)
        if self.shared_means is not None:
            y = self._forward_with_shared_mean(x, self.shared_means)
            if self.pools:
                return max_pool2x2(y)
        elif not is_plain(self):
            y = self._forward_with_extras(x)
            if self.pools:
                return max_pool2x2(y)
        else:
            pad, geometry = split_padding(self, x.shape[2:])
            x = x if pad is None else nn.functional.pad(x, *pad)
            y = unfused_neuron(
                x, self.weight, self.gain, self.bias, self.mean_scale,
                geometry, self.activation, self.filter_norm, self.pools,
            )  # fmt: skip
            if self.pools:
                return y
        warn_if_single_position(self, positions(y))
        return y if has_batch else y.squeeze(0)

    def _forward_with_shared_mean(self, input: Tensor, shared: SharedMeans) -> Tensor:
        v = self._convolved(input)
        mean = shared.of(v)
        return center_bias_act_given_mean(v, mean, self.bias, self.mean_scale, self.activation)

    def _forward_with_extras(self, input: Tensor, **convolution: Any) -> Tensor:
        """Run the neuron with another background than the mean, or with noise.

        Args:
            input: (N, C, *).
            convolution: Further arguments of _convolved.
        """
        noisy = self.is_noisy and self.training
        activation = "none" if noisy else self.activation
        background = check_background(self.background)  # a name may be assigned later
        rest = self.bias, self.mean_scale, activation
        if background == "mean":
            v = self._convolved(input, **convolution)
            y = center_bias_act(v, *rest, overwrite=True)
        elif is_homogeneous(background):
            v = self._convolved(input, **convolution)
            y = subtract_background(v, background, None, *rest)
        else:  # b(gamma z) is not gamma b(z), so the gain cannot go into the filters
            z = self._convolved(input, torch.ones_like(self.gain), **convolution)
            y = subtract_background(z, background, self.gain, *rest)
        return get_activation(self.activation).apply(deep_noise(y, self.noise)) if noisy else y

    def _convolved(self, input: Tensor, gain: Tensor | None = None) -> Tensor:
        """Return conv(x, V) with the scaled filters V."""
        pad, geometry = split_padding(self, input.shape[2:])
        x = input if pad is None else nn.functional.pad(input, *pad)
        gain = self.gain if gain is None else gain
        v = gain_conv(x, self.weight, gain, *geometry, self.filter_norm)
        warn_if_single_position(self, positions(v))
        return v

    def _fusion_obstacle(self) -> str | None:
        if self.activation != "none":
            return "its activation lies between the two"
        if not is_homogeneous(self.background):
            return "its background does not scale with the filters"
        if self.filter_norm is None:
            return None
        name = "weight_standardization" if self.weight_standardization else "weight_norm"
        return f"{name} removes the scale of its filters"

    def extra_repr(self) -> str:
        names = ("weight_norm", "weight_standardization")
        options = "".join(f", {name}=True" for name in names if getattr(self, name))
        extras = f"{options}{extras_repr(self)}"
        return f"{super().extra_repr()}, activation={self.activation}{extras}"


def check_input(conv: _ConvNd, input: Tensor) -> None:
    """Raise ValueError unless input is (N, C, *) or (C, *) with the channels of conv."""
    spatial = conv.weight.dim() - 2
    if input.dim() not in (spatial + 1, spatial + 2):
        raise ValueError(
            f"expected {spatial + 2}-D input, or {spatial + 1}-D without a batch, "
            f"got {input.dim()}-D: {tuple(input.shape)}"
        )
    if input.shape[-spatial - 1] != conv.in_channels:
        raise ValueError(
            f"expected {conv.in_channels} channels, got {input.shape[-spatial - 1]} "
            f"in the input of shape {tuple(input.shape)}"
        )


def _parameters(layer: _AGCConv) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weight, gain, bias and mean_scale, each read once.

    A module finds its parameters by __getattr__, which takes a microsecond each. A parametrized one
    is not in the table: it is computed at each access.
    """
    table = layer._parameters
    try:
        found = (table["weight"], table["gain"], table["bias"], table["mean_scale"])
    except KeyError:
        return layer.weight, layer.gain, layer.bias, layer.mean_scale
    return found  # type: ignore[return-value]


class AGCConv1d(_AGCConv, nn.Conv1d):
    """The neuron with AGC (automatic gain control) over (N, C, L): see AGCConv2d.

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, Eq. 1.

    >>> AGCConv1d(3, 8, kernel_size=3)(torch.randn(1, 3, 16)).shape
    torch.Size([1, 8, 14])
    """


class AGCConv2d(_AGCConv, nn.Conv2d):
    """The paper's neuron: convolution, AGC (automatic gain control) and activation.

        z = conv(x, W)        y = act( gamma * (z - lambda * mean(z)) + beta )

    with the mean over H and W, per sample and filter.

    It computes the same as Conv2d(bias=False), AGC2d and the activation one after the other, with
    the gain in the weights: conv(x, gamma W) minus lambda times its mean, plus beta, activated. For
    relu, leaky_relu and none, the layer saves x and N x C means for backward, and no other map (on
    a GPU also one bit per output element).

    It is an nn.Conv2d: `weight` is the filter W and `bias` is beta (initially 0). It adds `gain`
    (gamma, 1) and `mean_scale` (lambda, 1), each (out_channels,). Training and evaluation are the
    same function, for any batch size. Under autocast the output has autocast's dtype, as with
    Conv2d.

    With weight_norm=True the filters are normalized before the gain,

        z = conv(x, c W / |W|)        c = sqrt(2), or 1 with activation="none"

    |W| is the norm of each filter and c its expected value under He fan-in, so both forms start as
    nearly the same function. gamma alone then sets the scale of a filter. The gradient of W is
    orthogonal to W, so training steps lengthen W, which shortens the next step: high learning rates
    diverge less. The normalization is part of the pass that applies the gain. It takes no further
    launch and saves nothing more for backward. A filter of zeros has no direction and is not
    normalized.

    With weight_standardization=True the mean of each filter's weights is subtracted as well,

        z = conv(x, c (W - mean(W)) / |W - mean(W)|)

    and lambda starts at 0.5, because zero-mean filters already remove the mean over all channels.
    This form reached the lowest errors when training from scratch (docs/choose.md). Depthwise
    filters are only normalized, and their lambda starts at 1.

    References:
        Brendan Ruff, "Deep Control: a simple automatic gain control for memory efficient and high
        performance training of deep convolutional neural networks", 2017,
        https://arxiv.org/abs/1706.03907.

        Salimans and Kingma, "Weight Normalization: A Simple Reparameterization to Accelerate
        Training of Deep Neural Networks", 2016, https://arxiv.org/abs/1602.07868.

        Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight
        Standardization", 2019, https://arxiv.org/abs/1903.10520.

    Args:
        in_channels, out_channels, kernel_size, stride, dilation, groups: As in nn.Conv2d.
        padding: As in nn.Conv2d. "same" also works with a stride, where it pads as TensorFlow, and
            ((top, bottom), (left, right)) pads each side by itself.
        activation: "relu", "leaky_relu", "silu", "gelu" or "none"; or nn.ReLU, nn.LeakyReLU,
            nn.SiLU, nn.GELU or nn.Identity, as a class or an instance with default settings. For
            any other, use "none" and put the module after the layer.
        weight_norm: Normalize each filter, as described above.
        weight_standardization: Center and normalize each filter, as described above.
        background: Estimator in place of the mean: "mean", "median", WindowMean, Quantile,
            TrimmedMean, or a differentiable function from z to a tensor that broadcasts to z. Other
            ones than the mean save more for backward.
        noise: Deep noise in training, as a standard deviation relative to that of each map.
        bias: Must be True: beta is part of the neuron.
        padding_mode, device, dtype: As in nn.Conv2d.

    Shape:
        (N, in_channels, H, W) or (in_channels, H, W) -> the output shape of nn.Conv2d.

    >>> neuron = AGCConv2d(3, 16, kernel_size=3, padding=1)
    >>> neuron(torch.randn(1, 3, 32, 32)).shape
    torch.Size([1, 16, 32, 32])
    """


class AGCConvPool2d(AGCConv2d):
    """The neuron with 2x2 max pooling, for the end of an encoder stage.

    It computes max_pool2x2(AGCConv2d(...)(x)); see AGCConv2d. The full map is not saved for
    backward, and on a GPU it is not even written.

    Returns:
        The pooled maps (N, C, H // 2, W // 2), and their index in uint8 for ops.max_unpool2x2.

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, Eq. 1.

    >>> pooled, index = AGCConvPool2d(3, 16, kernel_size=3, padding=1)(torch.randn(1, 3, 32, 32))
    >>> pooled.shape, index.dtype
    (torch.Size([1, 16, 16, 16]), torch.uint8)
    """

    pools = True  # identity_init_ uses He initialization for the layer after a pooling

    def _fusion_obstacle(self) -> str:
        return "its pooling lies between the two"


class AGCConv3d(_AGCConv, nn.Conv3d):
    """The neuron with AGC (automatic gain control) over (N, C, D, H, W).

    See AGCConv2d.

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, Eq. 1.

    >>> AGCConv3d(3, 8, kernel_size=3)(torch.randn(1, 3, 6, 8, 8)).shape
    torch.Size([1, 8, 4, 6, 6])
    """
