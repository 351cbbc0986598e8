"""A run folder with a small network."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deepcontrol.workbench.data import open_source
from deepcontrol.workbench.train.build import build_model
from deepcontrol.workbench.train.checkpoint import Checkpoint, save_best, save_last
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.config_file import save_config

COLORS = [[200, 0, 0], [0, 200, 0], [0, 0, 200]]


def make_run(
    folder: Path,
    norm: str = "agc",
    size: tuple[int, int] = (256, 512),
    image_size: list[int] | None = None,
) -> Path:
    config = Train(out=folder, norm=norm, width=0.0625, size=size)  # type: ignore[arg-type]
    folder.mkdir()
    derived = {"classes": ["a", "b", "c"], "colors": COLORS}
    if image_size is not None:
        derived["image_size"] = image_size
    save_config(config, derived, {"versions": {}, "commit": None})
    torch.manual_seed(1)
    model = build_model(config, 3)
    torch.nn.init.zeros_(model.get_parameter("classify.bias"))
    save_best(folder, Checkpoint(model.state_dict(), {}))
    # The last checkpoint always predicts the class "a".
    torch.nn.init.constant_(model.get_parameter("classify.bias")[:1], 1e3)
    save_last(folder, Checkpoint(model.state_dict(), {}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with two street scenes, one of them in a subfolder."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    source = open_source("streets", "val", limit=2)
    for index, name in enumerate(("b.png", "more/a.JPG")):
        Image.fromarray(source.read(index, (64, 96)).image).save(folder / name)
    return folder


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))
