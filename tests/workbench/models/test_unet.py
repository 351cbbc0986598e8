"""The residual U-Net and ResNet-18: shapes, gains, receptive field."""

import pytest
import torch

from deepcontrol.nn.init import CENTERING_GAIN
from deepcontrol.workbench.models import NORMS, ResNet18, UNet, build


@pytest.mark.parametrize("norm", NORMS)
def test_any_norm_and_channels(norm: str) -> None:
    model = build("unet", 4, norm, width=0.125, in_channels=5)  # type: ignore[arg-type]
    logits = model(torch.randn(2, 5, 37, 64))
    assert logits.shape == (2, 4, 37, 64)
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    classifier = build("resnet18", 4, norm, width=0.125, in_channels=2)  # type: ignore[arg-type]
    assert classifier(torch.randn(2, 2, 65, 64)).shape == (2, 4)


def test_branches_start_small() -> None:
    for model, blocks in ((UNet(3, 0.125), 9), (ResNet18(3, width=0.125), 8)):
        model.start_gains_()
        gains = [p.flatten()[0].item() for n, p in model.named_parameters() if n.endswith("gain")]
        assert sum(g == pytest.approx(CENTERING_GAIN / blocks**0.5) for g in gains) == blocks
        assert sum(g == pytest.approx(CENTERING_GAIN) for g in gains) == len(gains) - blocks


def test_receptive_radius_is_a_bound() -> None:
    """The logits of a column depend on no pixel beyond the radius from an aligned border."""
    model = UNet(2, 0.125, norm="none").double()
    size, border = 352, 176  # a multiple of the stride
    x = torch.randn(1, 3, 16, size, dtype=torch.float64, requires_grad=True)
    model(x)[..., border:].square().sum().backward()
    assert x.grad is not None
    reached = border - int(x.grad.abs().sum((0, 1, 2)).nonzero()[0])
    assert 0 < reached <= UNet.receptive_radius


def test_wrong_channels_raise() -> None:
    with pytest.raises(ValueError, match=r"expected images \(N, 5, H, W\), got \(1, 3, 32, 32\)"):
        UNet(2, 0.125, in_channels=5)(torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match=r"expected images \(N, 1, H, W\)"):
        ResNet18(2, width=0.125, in_channels=1)(torch.randn(1, 3, 64, 64))
    with pytest.raises(ValueError, match=r"segnet needs images with 3 channels, got 5.*unet"):
        build("segnet", 2, "agc", in_channels=5)
