"""Samples are independent: a batch computes the same as its samples one by one."""

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, AGCConv2d, AGCLinear


def network() -> nn.Sequential:
    return nn.Sequential(
        AGCConv2d(3, 8, 3, padding=1),
        AGCConv2d(8, 8, 3, padding=1, stride=2, activation="silu"),
        nn.Conv2d(8, 8, 1, bias=False),
        AGC2d(8),
        nn.LeakyReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        AGCLinear(32, 5, activation="gelu"),
    )


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_non_finite_sample_does_not_affect_others(poison: float) -> None:
    model = network()
    x = torch.randn(8, 3, 12, 12)
    g = torch.randn(8, 5)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = model(x)
        (dx,) = torch.autograd.grad(y, x, g)
        return y, dx

    clean, clean_grad = run(x)
    x[3] = poison
    y, dx = run(x)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert not y[3].isfinite().all()
    assert torch.equal(y[others], clean[others])
    assert torch.equal(dx[others], clean_grad[others])


def test_batch_gradients_are_the_sum_over_samples() -> None:
    model = network().double()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.3)
    x = torch.randn(8, 3, 12, 12, dtype=torch.float64)
    g = torch.randn(8, 5, dtype=torch.float64)
    parameters = list(model.parameters())
    whole = model(x)
    grads = torch.autograd.grad(whole, parameters, g)
    single = [model(a) for a in x.split(1)]
    summed = [torch.zeros_like(p) for p in parameters]
    for y, upstream in zip(single, g.split(1), strict=True):
        for total, grad in zip(summed, torch.autograd.grad(y, parameters, upstream), strict=True):
            total += grad
    torch.testing.assert_close(torch.cat(single), whole, rtol=1e-12, atol=1e-12)
    for a, b in zip(summed, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_batchnorm_mixes_samples() -> None:
    """A counterexample: BatchNorm fails the checks of the tests above."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    x = torch.randn(8, 3, 5, 5)
    clean = model(x)
    assert not torch.allclose(torch.cat([model(a) for a in x.split(1)]), clean, atol=1e-3)
    x[3] = torch.nan
    assert model(x)[0].isnan().all()
