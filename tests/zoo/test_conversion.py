"""Conversion of models whose structure misleads a converter, in other libraries."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from deepcontrol import to_agc

IMAGE = torch.randn(1, 3, 64, 64)


def like_trained(model: nn.Module) -> nn.Module:
    """Estimate the statistics of all BatchNorms on a batch; return the model in eval mode."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    for norm in norms:
        norm.momentum = None
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    with torch.no_grad():
        model.train()(torch.randn(4, 3, 64, 64))
    return model.eval()


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0", "mobilenetv3_small_100"])
@pytest.mark.parametrize("kind", ["hook", "default"])
def test_features_are_the_same(name: str, kind: str) -> None:
    options = {"feature_cls": "hook"} if kind == "hook" else {}
    model = timm.create_model(name, features_only=True, **options)
    like_trained(model).double()
    expected = model(IMAGE.double())
    before = copy.deepcopy(model)
    _, report = to_agc(model, init="bn", example=IMAGE.double(), report=True)
    found = model(IMAGE.double())
    assert len(found) == len(expected) == len(before.feature_info)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert report.unverified is None


def test_meta_device_converts_as_the_cpu_does() -> None:
    with torch.device("meta"):
        on_meta = timm.create_model("efficientnet_b0")
    _, report = to_agc(on_meta, init="paper", report=True)
    _, expected = to_agc(timm.create_model("efficientnet_b0"), init="paper", report=True)
    assert [c.kind for c in report] == [c.kind for c in expected]
    assert report.count("skipped") == 0


def test_one_warning_for_many_pooled_layers() -> None:
    """The gates of SENet pool maps that no activation follows."""
    model = timm.create_model("seresnet18")
    with pytest.warns(UserWarning, match=r"7 more \(Report.constant\)") as caught:
        _, report = to_agc(model, example=IMAGE, lam=1.0, report=True)
    assert len([w for w in caught if "global average pooling" in str(w.message)]) == 1
    assert len(report.constant) == 8
    found = set(report.constant)
    model = timm.create_model("seresnet18")
    _, report = to_agc(
        model, example=IMAGE, report=True, lam=lambda name: 0 if name in found else 1
    )
    assert report.constant == ()
