"""Fashion-MNIST: 28x28 gray images of clothes, in IDX files, plain or compressed (.gz).

There is no validation set. Split "val" is the test set, on which the literature reports errors.

Source: https://github.com/zalandoresearch/fashion-mnist
"""

import gzip
import math
import zlib
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from .decoded import Arrays, DecodedFiles, check_labels, check_split
from .sample import DataError

CLASSES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
SIDE = 28
_PREFIXES = {"train": "train", "val": "t10k"}
_UNSIGNED_BYTE = 8  # type code of IDX


def open_fashion(root: Path, split: str) -> DecodedFiles:
    """Open the training or test images of Fashion-MNIST.

    Args:
        root: Folder with the IDX files, such as train-images-idx3-ubyte.gz.
        split: "train", or "val" for the test set.

    Raises:
        DataError: A file is missing or has unexpected dimensions.
    """
    check_split(split)
    prefix = _PREFIXES[split]
    images = _find(root, f"{prefix}-images-idx3-ubyte")
    labels = _find(root, f"{prefix}-labels-idx1-ubyte")
    with _open(images) as file:
        count, *size = _dimensions(images, file, 3)
    if size != [SIDE, SIDE] or not count:
        raise DataError(
            images, f"{count} images of {'x'.join(map(str, size))} pixels, expected {SIDE}x{SIDE}"
        )
    decode = partial(_decode, images, labels)
    return DecodedFiles(f"fashion-mnist-{split}", CLASSES, (images, labels), decode, count)


def is_fashion(root: Path) -> bool:
    """Return whether a folder has IDX files of either split."""
    names = [f"{prefix}-images-idx3-ubyte" for prefix in _PREFIXES.values()]
    return any((root / f"{name}{suffix}").is_file() for name in names for suffix in ("", ".gz"))


def _find(root: Path, name: str) -> Path:
    for path in (root / name, root / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(root, f"has no {name} or {name}.gz: pass the folder of the IDX files")


def _decode(images: Path, labels: Path) -> Arrays:
    pixels, ids = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(ids):
        raise DataError(labels, f"{len(ids):,} labels for {len(pixels):,} images")
    return pixels[..., None], check_labels(labels, ids, len(CLASSES))


def read_idx(path: Path, dims: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes with `dims` dimensions.

    Raises:
        DataError: The file is damaged, or has another type or number of dimensions.
    """
    with _open(path) as file:
        shape = _dimensions(path, file, dims)
        expected = math.prod(shape)
        try:
            content = file.read(expected + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(path, f"not a readable file ({error})") from error
    if len(content) != expected:
        more = "more than " if len(content) > expected else ""
        raise DataError(
            path,
            f"{more}{min(len(content), expected):,} bytes of data, "
            f"expected {expected:,}: download it again",
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _dimensions(path: Path, file: BinaryIO, dims: int) -> list[int]:
    """Read the header of an IDX file and return its dimensions."""
    try:
        header = file.read(4 + 4 * dims)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(path, f"not a readable file ({error})") from error
    if len(header) != 4 + 4 * dims or header[:4] != bytes((0, 0, _UNSIGNED_BYTE, dims)):
        raise DataError(
            path,
            f"starts with {header[:4].hex(' ') or 'nothing'}, "
            f"expected an IDX file of bytes with {dims} dimensions",
        )
    return np.frombuffer(header[4:], ">u4").tolist()
