"""Norms that torch does not have, in plain torch, to compare AGC with.

Statistics are computed in fp32 for inputs in reduced precision.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ...ops.layout import accumulate_dtype


class FilterResponseNorm2d(nn.Module):
    """Filter Response Normalization with its threshold (Singh & Krishnan, 2020).

        y = max(gamma * z / sqrt(mean(z^2) + eps) + beta, tau)

    The mean is over H and W, per sample and channel. The learned threshold tau (thresholded linear
    unit) replaces ReLU.

    Paper: https://arxiv.org/abs/1911.09737

    Args:
        channels: Number of channels.
        eps: Added to the mean square.
        activation: Apply the threshold. Without it, y is the normalized and affine map, as at the
            end of a residual branch.
    """

    threshold: nn.Parameter | None

    def __init__(self, channels: int, eps: float = 1e-6, activation: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.threshold = nn.Parameter(torch.empty(channels)) if activation else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set gamma = 1, beta = 0 and tau = 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        if self.threshold is not None:
            nn.init.zeros_(self.threshold)

    def forward(self, z: Tensor) -> Tensor:
        exact = z.to(accumulate_dtype(z.dtype))
        power = exact.square().mean((2, 3), keepdim=True)
        gain = self.weight[:, None, None] * torch.rsqrt(power + self.eps)
        y = gain * exact + self.bias[:, None, None]
        if self.threshold is not None:
            y = torch.maximum(y, self.threshold[:, None, None])
        return y.to(z.dtype)


class ThresholdedLinearUnit2d(nn.Module):
    """FRN's activation alone, max(x, tau), as after a residual addition.

    Paper: https://arxiv.org/abs/1911.09737
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set tau = 0, which is ReLU."""
        nn.init.zeros_(self.threshold)

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(x, self.threshold[:, None, None].to(x.dtype))


class EvoNorm2dS0(nn.Module):
    """EvoNorm-S0: normalization and activation in one layer (Liu et al., 2020).

        y = gamma * x * sigmoid(v * x) / sqrt(var(x) + eps) + beta

    The variance is over H, W and the channels of a group, per sample.

    Paper: https://arxiv.org/abs/2004.02967

    Args:
        channels: Number of channels.
        groups: Number of groups of channels. It must divide `channels`.
        eps: Added to the variance.
        activation: Without it, y = gamma * x + beta, for the end of a residual branch. An
            EvoNorm-S0 after the addition normalizes the sum.
    """

    v: nn.Parameter | None

    def __init__(
        self, channels: int, groups: int, eps: float = 1e-5, activation: bool = True
    ) -> None:
        super().__init__()
        if channels % groups:
            raise ValueError(f"groups must divide the {channels} channels, got {groups} groups")
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.v = nn.Parameter(torch.empty(channels)) if activation else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set gamma = 1, beta = 0 and v = 1."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        if self.v is not None:
            nn.init.ones_(self.v)

    def forward(self, x: Tensor) -> Tensor:
        exact = x.to(accumulate_dtype(x.dtype))
        gain = self.weight[:, None, None]
        if self.v is not None:
            grouped = exact.unflatten(1, (self.groups, -1))
            scale = torch.rsqrt(grouped.var((2, 3, 4), correction=0) + self.eps)
            scale = scale.repeat_interleave(x.shape[1] // self.groups, 1)[:, :, None, None]
            gain = gain * scale * torch.sigmoid(self.v[:, None, None] * exact)
        return (gain * exact + self.bias[:, None, None]).to(x.dtype)


class _WeightStandardized(_ConvNd):
    """Standardize the filters of a convolution before every use."""

    eps = 1e-5

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.standardized_weight(), self.bias)

    def standardized_weight(self) -> Tensor:
        """Return the filters with mean 0 and variance 1, each over its own elements."""
        dims = tuple(range(1, self.weight.dim()))
        exact = self.weight.to(accumulate_dtype(self.weight.dtype))
        variance, mean = torch.var_mean(exact, dims, correction=0, keepdim=True)
        return ((exact - mean) * torch.rsqrt(variance + self.eps)).to(self.weight.dtype)


class WeightStandardizedConv2d(_WeightStandardized, nn.Conv2d):
    """nn.Conv2d with weight standardization (Qiao et al., 2019).

        y = x * (W - mean(W)) / sqrt(var(W) + eps)

    Mean and variance are over the elements of each filter. A GroupNorm follows the convolution.

    Paper: https://arxiv.org/abs/1903.10520
    """


class WeightStandardizedConv3d(_WeightStandardized, nn.Conv3d):
    """nn.Conv3d with weight standardization; see WeightStandardizedConv2d."""
