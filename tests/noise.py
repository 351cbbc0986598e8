"""A small dataset of noise in the CamVid layout."""

from pathlib import Path

import numpy as np
from PIL import Image


def make_camvid(root: Path) -> Path:
    """Write two training and two validation images of 32x64."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for folder, shape in ((split, (32, 64, 3)), (f"{split}annot", (32, 64))):
            (root / folder).mkdir(parents=True)
            for i in range(2):
                pixels = rng.integers(11, size=shape).astype(np.uint8)
                Image.fromarray(pixels).save(root / folder / f"{i}.png")
    return root


def make_cifar(root: Path, train: int = 64, val: int = 20) -> Path:
    """Write CIFAR-10 in its binary format: noise with a brightness and a color of its class."""
    rng = np.random.default_rng(0)
    root.mkdir(parents=True)
    counts = [len(range(i, train, 5)) for i in range(5)]
    names = [f"data_batch_{i + 1}.bin" for i in range(5)]
    for name, count in zip([*names, "test_batch.bin"], [*counts, val], strict=True):
        labels = rng.integers(0, 10, count).astype(np.uint8)
        base = np.stack([20 * labels, 200 - 20 * labels, 25 * (labels % 4)], 1)
        noise = rng.integers(0, 40, (count, 3, 32 * 32))
        records = (base[:, :, None] + noise).reshape(count, -1).astype(np.uint8)
        np.concatenate([labels[:, None], records], 1).tofile(root / name)
    return root
