"""Small datasets of noise on disk, in the layouts of the real ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def save(array: np.ndarray, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


@pytest.fixture
def camvid_root(tmp_path: Path) -> Path:
    """Six training images (one JPEG) and two for validation, 24x32."""
    rng = np.random.default_rng(0)
    root = tmp_path / "camvid"
    for split, count in (("train", 6), ("val", 2)):
        for i in range(count):
            suffix = "jpg" if i == 1 else "png"
            save(rng.integers(0, 256, (24, 32, 3), np.uint8), root / split / f"{i}.{suffix}")
            labels = rng.integers(0, 12, (24, 32)).astype(np.uint8)
            labels[0, 0] = 255
            save(labels, root / f"{split}annot" / f"{i}.png")
    return root


@pytest.fixture
def cityscapes_root(tmp_path: Path) -> Path:
    """Three training images in two cities and one for validation, 16x32."""
    rng = np.random.default_rng(1)
    root = tmp_path / "cityscapes"
    for split, city, count in (("train", "aachen", 2), ("train", "ulm", 1), ("val", "bonn", 1)):
        for i in range(count):
            stem = f"{city}_{i:06d}_000019"
            image = rng.integers(0, 256, (16, 32, 3), np.uint8)
            save(image, root / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png")
            labels = rng.integers(0, 34, (16, 32)).astype(np.uint8)
            save(labels, root / "gtFine" / split / city / f"{stem}_gtFine_labelIds.png")
            instances = np.where(
                labels >= 24, labels * np.int32(1000) + rng.integers(0, 9, (16, 32)), labels
            )
            path = root / "gtFine" / split / city / f"{stem}_gtFine_instanceIds.png"
            save(instances.astype(np.uint16), path)
    return root


@pytest.fixture
def saved() -> Callable[[np.ndarray, Path], Path]:
    return save
