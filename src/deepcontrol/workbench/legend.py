"""Draw class legends and captions under pictures. This module does not import torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

INK, SOFT, PAPER = (28, 39, 51), (91, 104, 118), (255, 255, 255)
TEXT_SIZE, LINE_HEIGHT, MARGIN = 13, 20, 6  # pixels
CHIP = 12  # side of a color's square
MAX_NAME_WIDTH = 240

Color = tuple[int, int, int]
Pixels = NDArray[np.uint8]  # (H, W, 3)


def draw_legend(entries: Sequence[tuple[str, Color]], width: int) -> Pixels:
    """Draw names with their colors, in as many rows as a picture of this width needs."""
    font = ImageFont.load_default(TEXT_SIZE)
    names = [
        fit_text(name, font, min(MAX_NAME_WIDTH, width - CHIP - 3 * MARGIN)) for name, _ in entries
    ]
    places: list[tuple[int, int]] = []
    left = MARGIN
    row = 0
    for name in names:
        needed = CHIP + MARGIN + round(font.getlength(name)) + 2 * MARGIN
        if left > MARGIN and left + needed > width:
            row, left = row + 1, MARGIN
        places.append((left, row))
        left += needed
    strip = Image.new("RGB", (width, (row + 1) * LINE_HEIGHT + MARGIN), PAPER)
    draw = ImageDraw.Draw(strip)
    for name, (_, color), (x, line) in zip(names, entries, places, strict=True):
        y = line * LINE_HEIGHT + MARGIN
        draw.rectangle((x, y, x + CHIP, y + CHIP), color, SOFT)
        draw.text((x + CHIP + MARGIN, y - 2), name, INK, font)
    return np.asarray(strip)


def draw_captions(texts: Sequence[str], width: int, color: Color = INK) -> Pixels:
    """Draw one line with a text over each of several columns of equal width."""
    font = ImageFont.load_default(TEXT_SIZE)
    strip = Image.new("RGB", (width * len(texts), LINE_HEIGHT), PAPER)
    draw = ImageDraw.Draw(strip)
    for i, text in enumerate(texts):
        draw.text((i * width + 3, 1), fit_text(text, font, width - 6), color, font)
    return np.asarray(strip)


def fit_text(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    """Shorten a text to a width in pixels."""
    text = text.encode("latin-1", "replace").decode("latin-1")  # the font has no other letters
    while len(text) > 1 and font.getlength(text) > width:
        text = text[:-1]
    return text
