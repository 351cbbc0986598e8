"""ResNet-50: its structure, initialization and saved tensors."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from deepcontrol import AGCConv2d, he_init_
from deepcontrol.nn import saved_bytes
from deepcontrol.nn.init import CENTERING_GAIN
from deepcontrol.workbench.models import NORMS, ResNet50, is_agc


def pictures(count: int, side: int = 64) -> Tensor:
    """Draw smooth images with different brightness and contrast."""
    coarse = torch.randn(count, 3, side // 8, side // 8)
    smooth = nn.functional.interpolate(coarse, scale_factor=8.0, mode="bilinear")
    x = smooth * torch.rand(count, 1, 1, 1) + torch.randn(count, 3, 1, 1)
    return (x - x.mean()) / x.std()


@pytest.mark.parametrize(
    ("norm", "parameters"), [("bn", 25_557_032), ("none", 25_530_472), ("agc", 25_583_592)]
)
def test_counts_match_torchvision(norm: str, parameters: int) -> None:
    """FLOPs count multiply-adds twice, for one image of 224x224."""
    with torch.device("meta"):
        model, x = ResNet50(norm=norm), torch.empty(1, 3, 224, 224)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 53
    with FlopCounterMode(display=False) as counter:
        assert model(x).shape == (1, 1000)
    assert counter.get_total_flops() / 1e9 == pytest.approx(8.18, abs=5e-3)


def test_stride_is_in_the_3x3_convolution() -> None:
    with torch.device("meta"):
        model = ResNet50()
    strided = [m for m in model.stages.modules() if isinstance(m, nn.Conv2d) and m.stride != (1, 1)]
    assert [m.kernel_size for m in strided] == [(3, 3), (1, 1)] * 3  # branch, then shortcut


@pytest.mark.parametrize("norm", NORMS)
def test_forward_and_backward_with_every_norm(norm: str) -> None:
    model = ResNet50(5, norm)
    loss = nn.functional.cross_entropy(model(pictures(2)), torch.tensor([0, 3]))
    loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    assert any(isinstance(m, AGCConv2d) for m in model.modules()) == is_agc(norm)


@torch.no_grad()
def test_initial_logits_with_agc_have_unit_scale_and_vary() -> None:
    """ReLU follows the sum, so that the pooled features are not the constant beta."""
    model, x = ResNet50(100), pictures(8)
    for start in (model.start_gains_, lambda: he_init_(model)):
        start()
        logits = model(x)
        assert 0.02 < logits.std() < 3
        assert logits.std(0).mean() > 0.2 * logits.std()


def test_agc_branches_start_at_a_quarter() -> None:
    """There are 16 blocks; he_init_ sets all gains to 1, start_gains_ sets all."""
    model = he_init_(ResNet50(5))
    assert all((m.gain == 1).all() for m in model.modules() if isinstance(m, AGCConv2d))
    model.start_gains_()
    for name, layer in model.named_modules():
        if isinstance(layer, AGCConv2d):
            factor = 0.25 if name.endswith("branch.2") else 1.0
            torch.testing.assert_close(
                layer.gain, torch.full_like(layer.gain, factor * CENTERING_GAIN)
            )


@torch.no_grad()
def test_agc_samples_are_independent() -> None:
    model, x = he_init_(ResNet50(10)), pictures(3)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


def test_agc_saves_as_much_as_no_normalization() -> None:
    with torch.device("meta"):
        x = torch.empty(2, 3, 224, 224)
        saved = {norm: saved_bytes(ResNet50(10, norm), x) for norm in ("agc", "none", "bn")}
    assert saved["agc"] <= 1.05 * saved["none"]
    assert saved["bn"] > 1.9 * saved["none"]


def test_invalid_inputs_raise() -> None:
    with pytest.raises(ValueError, match=r"'batch'.*agc, agc\+wn, agc\+ws, bn, gn, in, ln, frn"):
        ResNet50(norm="batch")  # type: ignore[arg-type]
    with torch.device("meta"):
        model = ResNet50(5)
        for shape in [(1, 4, 64, 64), (3, 64, 64)]:
            with pytest.raises(ValueError, match=rf"\(N, 3, H, W\), got \({shape[0]}, "):
                model(torch.empty(shape))
