"""Draw validation images with their true and predicted classes."""

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from ..data import BatchStream
from ..data.survey import as_rgb
from .evaluate import evaluating, predict

COLUMNS, ROWS = 8, 4
SIDE = 96  # pixels of an image on the sheet, at least
MARGIN, LINE = 6, 15  # pixels around an image, and of a line of text
RIGHT, WRONG = (28, 39, 51), (200, 30, 30)


def class_sheet(
    model: nn.Module, batches: BatchStream, autocast: torch.dtype | None
) -> NDArray[np.uint8]:
    """Draw a grid of images, spread evenly over the split. Wrong predictions are red.

    Under each image are its class and, after an arrow, a wrong prediction. In distributed training
    all processes must call this function, and all draw the same images.

    Returns:
        The picture, (H, W, 3).
    """
    count = min(COLUMNS * ROWS, len(batches.dataset))
    batch = batches.samples([i * len(batches.dataset) // count for i in range(count)])
    with evaluating(model, batches.device, autocast):
        predicted = predict(model, batch.images).tolist()
    pictures = [_picture(as_rgb(batches.pixels(image))) for image in batch.images]
    return draw_sheet(pictures, batch.labels.tolist(), predicted, batches.dataset.classes)


def draw_sheet(
    pictures: list[Image.Image], labels: list[int], predicted: list[int], classes: tuple[str, ...]
) -> NDArray[np.uint8]:
    """Draw pictures of one size in rows of COLUMNS, with their classes.

    Args:
        pictures: The images.
        labels: True class of each image; negative if it has none.
        predicted: Predicted class of each image.
        classes: Names of the classes.
    """
    width, height = pictures[0].size
    cell = (width + 2 * MARGIN, height + 2 * MARGIN + 2 * LINE)
    rows = -(-len(pictures) // COLUMNS)
    sheet = Image.new("RGB", (cell[0] * min(COLUMNS, len(pictures)), cell[1] * rows), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for i, (picture, label, guess) in enumerate(zip(pictures, labels, predicted, strict=True)):
        left, top = cell[0] * (i % COLUMNS) + MARGIN, cell[1] * (i // COLUMNS) + MARGIN
        is_wrong = label >= 0 and guess != label
        if is_wrong:
            frame = (left - 3, top - 3, left + width + 2, top + height + 2)
            draw.rectangle(frame, outline=WRONG, width=3)
        sheet.paste(picture, (left, top))
        lines = [classes[label] if label >= 0 else "no class"]
        if guess != label:
            lines.append(f"-> {classes[guess]}")
        for number, text in enumerate(lines):
            place = (left, top + height + 2 + LINE * number)
            draw.text(place, _fitting(text, font, width), WRONG if is_wrong else RIGHT, font)
    return np.asarray(sheet)


def _picture(pixels: NDArray[np.uint8]) -> Image.Image:
    """Return pixels (H, W, 3) as a picture, enlarged by a whole factor."""
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    factor = max(1, -(-SIDE // min(picture.size)))
    return picture.resize(
        (factor * picture.width, factor * picture.height), Image.Resampling.NEAREST
    )


def _fitting(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    """Shorten a text to a width in pixels."""
    text = text.encode("latin-1", "replace").decode("latin-1")  # what the font has
    while len(text) > 1 and font.getlength(text) > width:
        text = text[:-1]
    return text
