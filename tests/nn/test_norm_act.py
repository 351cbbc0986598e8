"""norm_act: AGC and activation as one layer, with timm's arguments."""

import pytest
import torch
from torch import nn

from deepcontrol import AGC2d
from deepcontrol.nn import norm_act


def test_computes_agc_then_the_activation() -> None:
    layer = norm_act(nn.SiLU)(8, inplace=True)
    x = torch.randn(2, 8, 5, 7)
    torch.testing.assert_close(layer(x), nn.functional.silu(AGC2d(8)(x)))


def test_accepts_the_arguments_of_batchnorm() -> None:
    layer = norm_act()(8, 1e-3, 0.01, apply_act=False, dtype=torch.float64, device="meta")
    assert type(layer) is AGC2d
    assert layer.weight.dtype == torch.float64
    assert layer.weight.is_meta
    assert norm_act()(8, affine=False)[0].weight is None


def test_each_layer_has_its_own_activation() -> None:
    make = norm_act(nn.PReLU)  # which has parameters
    assert make(8)[1] is not make(8)[1]


def test_unknown_argument_raises() -> None:
    with pytest.raises(TypeError, match="apply_activation"):
        norm_act()(8, apply_activation=False)
