"""Networks of one's own, by module and function; other libraries are in tests/zoo."""

import sys
from pathlib import Path

import pytest
import torch

from deepcontrol import AGCConv2d
from deepcontrol.workbench.models import build_external, external_task
from deepcontrol.workbench.models.external import logits_of

SOURCE = """
from torch import nn

def plain(classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, classes, 1),
    )

class Half(nn.Sequential):
    def forward(self, x):
        return {"out": super().forward(x[..., ::2, ::2]), "aux": None}

def half(classes, in_channels):
    return Half(*plain(classes, in_channels))

def classifier(classes, in_channels):
    return nn.Sequential(*plain(classes, in_channels), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def wrong(classes, in_channels):
    return plain(classes + 1, in_channels)

def nothing(classes, in_channels):
    return "a network"

def no_batchnorm(classes, in_channels):
    return nn.Conv2d(in_channels, classes, 1)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_networks.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)


@pytest.mark.parametrize("name", ["plain", "half"])
def test_segmentation(name: str) -> None:
    model = build_external(f"own_networks:{name}", "segmentation", 3, "agc", 5, (40, 64))
    assert model.training
    assert sum(isinstance(m, AGCConv2d) for m in model.modules()) == 1
    assert model(torch.randn(2, 5, 33, 47)).shape == (2, 3, 33, 47)
    same = build_external(f"own_networks:{name}", "segmentation", 3, "agc", 5, (40, 64))
    other = build_external(f"own_networks:{name}", "segmentation", 3, "agc", 5, (40, 64), seed=1)
    weights, again, others = (next(m.parameters()) for m in (model, same, other))
    assert torch.equal(weights, again)
    assert not torch.equal(weights, others)


def test_batchnorm_stays() -> None:
    before = torch.get_rng_state()
    model = build_external("own_networks:classifier", "classification", 3, "bn")
    assert torch.equal(torch.get_rng_state(), before)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert [int(norm.num_batches_tracked) for norm in norms] == [0]
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_networks:missing", "module 'own_networks' has no function 'missing'"),
        ("no_such_module:f", "no module 'no_such_module' in .* expected timm:, smp:, torchvision:"),
        ("own_networks:nothing", "returned str, expected a torch.nn.Module"),
        ("own_networks:wrong", r"logits of shape \(1, 4, 64, 64\).* expected \(1, 3, 64, 64\)"),
        ("own_networks:classifier", r"expected \(1, 3, 64, 64\)"),
    ],
)
def test_mistakes_are_explained(name: str, message: str) -> None:
    with pytest.raises((ValueError, IndexError), match=message):
        build_external(name, "segmentation", 3, "bn")


def test_other_norms_are_refused() -> None:
    with pytest.raises(ValueError, match="supports the norms agc and bn, got gn"):
        build_external("own_networks:plain", "segmentation", 3, "gn")
    with pytest.raises(ValueError, match="--pretrained is for timm, smp and torchvision"):
        build_external("own_networks:plain", "segmentation", 3, "bn", pretrained=True)
    with pytest.raises(ValueError, match="has no BatchNorm to convert: train it as it is"):
        build_external("own_networks:no_batchnorm", "segmentation", 3, "agc")


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("timm", "segmentation_models_pytorch", "torchvision"):
        monkeypatch.setitem(sys.modules, name, None)
    for model, package in (
        ("timm:resnet18", "pip install timm"),
        ("smp:Unet", "pip install segmentation-models-pytorch"),
        ("torchvision:resnet18", "pip install torchvision"),
    ):
        with pytest.raises(ValueError, match=package):
            build_external(model, external_task(model) or "segmentation", 3, "agc")


def test_missing_dependency_of_a_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timm.py").write_text("import httpx_of_nobody")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(ValueError, match=r"cannot be imported .*httpx_of_nobody"):
        build_external("timm:resnet18", "classification", 3, "agc")


def test_outputs() -> None:
    logits = torch.zeros(1)
    for outputs in (logits, {"logits": logits}, (logits, 3), [logits]):
        assert logits_of(outputs) is logits
    for wrong in ({"a": logits}, "text", ()):
        with pytest.raises(ValueError, match="expected a tensor of logits"):
            logits_of(wrong)


@pytest.mark.parametrize(
    "name", ["smp:Unet/tu-hf-hub:someone/something", "timm:local-dir:/tmp/x", "os:path:join"]
)
def test_names_of_other_places_are_refused(name: str) -> None:
    """A run folder could otherwise choose weights to download, and a file format that runs code."""
    with pytest.raises(ValueError, match="itself, got"):
        external_task(name)
