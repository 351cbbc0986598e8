"""AGC (automatic gain control) as a layer: it stands where BatchNorm stands."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.agc import agc, agc_given_mean
from ..ops.layout import positions
from .hazards import warn_if_single_position
from .shared_means import SharedMeans
from .symbolic import OneNode

_BATCHNORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _AGC(OneNode, nn.Module):
    _dims: tuple[int, ...]  # what BatchNorm of the same dimension accepts
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    mean_scale: nn.Parameter | None
    shared_means: SharedMeans | None = None  # set where the maps are tiles of larger ones

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
    ) -> None:
        # eps, momentum and track_running_stats are BatchNorm's: there is no variance to guard and
        # there are no statistics to track, so they are accepted and have no effect.
        super().__init__()
        self.num_features = num_features
        self.affine = affine
        for name in ("weight", "bias", "mean_scale"):
            parameter = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
            there = affine and (bias or name != "bias")
            self.register_parameter(name, parameter if there else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """gamma = 1, beta = 0, lambda = 1. From lambda = 0 deep networks do not train."""
        for parameter, start in ((self.weight, 1.0), (self.bias, 0.0), (self.mean_scale, 1.0)):
            if parameter is not None:
                nn.init.constant_(parameter, start)

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() not in self._dims:
            expected = " or ".join(f"{d}-D" for d in self._dims)
            raise ValueError(
                f"expected {expected} input, got {input.dim()}-D: {tuple(input.shape)}"
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
        return agc(input, self.weight, self.bias, self.mean_scale)

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
                own = self.mean_scale.detach()
                if own.is_meta:  # assigned from the state dict, which has no lambda to assign
                    own = torch.ones_like(state_dict[prefix + "weight"])
                state_dict.setdefault(prefix + "mean_scale", own)
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
    """AGC (automatic gain control) over (N, C, L): see AGC2d.

    Like BatchNorm1d it also takes (N, C), but there a map is one position and lambda = 1 leaves
    only the bias: after a linear layer use AGCLinear, or start at lambda = 0.

    >>> AGC1d(8)(torch.randn(1, 8, 16)).shape
    torch.Size([1, 8, 16])
    """

    _dims = (2, 3)


class AGC2d(_AGC):
    """AGC (automatic gain control) over maps (N, C, H, W), in BatchNorm2d's place.

        y = gamma * (z - lambda * mean(z)) + beta          mean over H, W, per sample and channel

    Parameters, each (C,): `weight` (gamma, starts at 1), `bias` (beta, 0), `mean_scale` (lambda,
    1). No buffers: the function is the same in training and evaluation and for any batch size.
    `affine=False` leaves z - mean(z). The other arguments of BatchNorm2d are accepted and ignored.

    This layer keeps its input for its backward, as BatchNorm2d does. Where the convolution before
    it is yours to replace, AGCConv2d computes the same without that.

    >>> layer = AGC2d(8)
    >>> layer(torch.randn(1, 8, 16, 16)).shape
    torch.Size([1, 8, 16, 16])
    """

    _dims = (4,)


class AGC3d(_AGC):
    """AGC (automatic gain control) over volumes (N, C, D, H, W): see AGC2d.

    >>> AGC3d(8)(torch.randn(1, 8, 4, 6, 6)).shape
    torch.Size([1, 8, 4, 6, 6])
    """

    _dims = (5,)
