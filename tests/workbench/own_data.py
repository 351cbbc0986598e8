"""A tiny folder of images and masks that tests change and train on."""

from pathlib import Path

import numpy as np
from PIL import Image

COLORS = np.array(((0, 0, 0), (255, 0, 0), (0, 255, 0)), np.uint8)
CLASSES = """\
classes:
  - {name: table, id: 0}
  - {name: apple, id: 1}
  - {name: leaf, id: 2}
ignore: [255]
"""


def draw(index: int, size: tuple[int, int] = (40, 56)) -> tuple[np.ndarray, np.ndarray]:
    """Return an image (H, W, 3) of a red and a green square, and its ids (H, W)."""
    rng = np.random.default_rng(index)
    image = rng.integers(100, 140, (*size, 3)).astype(np.uint8)
    ids = np.zeros(size, np.uint8)
    for label in (1, 2):
        top, left = (int(rng.integers(0, side - 16)) for side in size)
        ids[top : top + 12, left : left + 12] = label
    image[ids > 0] = 0.8 * COLORS[ids[ids > 0]] + 20
    return image, ids


def make_folder(root: Path, count: int = 12, colors: bool = False) -> Path:
    """Write images of two sizes with masks of ids (or colors), and classes.yaml."""
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for i in range(count):
        image, ids = draw(i, (40, 56) if i % 2 else (48, 40))
        Image.fromarray(image).save(root / "images" / f"{i:02d}.png")
        Image.fromarray(COLORS[ids] if colors else ids).save(root / "masks" / f"{i:02d}.png")
    if not colors:
        (root / "classes.yaml").write_text(CLASSES)
    return root
