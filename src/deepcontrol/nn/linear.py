"""AGC (automatic gain control) for fully connected layers, which the paper leaves open."""

import torch
from torch import Tensor, nn

from ..ops.activation import ActivationName, get_activation
from ..ops.layout import accumulate_dtype
from .hazards import warn_if_single_position
from .init import he_normal_, reset_all_but_filters_
from .symbolic import OneNode


class AGCLinear(OneNode, nn.Linear):
    """A fully connected AGC neuron: Eq. 1 with the layer's own features as the map.

        y = act( gamma * (z - lambda * mean(z)) + beta )        z = x W^T, mean over the features

    The paper leaves fully connected layers open. A unit has no map there, so the background of
    each sample is taken over the layer's out_features. Since that mean is linear in x, the whole
    neuron is one ordinary linear layer whose filters are centered,

        y = act( x (gamma * (W - lambda * mean of W over its rows))^T + beta )

    with no pass over its output; what it costs more is a centered copy of W.

    Parameters: `weight` W, `bias` beta (starts at 0), `gain` gamma (1), `mean_scale` lambda (1).
    activation is one of relu, leaky_relu, silu, gelu, none.

    >>> AGCLinear(8, 4)(torch.randn(1, 8)).shape
    torch.Size([1, 4])
    """

    bias: nn.Parameter
    activation: ActivationName

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activation: ActivationName = "relu",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        get_activation(activation)
        self.activation = activation  # before torch's constructor, which resets the parameters
        super().__init__(in_features, out_features, True, device=device, dtype=dtype)
        self.gain = nn.Parameter(torch.ones(out_features, device=device, dtype=dtype))
        self.mean_scale = nn.Parameter(torch.ones(out_features, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """He fan-in filters, gain = 1, bias = 0, mean_scale = 1."""
        he_normal_(self)
        reset_all_but_filters_(self)  # the gain is not there yet while torch's constructor runs

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_floating_point():
            raise ValueError(f"expected a floating-point input, got {input.dtype}")
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"expected {self.in_features} features, got an input of shape {tuple(input.shape)}"
            )
        warn_if_single_position(self, self.out_features)
        y = nn.functional.linear(input, self._centered_weight(), self.bias)
        return get_activation(self.activation).apply(y)

    def _centered_weight(self) -> Tensor:
        exact = self.weight.to(accumulate_dtype(self.weight.dtype))
        centered = exact - self.mean_scale.unsqueeze(1) * exact.mean(0)
        return (self.gain.unsqueeze(1) * centered).to(self.weight.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"
