"""A run folder with a small network and a few street scenes as its dataset."""

from pathlib import Path

import pytest
import torch

from deepcontrol.workbench.data.road_scenes import CLASSES, PALETTE
from deepcontrol.workbench.models import segmentation
from deepcontrol.workbench.train.build import build_model
from deepcontrol.workbench.train.checkpoint import Checkpoint, save_best
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.config_file import save_config


def make_run(folder: Path, model: str = "segnet", norm: str = "agc") -> Path:
    """Make a run whose gains, biases, lambdas and running statistics differ from their start."""
    config = Train(
        out=folder,
        model=model,  # type: ignore[arg-type]
        norm=norm,  # type: ignore[arg-type]
        width=0.0625,
        size=(64, 96),
        train_limit=3,
        val_limit=2,
    )
    folder.mkdir()
    save_config(config, {"classes": CLASSES, "colors": PALETTE}, {"versions": {}, "commit": None})
    network = build_model(config, len(CLASSES))
    generator = torch.Generator().manual_seed(1)
    for value in network.state_dict().values():
        if value.dim() == 1:
            value += 0.2 * torch.rand(value.shape, generator=generator)
    save_best(folder, Checkpoint(network.state_dict(), {}))
    return folder


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use networks with one or two poolings, because exporting all five or seven takes a minute."""
    monkeypatch.setattr(segmentation, "SEGNET_STAGES", ((64, 64), (128,)))
    monkeypatch.setattr(segmentation, "CLASSNET_POOLINGS", 1)
    monkeypatch.setattr(segmentation, "CLASSNET_WIDTHS", segmentation.CLASSNET_WIDTHS[:2])
    monkeypatch.setattr(segmentation, "CLASSNET_CONVOLUTIONS", (1, 1))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the cache out of the home directory. All tests share it, so scenes render once."""
    folder = tmp_path_factory.getbasetemp().parent / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
