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
