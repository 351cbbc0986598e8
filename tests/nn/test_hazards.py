"""Maps of one position, where lambda = 1 leaves nothing but the bias."""

import warnings

import pytest
import torch
from torch import nn

from deepcontrol import AGC1d, AGC2d, AGCConv2d, AGCLinear

LAYERS = {
    "AGC2d": (lambda: AGC2d(4), (2, 4, 1, 1)),
    "AGC2d without affine": (lambda: AGC2d(4, affine=False), (2, 4, 1, 1)),
    "AGC1d": (lambda: AGC1d(4), (2, 4)),
    "AGCConv2d": (lambda: AGCConv2d(4, 4, 3), (2, 4, 3, 3)),
    "AGCLinear": (lambda: AGCLinear(4, 1), (2, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_warns_once_and_says_what_to_do(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make()
    with pytest.warns(UserWarning, match=f"{name.split()[0]} got maps of one position.*mean_scale"):
        y = layer(torch.randn(shape))
    assert not y.any()
    layer(torch.randn(shape))  # a second warning would be an error here


@pytest.mark.parametrize("name", LAYERS)
def test_silent_where_there_is_no_hazard(name: str) -> None:
    make, shape = LAYERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().eval()(torch.randn(shape))
        layer = make()
        if layer.mean_scale is not None:
            nn.init.zeros_(layer.mean_scale)
            layer(torch.randn(shape))
    if name == "AGCConv2d":
        make()(torch.randn(2, 4, 5, 5))
