"""AGC (automatic gain control) as a layer: it stands where BatchNorm stands."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import agc
from ..ops.maps import positions
from .hazards import warn_if_single_position

_BATCHNORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _AGC(nn.Module):
    _dims: tuple[int, ...]  # what BatchNorm of the same dimension accepts
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    mean_scale: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # eps, momentum and track_running_stats are BatchNorm's: there is no variance to guard and
        # there are no statistics to track, so they are accepted and have no effect.
        super().__init__()
        self.num_features = num_features
        self.affine = affine
        for name in ("weight", "bias", "mean_scale"):
            parameter = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
            self.register_parameter(name, parameter if affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """gamma = 1, beta = 0, lambda = 1. From lambda = 0 deep networks do not train."""
        if self.weight is not None and self.bias is not None and self.mean_scale is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)
            nn.init.ones_(self.mean_scale)

    def forward(self, z: Tensor) -> Tensor:
        if z.dim() not in self._dims:
            expected = " or ".join(f"{d}-D" for d in self._dims)
            raise ValueError(f"expected {expected} input, got {z.dim()}-D: {tuple(z.shape)}")
        if z.shape[1] != self.num_features:
            raise ValueError(
                f"expected {self.num_features} channels, got {z.shape[1]} "
                f"in the input of shape {tuple(z.shape)}"
            )
        warn_if_single_position(self, positions(z))
        return agc(z, self.weight, self.bias, self.mean_scale)

    def extra_repr(self) -> str:
        return f"{self.num_features}, affine={self.affine}"

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
                state_dict.setdefault(prefix + "mean_scale", self.mean_scale.detach())
            warnings.warn(
                f"this state dict is BatchNorm's: {', '.join(statistics)} dropped, since AGC keeps "
                "no statistics, and mean_scale left as it is. The outputs will differ from "
                "BatchNorm's until the model is trained again.",
                stacklevel=2,
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class AGC1d(_AGC):
    """AGC over (N, C, L), or (N, C) as BatchNorm1d takes it: see AGC2d."""

    _dims = (2, 3)


class AGC2d(_AGC):
    """AGC (automatic gain control) over maps (N, C, H, W), in BatchNorm2d's place.

        y = gamma * (z - lambda * mean(z)) + beta          mean over H, W, per sample and channel

    Parameters, each (C,): `weight` (gamma, starts at 1), `bias` (beta, 0), `mean_scale` (lambda,
    1). No buffers: the function is the same in training and evaluation and for any batch size.
    `affine=False` leaves z - mean(z). The other arguments of BatchNorm2d are accepted and ignored.

    Where the convolution before it is yours to replace, AGCConv2d computes the same and keeps
    nothing for its backward; this layer keeps its input, as BatchNorm2d does.

    >>> layer = AGC2d(8)
    >>> layer(torch.randn(1, 8, 16, 16)).shape
    torch.Size([1, 8, 16, 16])
    """

    _dims = (4,)


class AGC3d(_AGC):
    """AGC over volumes (N, C, D, H, W): see AGC2d."""

    _dims = (5,)
