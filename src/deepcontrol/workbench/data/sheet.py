"""Draw a contact sheet of samples and their colored labels."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .sample import Palette, Size, Source


def contact_sheet(
    source: Source, count: int, size: Size, columns: int = 3, first: int = 0
) -> Image.Image:
    """Draw `count` samples from `first` on, each with its colored labels on the right."""
    tiles = []
    for index in range(first, min(first + count, len(source))):
        sample = source.read(index, size)
        tiles.append(np.hstack([sample.image, colored(sample.labels, source.palette)]))
    if not tiles:
        raise ValueError(f"no sample {first} in {source.name}, which has {len(source)} samples")
    height, width, _ = tiles[0].shape
    rows = -(-len(tiles) // columns)
    sheet = np.full((rows * (height + 2) - 2, columns * (width + 2) - 2, 3), 255, np.uint8)
    for i, tile in enumerate(tiles):
        top, left = (i // columns) * (height + 2), (i % columns) * (width + 2)
        sheet[top : top + height, left : left + width] = tile
    return Image.fromarray(sheet)


def colored(labels: NDArray[np.uint8], palette: Palette) -> NDArray[np.uint8]:
    """Map labels (H, W) to colors (H, W, 3). VOID is black."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(palette)] = palette
    return table[labels]
