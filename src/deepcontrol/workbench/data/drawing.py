"""Draw labeled images: sheets of samples, legends and captions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from .sample import Palette, Size, Source

CAPTION_HEIGHT = 14  # pixels, in a contact sheet
INK, SOFT, PAPER = (28, 39, 51), (91, 104, 118), (255, 255, 255)
TEXT_SIZE, LINE_HEIGHT, MARGIN = 13, 20, 6  # pixels, in a picture of up to FULL_WIDTH
CHIP = 12  # side of a color's square
MAX_NAME_WIDTH = 240
# A page shows wider pictures scaled down to about this width, so text grows with them.
FULL_WIDTH = 640
Color = tuple[int, int, int]
Picture = NDArray[np.uint8]  # (H, W, 3)


def contact_sheet(source: Source, count: int, size: Size) -> Image.Image:
    """Draw the first `count` samples, each with its labels.

    In segmentation, the colored labels are next to the image, in 3 columns. In classification, the
    name of the class is below the image, which is a square with the height of `size`, in 8 columns.
    """
    is_segmentation = source.task == "segmentation"
    columns = 3 if is_segmentation else 8
    tiles = []
    for index in range(min(count, len(source))):
        if is_segmentation:
            sample = source.read(index, size)
            labels = sample.labels.astype(np.uint8)
            tiles.append(np.hstack([sample.image, colored(labels, source.palette)]))
        else:
            sample = source.read(index, (size[0], size[0]))
            tiles.append(_captioned(sample.image, source.classes[int(sample.labels)]))
    if not tiles:
        raise ValueError(f"no sample 0 in {source.name}, which has {len(source)} samples")
    height, width, _ = tiles[0].shape
    rows = -(-len(tiles) // columns)
    sheet = np.full((rows * (height + 2) - 2, columns * (width + 2) - 2, 3), 255, np.uint8)
    for i, tile in enumerate(tiles):
        top, left = (i // columns) * (height + 2), (i % columns) * (width + 2)
        sheet[top : top + height, left : left + width] = tile
    return Image.fromarray(sheet)


def _captioned(image: NDArray[np.uint8], caption: str) -> NDArray[np.uint8]:
    """Draw a caption below an image (H, W, 1 or 3), cut to its width."""
    height, width, channels = image.shape
    tile = np.full((height + CAPTION_HEIGHT, width, 3), 255, np.uint8)
    tile[:height] = image if channels == 3 else image.repeat(3, 2)
    drawn = Image.fromarray(tile)
    text = caption.encode("latin-1", "replace").decode("latin-1")  # the font has no other letters
    ImageDraw.Draw(drawn).text((1, height + 1), text, (0, 0, 0), ImageFont.load_default_imagefont())
    return np.asarray(drawn)


def colored(labels: NDArray[np.uint8], palette: Palette) -> NDArray[np.uint8]:
    """Map labels (H, W) to colors (H, W, 3). VOID is black."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(palette)] = palette
    return table[labels]


def draw_legend(entries: Sequence[tuple[str, Color]], width: int) -> Picture:
    """Draw names with their colors, in as many rows as a picture of this width needs."""
    size, height, margin, chip, longest = _scaled(
        width, TEXT_SIZE, LINE_HEIGHT, MARGIN, CHIP, MAX_NAME_WIDTH
    )
    font = ImageFont.load_default(size)
    names = [fit_text(name, font, min(longest, width - chip - 3 * margin)) for name, _ in entries]
    places: list[tuple[int, int]] = []
    left = margin
    row = 0
    for name in names:
        needed = chip + margin + round(font.getlength(name)) + 2 * margin
        if left > margin and left + needed > width:
            row, left = row + 1, margin
        places.append((left, row))
        left += needed
    strip = Image.new("RGB", (width, (row + 1) * height + margin), PAPER)
    draw = ImageDraw.Draw(strip)
    for name, (_, color), (x, line) in zip(names, entries, places, strict=True):
        y = line * height + margin
        draw.rectangle((x, y, x + chip, y + chip), color, SOFT)
        draw.text((x + chip + margin, y - size // 6), name, INK, font)
    return np.asarray(strip)


def _scaled(width: int, *lengths: int) -> tuple[int, ...]:
    """Return lengths for a picture of this width.

    >>> _scaled(640, 13, 20), _scaled(1280, 13, 20)
    ((13, 20), (26, 40))
    """
    return tuple(max(width, FULL_WIDTH) * length // FULL_WIDTH for length in lengths)


def draw_captions(texts: Sequence[str], width: int) -> Picture:
    """Draw one line with a text over each of several columns of equal width."""
    size, height, margin = _scaled(width * len(texts), TEXT_SIZE, LINE_HEIGHT, 3)
    font = ImageFont.load_default(size)
    strip = Image.new("RGB", (width * len(texts), height), PAPER)
    draw = ImageDraw.Draw(strip)
    for i, text in enumerate(texts):
        place = (i * width + margin, size // 13)
        draw.text(place, fit_text(text, font, width - 2 * margin), INK, font)
    return np.asarray(strip)


def fit_text(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    """Shorten a text to a width in pixels."""
    text = text.encode("latin-1", "replace").decode("latin-1")  # the font has no other letters
    while len(text) > 1 and font.getlength(text) > width:
        text = text[:-1]
    return text
