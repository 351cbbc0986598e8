"""Open image files that others made, and encode pictures for pages.

Pillow knows about 50 formats and chooses one by a file's content, not by its suffix. A file
`photo.png` with PostScript inside would start Ghostscript, and the decoders of rare formats are the
least tested ones. Every image that the workbench reads is therefore opened here, as one of FORMATS.

This module does not import torch, so that `deepcontrol report` starts fast.
"""

import base64
import contextlib
import io
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")  # PPM includes PGM and PBM
ORIENTATION = 0x0112  # EXIF tag
UPRIGHT, MIRRORED, TURNED = 1, (2, 3, 4), (5, 6, 7, 8)  # turned by 90 degrees
# Pictures in pages
MAX_WIDTH, MIN_WIDTH = 1200, 800  # pixels; a page shows two pictures side by side
MAX_HEIGHT = 4 * MAX_WIDTH
MAX_PIXELS = 2**26  # larger pictures are not decoded: a page holds many

Size = tuple[int, int]  # height, width


class ImageError(ValueError):
    """A file is not a readable image. The message says why, without the path."""


@contextlib.contextmanager
def open_header(path: Path) -> Iterator[Image.Image]:
    """Open an image without decoding its pixels.

    Raises:
        ImageError: There is no such file, it is not a regular file, or it is not a readable image
            of a format in FORMATS. All errors of the block, which may decode the image, become
            ImageErrors.
    """
    with open(_open_regular(path), "rb") as file:
        try:
            with Image.open(file, formats=FORMATS) as image:
                yield image
        except ImageError:
            raise
        except MemoryError as error:
            raise ImageError("not enough memory to decode the image") from error
        except UnidentifiedImageError as error:
            known = ", ".join(FORMATS)
            raise ImageError(f"not a readable image ({known})") from error
        except Exception as error:  # decoders raise anything on a damaged file
            detail = str(error) or type(error).__name__
            raise ImageError(f"not a readable image ({detail})") from error


def _open_regular(path: Path) -> int:
    """Return a regular file's descriptor; reading a FIFO or device may never end."""
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise ImageError("no such file" if missing else f"{error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ImageError("not a regular file")
    return descriptor


def open_image(path: Path) -> Image.Image:
    """Decode a whole image and turn it upright, as its EXIF orientation says.

    Raises:
        ImageError: The file is not a readable image.
    """
    with open_header(path) as image:
        orientation = _orientation(image)
        image.load()
        return ImageOps.exif_transpose(image) if orientation != UPRIGHT else image


def upright_size(image: Image.Image) -> Size:
    """Return height and width of an opened image, after its EXIF orientation."""
    is_turned = _orientation(image) in TURNED
    if is_turned and image.format == "TIFF":  # Pillow turns these itself, some versions in load()
        image.load()
        is_turned = _orientation(image) in TURNED
    return (image.width, image.height) if is_turned else (image.height, image.width)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation in the header, or UPRIGHT.

    PNG files may store it after the pixels. It is ignored there, because finding it would mean
    decoding the image.
    """
    try:
        value = Image.Image.getexif(image).get(ORIENTATION)  # PngImageFile.getexif would decode
    except Exception:  # damaged EXIF data do not spoil the pixels
        return UPRIGHT
    return value if value in MIRRORED or value in TURNED else UPRIGHT


def first_and_last(samples: Sequence[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """Return the first and the last of the pictures of a run."""
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
