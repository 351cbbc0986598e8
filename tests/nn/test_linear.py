"""AGCLinear: Eq. 1 with the mean over the features."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from deepcontrol import AGCLinear
from deepcontrol.ops.activation import ACTIVATIONS


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(5, 6), (6,), (2, 3, 6), (0, 6)], ids=str)
def test_equals_eq_1_over_features(activation: str, shape: tuple[int, ...]) -> None:
    layer = AGCLinear(6, 4, activation=activation).double()
    for parameter in (layer.gain, layer.bias, layer.mean_scale):
        nn.init.normal_(parameter)
    x = torch.randn(shape, dtype=torch.float64)
    z = x @ layer.weight.T
    expected = layer.gain * (z - layer.mean_scale * z.mean(-1, keepdim=True)) + layer.bias
    torch.testing.assert_close(
        layer(x), ACTIVATIONS[activation].apply(expected), rtol=1e-12, atol=1e-12
    )


def test_gradcheck() -> None:
    layer = AGCLinear(3, 4, activation="none").double()
    names = [n for n, _ in layer.named_parameters()]

    def f(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x)

    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(f, (x, *layer.parameters()))


def test_is_an_nn_linear_and_rejects_wrong_inputs() -> None:
    layer = AGCLinear(6, 4)
    assert isinstance(layer, nn.Linear)
    assert "activation=relu" in repr(layer)
    with pytest.raises(ValueError, match=r"expected 6 features, got an input of shape \(2, 5\)"):
        layer(torch.randn(2, 5))
    with pytest.raises(ValueError, match="int64"):
        layer(torch.ones(2, 6, dtype=torch.int64))
