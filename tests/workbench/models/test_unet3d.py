"""3-D U-Nets: structure, saved tensors and gradients."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from deepcontrol.nn import AGCConv3d, saved_bytes
from deepcontrol.workbench.models import NnUNet3d, Norm, UNet3d, is_agc

NORMS = ("agc", "agc+wn", "agc+ws", "bn", "gn", "in", "ln", "ws+bn", "ws+gn", "none")


def test_counts() -> None:
    """FLOPs count multiply-adds twice, for one volume of 64x64x64."""
    with torch.device("meta"):
        model, x = UNet3d(1, 3), torch.empty(1, 1, 64, 64, 64)
    assert sum(p.numel() for p in model.parameters()) == 16_546_723
    with FlopCounterMode(display=False) as counter:
        assert model(x).shape == (1, 3, 64, 64, 64)
    assert counter.get_total_flops() / 1e9 == pytest.approx(118.161, abs=5e-4)


def test_parts() -> None:
    with torch.device("meta"):
        model = UNet3d(1, 3)
    down, up = (
        [m for m in part.modules() if isinstance(m, AGCConv3d)]
        for part in (model.encoder, model.decoder)
    )
    assert [m.out_channels for m in down] == [32, 32, 64, 64, 128, 128, 256, 256, 320, 320]
    assert [m.stride[0] for m in down] == [1, 1] + [2, 1] * 4
    assert [m.in_channels for m in up] == [512, 256, 256, 128, 128, 64, 64, 32]
    assert {m.kernel_size for m in down + up} == {(3, 3, 3)}
    assert {m.activation for m in down + up} == {"relu"}
    doubling = [m for m in model.modules() if isinstance(m, nn.ConvTranspose3d)]
    assert [(m.in_channels, m.out_channels) for m in doubling] == [
        (320, 256),
        (256, 128),
        (128, 64),
        (64, 32),
    ]
    assert {(m.kernel_size, m.stride) for m in doubling} == {((2, 2, 2), (2, 2, 2))}


@pytest.mark.parametrize("norm", NORMS)
def test_forward_and_backward_with_every_norm(norm: str) -> None:
    model = UNet3d(2, 3, width=0.125, norm=norm)
    logits = model(torch.randn(2, 2, 16, 32, 32))
    assert logits.shape == (2, 3, 16, 32, 32)
    assert 0.1 < logits.std() < 3
    labels = torch.randint(0, 3, (2, 16, 32, 32))
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    assert any(isinstance(m, AGCConv3d) for m in model.modules()) == is_agc(norm)


@torch.no_grad()
def test_agc_samples_are_independent() -> None:
    model, x = UNet3d(1, 3, width=0.125), torch.randn(3, 1, 16, 32, 32)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


def test_agc_saves_as_much_as_no_normalization() -> None:
    with torch.device("meta"):
        x = torch.empty(2, 1, 64, 64, 64)
        saved = {norm: saved_bytes(UNet3d(1, 3, norm=norm), x) for norm in ("agc", "none", "in")}
    assert saved["agc"] <= 1.05 * saved["none"]
    assert saved["in"] > 1.6 * saved["none"]


def test_invalid_inputs_raise() -> None:
    with pytest.raises(ValueError, match=r"'batch'.*agc, agc\+wn, agc\+ws, bn, gn, in, ln, frn"):
        UNet3d(1, 3, norm="batch")  # type: ignore[arg-type]
    for norm in ("frn", "evonorm-s0"):
        with pytest.raises(ValueError, match=rf"'{norm}' supports only 2 dimensions, got 3"):
            UNet3d(1, 3, norm=norm)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="width must be positive, got 0"):
        UNet3d(1, 3, width=0)
    model = UNet3d(1, 3, width=0.125)
    with pytest.raises(ValueError, match=r"\(N, 1, D, H, W\), got \(1, 2, 16, 16, 16\)"):
        model(torch.randn(1, 2, 16, 16, 16))
    with pytest.raises(ValueError, match=r"\(N, 1, D, H, W\), got \(1, 16, 16, 16\)"):
        model(torch.randn(1, 16, 16, 16))
    with pytest.raises(ValueError, match=r"multiples of 16, got \(16, 24, 32\)"):
        model(torch.randn(1, 1, 16, 24, 32))


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
