"""Images and labels from files: read, resized, and refused with the file's name if they are bad."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .sample import DataError, Size

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


def open_image(path: Path) -> Image.Image:
    """The file, decoded whole: a truncated one fails here and not later."""
    try:
        with Image.open(path) as image:
            image.load()
    except FileNotFoundError:
        raise DataError(path, "there is no such file") from None
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's ways to say "broken"
        raise DataError(path, f"not a readable image ({error})") from error
    return image


def read_image(path: Path, size: Size) -> NDArray[np.uint8]:
    """An RGB image (H, W, 3), resized with antialiasing."""
    image = open_image(path).convert("RGB")
    if image.size != size[::-1]:
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(image)


def read_ids(path: Path, size: Size | None = None) -> NDArray[np.int32]:
    """A map of integer ids (H, W) from an image of one channel, resized to the nearest."""
    image = open_image(path)
    if len(image.getbands()) != 1:
        raise DataError(path, f"expected one channel of ids, got {image.mode}")
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
    try:
        with Image.open(path) as opened:
            return opened.height, opened.width
    except FileNotFoundError:
        raise DataError(path, "there is no such file") from None
    except OSError as error:
        raise DataError(path, f"not a readable image ({error})") from error


def images_in(folder: Path) -> list[Path]:
    """The images of a folder, sorted by name."""
    if not folder.is_dir():
        raise DataError(folder, "there is no such folder")
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
    if not found:
        raise DataError(folder, f"no images ({', '.join(IMAGE_SUFFIXES)}) in this folder")
    return found


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
