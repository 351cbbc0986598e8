"""Images and labels from files: read, resized, and refused with the file's name if they are bad."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .sample import DataError, Size

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


def open_image(path: Path) -> Image.Image:
    """The file, decoded whole: a truncated one fails here and not later."""
    with _readable(path), Image.open(path) as image:
        image.load()
    return image


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Pillow's many ways to refuse a file, as one error that names it."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(path, "there is no such file") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(path, f"not a readable image ({error})") from error


# Pillow's modes of at most 8 bits a channel; in others values are lost on the way to RGB.
EIGHT_BITS = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
NOT_TAKEN = "expected a gray, RGB or CMYK image of 8 bits a channel, got {}"


def read_image(path: Path, size: Size) -> NDArray[np.uint8]:
    """An RGB image (H, W, 3), resized with antialiasing."""
    image = open_image(path)
    if image.mode not in EIGHT_BITS:
        raise DataError(path, NOT_TAKEN.format(image.mode))
    image = image.convert("RGB")
    if image.size != size[::-1]:
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(image)


def read_ids(path: Path, size: Size | None = None) -> NDArray[np.int32]:
    """A map of integer ids (H, W) from an image of one channel, resized to the nearest."""
    image = open_image(path)
    if image.mode not in ("L", "P", "I", "I;16"):
        raise DataError(path, f"expected one channel of integer ids, got {image.mode}")
    if size is not None and image.size != size[::-1]:
        image = image.resize(size[::-1], Image.Resampling.NEAREST)
    return np.asarray(image).astype(np.int32)


def native_size(image: Path, *maps: Path) -> Size:
    """Height and width of an image, which must be those of its maps too."""
    size = _size(image)
    for path in maps:
        if _size(path) != size:
            (h, w), (own_h, own_w) = size, _size(path)
            raise DataError(path, f"{own_h}x{own_w} for an image of {h}x{w} ({image.name})")
    return size


def _size(path: Path) -> Size:
    with _readable(path), Image.open(path) as opened:
        return opened.height, opened.width


def list_images(folder: Path) -> tuple[list[Path], list[DataError]]:
    """The images of a folder, sorted by name, and a fault for whatever else lies there."""
    if not folder.is_dir():
        return [], [DataError(folder, "there is no such folder")]
    entries = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    images = [p for p in entries if p.suffix.lower() in IMAGE_SUFFIXES]
    known = ", ".join(IMAGE_SUFFIXES)
    faults = [DataError(p, f"not an image ({known})") for p in entries if p not in set(images)]
    return images, faults if entries else [DataError(folder, f"no images ({known}) in this folder")]


def fingerprint(paths: Iterable[Path], salt: str) -> str:
    """A digest of names, sizes and times of change."""
    digest = hashlib.sha256(salt.encode())
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError:
            raise DataError(path, "there is no such file") from None
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
