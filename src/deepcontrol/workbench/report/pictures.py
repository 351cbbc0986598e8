"""Sample pictures, made small enough for a page that holds them itself."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

WIDEST, NARROWEST = 1600, 800  # pixels


def chosen(samples: Sequence[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """The first and the last: where a run came from, and where it is."""
    return [*samples[:1], *samples[1:][-1:]]


def picture_uri(path: Path) -> str:
    """A picture as text for an <img>; ValueError if it is none."""
    return f"data:image/jpeg;base64,{base64.b64encode(as_jpeg(path)).decode()}"


def as_jpeg(path: Path) -> bytes:
    """A picture, small; ValueError if it is none."""
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path.name} is not a readable picture ({error})") from error
    image.thumbnail((WIDEST, 4 * WIDEST))
    larger = -(-NARROWEST // image.width)  # small pictures as whole squares, not blurred
    image = image.resize((larger * image.width, larger * image.height), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=88, subsampling=0)  # labels' colors keep their borders
    return file.getvalue()
