"""AGC (automatic gain control) as a drop-in replacement for BatchNorm."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import native
from ..ops.agc import agc, agc_given_mean, agc_replays, norm_backward
from ..ops.background import Background, check_background, subtract_background
from ..ops.dispatch import needs_plain_ops
from ..ops.layout import positions
from .layer import FxLeaf, extras_repr, is_plain, warn_if_single_position
from .noise import HasNoise, deep_noise
from .shared_means import SharedMeans

# The attributes that a forward depends on.
_SETTINGS = ("num_features", "shared_means", "_dims", "background", "_noise")
_BATCHNORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _AGC(FxLeaf, HasNoise, nn.Module):
    _dims: tuple[int, ...]  # number of input dimensions that BatchNorm1d/2d/3d accepts
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    mean_scale: nn.Parameter | None
    shared_means: SharedMeans | None = None  # set by SharedMeans for tiled inference

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        background: Background = "mean",
        noise: float = 0.0,
    ) -> None:
        # eps, momentum and track_running_stats are accepted for compatibility with BatchNorm and
        # have no effect: AGC divides by no variance and tracks no statistics.
        super().__init__()
        self.num_features = num_features
        self.affine = affine
        self.background = check_background(background)
        self.noise = noise
        for name in ("weight", "bias", "mean_scale"):
            parameter = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
            used = affine and (bias or name != "bias")
            self.register_parameter(name, parameter if used else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set gamma = 1, beta = 0, lambda = 1.

        Deep networks do not train from lambda = 0.
        """
        for parameter, start in ((self.weight, 1.0), (self.bias, 0.0), (self.mean_scale, 1.0)):
            if parameter is not None:
                nn.init.constant_(parameter, start)

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and native.run is not None:
            found = native.run(self, input)
            if found is not None:
                return found
        if input.dim() not in self._dims:
            expected = " or ".join(f"{d}-D" for d in self._dims)
            raise ValueError(
                f"expected {expected} input, got {input.dim()}-D input of shape "
                f"{tuple(input.shape)}"
            )
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"expected {self.num_features} channels, got {input.shape[1]} "
                f"in the input of shape {tuple(input.shape)}"
            )
        warn_if_single_position(self, positions(input))
        if self.shared_means is not None:
            mean = self.shared_means.of(input)
            return agc_given_mean(input, mean, self.weight, self.bias, self.mean_scale)
        parameters = self.weight, self.bias, self.mean_scale
        if is_plain(self):
            y = agc(input, *parameters)
            if not torch.compiler.is_compiling() and native.active:
                self._prepare_native(input)
            return y
        background = check_background(self.background)  # a name may be assigned later
        if background == "mean":
            y = agc(input, *parameters)
        else:
            y = subtract_background(input, background, *parameters)
        return deep_noise(y, self.noise) if self.is_noisy and self.training else y

    def _prepare_native(self, input: Tensor) -> None:
        """Hand over the launches to the compiled helper once they are recorded."""
        names = ("weight", "bias", "mean_scale")
        found = {name: self._parameters.get(name) for name in names}
        parameters: dict[str, Tensor] = {n: a for n, a in found.items() if a is not None}
        if len(parameters) < 3 or self.is_noisy or needs_plain_ops() or positions(input) == 1:
            return
        forward, backward = agc_replays(input, *parameters.values())
        if forward.recorded:
            native.prepare(
                self, input, parameters, _SETTINGS, plan=backward, backward_in_python=norm_backward,
                forward=forward, backward=backward,
            )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.num_features}, affine={self.affine}{extras_repr(self)}"

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        statistics = [prefix + s for s in _BATCHNORM_STATISTICS if prefix + s in state_dict]
        if statistics:
            for key in statistics:
                del state_dict[key]
            if self.mean_scale is not None:
                own = self.mean_scale.detach()
                weight = state_dict.get(prefix + "weight")
                if own.is_meta and weight is not None:
                    own = torch.ones_like(weight)  # load_state_dict(assign=True) needs a real one
                state_dict.setdefault(prefix + "mean_scale", own)
            warnings.warn(
                f"the state dict is from a BatchNorm: {', '.join(statistics)} dropped, because AGC "
                "has no statistics, and mean_scale left unchanged. The outputs differ from "
                "BatchNorm's until the model is trained. To keep them, load the state dict into "
                "the BatchNorm model and convert it with to_agc(model, init='bn').",
                stacklevel=2,
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class AGC1d(_AGC):
    """AGC (automatic gain control) over (N, C, L), replacing BatchNorm1d. See AGC2d.

    Like BatchNorm1d it also accepts (N, C). A map then has one position, so lambda = 1 leaves only
    the bias: after a linear layer use AGCLinear, or start at lambda = 0.

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, Eq. 1.

    >>> AGC1d(8)(torch.randn(1, 8, 16)).shape
    torch.Size([1, 8, 16])
    """

    _dims = (2, 3)


class AGC2d(_AGC):
    """AGC (automatic gain control) over maps (N, C, H, W), replacing BatchNorm2d.

        y = gamma * (z - lambda * mean(z)) + beta          mean over H, W, per sample and channel

    Input and output have the same shape. There are no buffers: the function is the same in training
    and eval mode and for every batch size.

    The layer saves its input for the backward, as BatchNorm2d does. AGCConv2d computes convolution,
    AGC and activation without that; use it if you can replace the convolution too.

    Args:
        num_features: Number of channels C.
        eps: Accepted for compatibility with BatchNorm2d, without effect; so are momentum and
            track_running_stats.
        affine: Without it there are no parameters, and y = z - mean(z).
        bias: Without it there is no beta.
        background: Estimator in place of the mean: "mean", "median", WindowMean, Quantile,
            TrimmedMean, or a differentiable function from z to a tensor that broadcasts to z.
        noise: Deep noise in training, as a standard deviation relative to that of each map.

    Attributes:
        weight: gamma, (C,), starts at 1.
        bias: beta, (C,), starts at 0.
        mean_scale: lambda, (C,), starts at 1.

    Reference:
        Brendan Ruff, "Deep Control: a simple automatic gain control for memory efficient and high
        performance training of deep convolutional neural networks", 2017,
        https://arxiv.org/abs/1706.03907.

    >>> layer = AGC2d(8)
    >>> layer(torch.randn(1, 8, 16, 16)).shape
    torch.Size([1, 8, 16, 16])
    """

    _dims = (4,)


class AGC3d(_AGC):
    """AGC (automatic gain control) over (N, C, D, H, W), replacing BatchNorm3d.

    See AGC2d.

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, Eq. 1.

    >>> AGC3d(8)(torch.randn(1, 8, 4, 6, 6)).shape
    torch.Size([1, 8, 4, 6, 6])
    """

    _dims = (5,)


def norm_act(act_layer: Callable[[], nn.Module] = nn.ReLU) -> Callable[..., nn.Module]:
    """Return a factory for AGC2d and an activation: a `norm_act` layer for timm.

    EfficientNet, MobileNetV2, ResNetV2 and other models of timm take it as norm_layer:

        timm.create_model("efficientnet_b0", norm_layer=norm_act(nn.SiLU))

    timm passes an activation only to its own norm classes, which it finds by name. The factory is
    therefore a function that brings the activation along.

    Args:
        act_layer: Called without arguments to create the activation of each layer.

    Returns:
        A function (num_features, ..., apply_act=True, inplace=True) -> nn.Module with the arguments
        of timm's BatchNormAct2d. apply_act=False omits the activation; inplace has no effect.

    >>> norm_act(nn.SiLU)(8)
    Sequential(
      (0): AGC2d(8, affine=True)
      (1): SiLU()
    )
    >>> norm_act(nn.SiLU)(8, apply_act=False)
    AGC2d(8, affine=True)
    """

    def layer(
        num_features: int,
        *batchnorm: Any,
        apply_act: bool = True,
        inplace: bool = True,
        **more_batchnorm: Any,
    ) -> nn.Module:
        norm = AGC2d(num_features, *batchnorm, **more_batchnorm)
        return nn.Sequential(norm, act_layer()) if apply_act else norm

    return layer
