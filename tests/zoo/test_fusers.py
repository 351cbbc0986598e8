"""Tools that fold BatchNorms leave converted models as they are."""

import pytest
import timm
import torch
from timm.utils.model import reparameterize_model

from deepcontrol import fold, to_agc


@pytest.mark.parametrize("name", ["repvgg_a0", "repghostnet_050"])
def test_timm_reparameterize_model(name: str) -> None:
    x = torch.randn(1, 3, 64, 64)
    model = timm.create_model(name, num_classes=10)
    model, report = to_agc(model, init="bn", example=x, report=True)
    assert report.disabled_fusers
    expected = model.eval()(x).detach()
    torch.testing.assert_close(reparameterize_model(model)(x), expected, rtol=0, atol=0)
    folded = reparameterize_model(fold(model))
    torch.testing.assert_close(folded(x), expected, rtol=1e-3, atol=1e-3 * float(expected.std()))


def test_ultralytics_fuse_and_predict() -> None:
    ultralytics = pytest.importorskip("ultralytics")
    x = torch.randn(1, 3, 64, 64)
    yolo = ultralytics.YOLO("yolov8n.yaml")
    yolo.model, report = to_agc(yolo.model, example=x, report=True)
    assert report.count("fused") == len(report)
    assert "fuse" in report.disabled_fusers
    expected = yolo.model.eval()(x)[0]
    image = torch.zeros(64, 64, 3, dtype=torch.uint8).numpy()
    # Above all scores of an untrained model: boxes would need torchvision's compiled operators.
    found = yolo.predict(image, imgsz=64, conf=0.99, device="cpu", verbose=False)
    assert len(found[0].boxes) == 0
    yolo.fuse()
    torch.testing.assert_close(yolo.model(x)[0], expected, rtol=0, atol=0)
