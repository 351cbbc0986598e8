"""nnU-Net's 3-D networks."""

import pytest
import torch
from torch import nn

from deepcontrol.nn import AGCConv3d
from deepcontrol.workbench.models import NnUNet3d, Norm

RESIDUAL = pytest.mark.parametrize("residual", [False, True])


@RESIDUAL
@pytest.mark.parametrize("norm", ["agc", "bn", "in", "none"])
def test_every_parameter_has_a_gradient(norm: Norm, residual: bool) -> None:
    torch.manual_seed(0)
    model = NnUNet3d(1, 2, 0.03, norm, residual)
    y = model(torch.randn(1, 1, 64, 32, 32))
    assert y.shape == (1, 2, 64, 32, 32)
    y.backward(torch.randn_like(y))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    activations = {type(m) for m in model.modules() if "ReLU" in type(m).__name__}
    assert activations <= {nn.LeakyReLU}
    neurons = [m for m in model.modules() if isinstance(m, AGCConv3d)]
    assert bool(neurons) == (norm == "agc")
    assert {m.activation for m in neurons} <= {"leaky_relu", "none"}


def test_residual_branches_start_small() -> None:
    model = NnUNet3d(1, 2, 0.125, "agc", residual=True)
    gains = {round(m.gain[0].item(), 3) for m in model.modules() if isinstance(m, AGCConv3d)}
    low, high = sorted(gains)
    assert low == pytest.approx(high / 26**0.5, rel=1e-2)  # 26 residual blocks


@RESIDUAL
def test_wrong_sizes_are_refused(residual: bool) -> None:
    with torch.device("meta"):
        model = NnUNet3d(1, 2, 0.125, residual=residual)
        for shape, message in (((1, 2, 32, 32, 32), "volumes"), ((1, 1, 48, 32, 32), "of 32")):
            with pytest.raises(ValueError, match=message):
                model(torch.empty(shape))
