"""AGC (automatic gain control) for fully connected layers."""

import torch
from torch import Tensor, nn

from ..ops.activation import ActivationName, activation_name, get_activation
from ..ops.layout import accumulate_dtype
from ..ops.reference import FilterNorm, normalized_filters
from .init import he_filter_norm, he_normal_, reset_all_but_filters_
from .layer import BatchNormFusionGuard, FxLeaf, LoadHint, warn_if_single_position
from .noise import HasNoise, deep_noise


class AGCLinear(FxLeaf, HasNoise, BatchNormFusionGuard, LoadHint, nn.Linear):
    """A linear layer with AGC (automatic gain control) and an activation.

        y = act( gamma * (z - lambda * mean(z)) + beta )        z = x W^T, mean over the features

    The paper does not define AGC for fully connected layers. A unit has no feature map there, so
    the mean of each sample is taken over the out_features of the layer. This mean is linear in x,
    so the layer is an ordinary linear layer with centered filters,

        y = act( x (gamma * (W - lambda * mean of W over its rows))^T + beta )

    without a pass over its output. The extra cost is a centered copy of W.

    With weight_norm=True, W is c W / |W| in these formulas, with |W| the norm of each row of W; see
    AGCConv2d.

    Shapes: (*, in_features) -> (*, out_features).

    Args:
        in_features: Size of each input sample.
        out_features: Size of each output sample.
        activation: "relu", "leaky_relu", "silu", "gelu" or "none"; or nn.ReLU, nn.LeakyReLU,
            nn.SiLU, nn.GELU or nn.Identity, as a class or an instance with default settings.
        weight_norm: Normalize each row of W.
        noise: Deep noise in training, as a standard deviation relative to that over the features.
        bias: Must be True: beta is part of the neuron.

    Attributes:
        weight: W, (out_features, in_features), He fan-in.
        bias: beta, (out_features,), starts at 0.
        gain: gamma, (out_features,), starts at 1.
        mean_scale: lambda, (out_features,), starts at 1.

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, Eq. 1, there for convolutions.

    >>> AGCLinear(8, 4)(torch.randn(1, 8)).shape
    torch.Size([1, 4])
    """

    bias: nn.Parameter
    activation: ActivationName

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: ActivationName | nn.Module | type[nn.Module] | None = "relu",
        weight_norm: bool = False,
        noise: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not bias:
            raise ValueError(
                "AGCLinear does not support bias=False: its bias is beta of Eq. 1. Leave out "
                "bias=False; to keep beta at 0, freeze it with layer.bias.requires_grad_(False)."
            )
        # Before super().__init__(), which calls reset_parameters.
        self.activation = activation_name(activation)
        self.weight_norm = weight_norm
        super().__init__(in_features, out_features, True, device=device, dtype=dtype)
        self.gain = nn.Parameter(torch.ones(out_features, device=device, dtype=dtype))
        self.mean_scale = nn.Parameter(torch.ones(out_features, device=device, dtype=dtype))
        self.noise = noise

    def reset_parameters(self) -> None:
        """Set He fan-in filters, gain = 1, bias = 0, mean_scale = 1."""
        he_normal_(self)
        reset_all_but_filters_(self)  # super().__init__() calls this before the gain exists

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_floating_point():
            raise ValueError(f"expected a floating-point input, got {input.dtype}")
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"expected {self.in_features} features, got an input of shape {tuple(input.shape)}"
            )
        warn_if_single_position(self, self.out_features)
        y = nn.functional.linear(input, self._centered_weight(), self.bias)
        if self.is_noisy and self.training:
            y = deep_noise(y.reshape(-1, self.out_features), self.noise).reshape(y.shape)
        return get_activation(self.activation).apply(y)

    @property
    def filter_norm(self) -> FilterNorm | None:
        """The normalization of the rows of W before the gain; None without weight_norm."""
        return FilterNorm(he_filter_norm(self)) if self.weight_norm else None

    def _centered_weight(self) -> Tensor:
        exact = self.weight.to(accumulate_dtype(self.weight.dtype))
        if self.filter_norm is not None:
            exact = normalized_filters(exact, self.filter_norm)
        centered = exact - self.mean_scale.unsqueeze(1) * exact.mean(0)
        return (self.gain.unsqueeze(1) * centered).to(self.weight.dtype)

    def _fusion_obstacle(self) -> str:
        return "a scale per feature changes its mean over the features"

    def extra_repr(self) -> str:
        weight_norm = ", weight_norm=True" if self.weight_norm else ""
        noise = f", noise={self.noise:g}" if self.noise else ""
        return f"{super().extra_repr()}, activation={self.activation}{weight_norm}{noise}"
