"""Read masks, files of ids or colors, as classes."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .classfile import ClassFile, hex_color
from .pixels import SIXTEEN_BIT_MODES, load_npy, open_image
from .sample import VOID, DataError

UNKNOWN = 254  # marks values without a class; there are at most 254 classes, 0 to 253
LOSSY_SUFFIXES = (".jpg", ".jpeg")
REMEDY = "Correct the mask, or list it in the class file, under classes or ignore"


def read_mask(path: Path, classes: ClassFile) -> NDArray[np.uint8]:
    """Read a mask (H, W) as class numbers, VOID for pixels to ignore.

    Raises:
        DataError: The mask has a value or color that is not in the class file.
    """
    if classes.has_ids:
        return _map_ids(path, decode_ids(path), classes)
    return _map_colors(path, decode_colors(path), classes)


def decode_ids(path: Path) -> NDArray[np.int32]:
    """Read the ids (H, W) of a mask: index, palette or gray image, or equal RGB."""
    if path.suffix.lower() == ".npy":
        array = load_npy(path)
    else:
        image = open_mask(path)
        if image.mode in ("RGB", "RGBA"):
            array = np.asarray(image.convert("RGB"))
            if (array != array[..., :1]).any():
                raise DataError(
                    path,
                    "a mask of colors, expected one channel of ids: list the colors of the classes "
                    "in place of their ids in the class file (`deepcontrol data init` does)",
                )
            array = array[..., 0]
        else:
            array = np.asarray(image if image.mode != "LA" else image.getchannel(0))
    if array.ndim != 2 or array.dtype.kind not in "bui":
        raise DataError(
            path, f"{array.dtype} of shape {array.shape}, expected integers of shape (H, W)"
        )
    return array.astype(np.int32)


def decode_colors(path: Path) -> NDArray[np.uint8]:
    """Read the colors (H, W, 3) of a mask."""
    if path.suffix.lower() == ".npy":
        array = load_npy(path)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
            raise DataError(
                path, f"{array.dtype} of shape {array.shape}, expected uint8 of shape (H, W, 3)"
            )
        return array
    image = open_mask(path)
    if image.mode in SIXTEEN_BIT_MODES:
        raise DataError(path, f"a mask of ids ({image.mode}), expected the colors of the classes")
    return np.asarray(image.convert("RGB"))


def open_mask(path: Path) -> Image.Image:
    """Open a mask; raise DataError for a lossy format, which changes its values."""
    if path.suffix.lower() in LOSSY_SUFFIXES:
        raise DataError(
            path, "a JPEG mask: its compression changes the values at edges. Save masks as PNG"
        )
    return open_image(path)


def _map_ids(path: Path, ids: NDArray[np.int32], classes: ClassFile) -> NDArray[np.uint8]:
    table = np.full(65536, UNKNOWN, np.uint8)
    table[list(classes.ignored_ids)] = VOID
    table[list(classes.ids)] = np.arange(len(classes.ids))
    labels = table[ids.clip(0, 65535)]
    bad = (labels == UNKNOWN) | (ids < 0) | (ids > 65535)
    if bad.any():
        values, counts = np.unique(ids[bad], return_counts=True)
        worst = counts.argmax()
        raise DataError(
            path,
            f"value {values[worst]} in {_share(counts[worst], bad.size)}"
            f"{_others(len(values), 'value')}, expected {classes.expected}. {REMEDY}",
        )
    return labels


def _map_colors(path: Path, colors: NDArray[np.uint8], classes: ClassFile) -> NDArray[np.uint8]:
    packed = pack_colors(colors)
    found, inverse, counts = np.unique(packed, return_inverse=True, return_counts=True)
    known = {int(pack_colors(np.array(c, np.uint8))): i for i, c in enumerate(classes.colors)}
    known |= {int(pack_colors(np.array(c, np.uint8))): VOID for c in classes.ignored_colors}
    numbers = np.array([known.get(int(value), UNKNOWN) for value in found], np.uint8)
    bad = numbers == UNKNOWN
    if bad.any():
        worst = int(np.where(bad, counts, 0).argmax())
        raise DataError(
            path,
            f"color {hex_color(unpack_color(int(found[worst])))} in "
            f"{_share(counts[worst], packed.size)}{_others(int(bad.sum()), 'color')}, "
            f"expected {classes.expected}. {REMEDY}",
        )
    return numbers[inverse].reshape(packed.shape)


def pack_colors(colors: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return colors (*, 3) as integers (*)."""
    parts = colors.astype(np.int32)
    return (parts[..., 0] << 16) | (parts[..., 1] << 8) | parts[..., 2]


def unpack_color(value: int) -> tuple[int, int, int]:
    """Return the color of an integer of `pack_colors`."""
    return value >> 16, value >> 8 & 255, value & 255


def _share(count: int, total: int) -> str:
    return f"{count:,} {'pixel' if count == 1 else 'pixels'} ({count / total:.2%})"


def _others(count: int, what: str) -> str:
    if count == 1:
        return ""
    return f" and {count - 1} other unknown {what}{'s' * (count > 2)}"
