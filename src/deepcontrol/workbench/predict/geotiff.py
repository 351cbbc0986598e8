"""Write TIFF files of labels and probabilities that keep the georeference of their image."""

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tifffile
from numpy.typing import NDArray

from ..data.pixels import TIFF_SUFFIXES
from ..data.sample import Palette

# Model pixel scale, tie points and transformation; directory, numbers and texts of the geo keys.
# GDAL's tags 42112 (metadata) and 42113 (no data) are about the image's values, not about classes:
# a no-data value of 0 would hide the first class.
GEO_TAGS = (33550, 33922, 34264, 34735, 34736, 34737)
ORIENTATION = 274

Tag = tuple[int, int, int, Any, bool]  # code, type, count, value, only in the first page


def geo_tags(path: Path) -> list[Tag]:
    """Return the tags with the georeference of a TIFF file; an empty list if it has none."""
    if path.suffix.lower() not in TIFF_SUFFIXES:
        return []
    try:
        with tifffile.TiffFile(path) as file:
            tags = file.pages[0].tags  # type: ignore[union-attr]
            turned = tags.get(ORIENTATION) is not None and tags[ORIENTATION].value != 1
            found = [tags[code] for code in GEO_TAGS if code in tags]
            if turned:  # the labels are upright, and the tags are about the rows of the file
                return []
            return [(tag.code, int(tag.dtype), tag.count, tag.value, True) for tag in found]
    except Exception:  # of a damaged file; the image was read by another decoder
        return []


def write_labels_tiff(
    file: BinaryIO, ids: NDArray[np.uint8], palette: Palette, tags: list[Tag]
) -> None:
    """Write class ids (H, W) with the colors of the classes as the color map."""
    colors = np.zeros((3, 256), np.uint16)
    colors[:, : len(palette)] = 257 * np.array(palette, np.uint16).T  # 8 to 16 bits
    tifffile.imwrite(
        _named(file), ids, photometric="palette", colormap=colors, compression="zlib",
        extratags=tags, metadata=None,
    )  # fmt: skip


def write_bands_tiff(file: BinaryIO, bands: NDArray[np.float32], tags: list[Tag]) -> None:
    """Write one band per class, (classes, H, W)."""
    tifffile.imwrite(
        _named(file), bands, photometric="minisblack", planarconfig="separate", compression="zlib",
        extratags=tags, metadata=None,
    )  # fmt: skip


def _named(file: BinaryIO) -> tifffile.FileHandle:
    """Return a handle with a name. tifffile asks for one, which files of a descriptor lack."""
    return tifffile.FileHandle(file, name="labels.tif")
