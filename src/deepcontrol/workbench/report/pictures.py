"""Sample pictures, scaled and encoded for embedding in a page."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from ..imagefile import ImageError, open_header

MAX_WIDTH, MIN_WIDTH = 1200, 800  # pixels; a page shows two pictures side by side
MAX_HEIGHT = 4 * MAX_WIDTH
MAX_PIXELS = 2**26  # larger pictures are not decoded: a page holds many


def first_and_last(samples: Sequence[tuple[int, Path]]) -> list[tuple[int, Path]]:
    return [*samples[:1], *samples[1:][-1:]]


def picture_uri(path: Path) -> str:
    """Return a picture as a data URI; raise ValueError if it cannot be read."""
    return f"data:image/jpeg;base64,{base64.b64encode(as_jpeg(path)).decode()}"


def as_jpeg(path: Path) -> bytes:
    """Return a picture as a small JPEG; raise ValueError if it cannot be read."""
    try:
        with open_header(path) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise ImageError(
                    f"{opened.height}x{opened.width} pixels, expected at most {MAX_PIXELS:,}"
                )
            image = opened.convert("RGB")
    except ImageError as error:
        raise ValueError(f"{path.name} is not a readable picture: {error}") from error
    image.thumbnail((MAX_WIDTH, MAX_HEIGHT))
    # By whole squares, since interpolation would blur labels.
    factor = min(-(-MIN_WIDTH // image.width), max(1, MAX_HEIGHT // image.height))
    image = image.resize((factor * image.width, factor * image.height), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=88, subsampling=0)  # keeps the borders of label colors
    return file.getvalue()
