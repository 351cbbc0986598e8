"""`--model` with networks of timm, segmentation_models_pytorch and torchvision."""

import pytest
import torch

from deepcontrol import AGCConv2d, fold
from deepcontrol.nn import AGC2d
from deepcontrol.workbench.models import build_external, external_task


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("timm:resnet18", 5),
        ("timm:mobilenetv3_small_050", 3),
        ("torchvision:resnet18", 3),
        ("torchvision:mobilenet_v3_small", 3),
        ("smp:Unet/resnet18", 4),
        ("smp:DeepLabV3Plus/resnet18", 3),
        ("smp:FPN/resnet18", 3),
        ("torchvision:lraspp_mobilenet_v3_large", 3),
    ],
)
@pytest.mark.parametrize("norm", ["agc", "bn"])
def test_networks_of_other_libraries(name: str, channels: int, norm: str) -> None:
    task = external_task(name)
    assert task is not None
    model = build_external(name, task, 3, norm, channels, (64, 96))  # type: ignore[arg-type]
    has_agc = any(isinstance(m, (AGCConv2d, AGC2d)) for m in model.modules())
    has_bn = any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
    assert (has_agc, has_bn) == (norm == "agc", norm == "bn")
    images = torch.randn(2, channels, 64, 96)
    logits = model(images)
    assert logits.shape == ((2, 3, 64, 96) if task == "segmentation" else (2, 3))
    logits.square().mean().backward()
    assert torch.isfinite(next(model.parameters()).grad).all()
    if norm == "agc":
        torch.testing.assert_close(fold(model.eval())(images), model(images), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:resnet1", r"timm has no model 'resnet1': did you mean"),
        ("smp:Unett", "has no 'Unett': choose one of .*Unet"),
        ("torchvision:resnet19", "torchvision has no model 'resnet19'"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_external(name, external_task(name) or "segmentation", 3, "agc")


def test_torchvision_takes_rgb_only() -> None:
    with pytest.raises(ValueError, match="needs images with 3 channels, got 5"):
        build_external("torchvision:resnet18", "classification", 3, "agc", 5)
