"""Find images, read their regions, and write labels, overlays and GeoTIFFs.

Labels and probabilities of a GeoTIFF keep its georeference.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image

from ..data import DataError, Size
from ..data.classfile import Range
from ..data.drawing import colored, draw_legend
from ..data.pixels import TIFF_SUFFIXES, check_eight_bit, decode, open_image, to_eight_bit
from ..data.sample import Palette
from ..data.survey import CONTACT_SHEET, as_rgb
from ..folders.storage import replacing
from ..imagefile import ORIENTATION, UPRIGHT, ImageError, open_header
from .tiling import Span

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
OVERLAY_ALPHA = 0.5  # weight of the class color in an overlay
BYTES_PER_PIXEL = 8  # memory for an image, its labels and its overlay
LEGEND, LEGEND_WIDTH = "legend.png", 480
_BAND = 512  # rows of an overlay that are blended at a time
# Model pixel scale, tie points and transformation; directory, numbers and texts of the geo keys.
# GDAL's tags 42112 (metadata) and 42113 (no data) are about the image's values, not about classes:
# a no-data value of 0 would hide the first class.
GEO_TAGS = (33550, 33922, 34264, 34735, 34736, 34737)

Tag = tuple[int, int, int, Any, bool]  # code, type, count, value, only in the first page


@dataclass(frozen=True)
class Job:
    """An image, the path of its outputs without suffix, and the output folder."""

    image: Path
    target: Path
    out: Path

    @property
    def labels(self) -> Path:
        return self.target.with_name(f"{self.target.name}-labels.png")

    @property
    def overlay(self) -> Path:
        return self.target.with_name(f"{self.target.name}-overlay.png")

    @property
    def geo_labels(self) -> Path:
        return self.target.with_name(f"{self.target.name}-labels.tif")

    @property
    def probabilities(self) -> Path:
        return self.target.with_name(f"{self.target.name}-probabilities.tif")

    @property
    def outputs(self) -> tuple[Path, ...]:
        """All files that may be written for the image."""
        return self.labels, self.overlay, self.geo_labels, self.probabilities


def find_jobs(paths: Sequence[Path], out: Path) -> list[Job]:
    """List a job for each image file and for each image in a folder, sorted by name.

    Folders are searched recursively, and their structure is kept below `out`. Files that are
    already below `out` are skipped.

    Raises:
        ValueError: A folder has no images or lies in `out`, or outputs would overwrite an image or
            each other.
    """
    jobs: list[Job] = []
    for path in paths:
        if path.is_dir():
            if _real(path).is_relative_to(_real(out)):
                raise ValueError(
                    f"{path} lies in the output folder {out}: choose another folder with --out"
                )
            found = images_in(path, out)
            jobs += [Job(p, out / p.relative_to(path).with_suffix(""), out) for p in found]
        else:
            jobs.append(Job(path, out / path.stem, out))
    _check_collisions(jobs, out)
    return jobs


def images_in(folder: Path, out: Path) -> list[Path]:
    """List images of a folder and its subfolders by name, but none below `out`.

    The contact sheet of `deepcontrol data init` is no image to label.

    Raises:
        ValueError: There are none.
    """
    # os.walk does not follow links to folders, which may lead in a circle.
    files = (Path(base, name) for base, _, names in os.walk(folder) for name in names)
    found = sorted(p for p in files if p.name != CONTACT_SHEET and _is_image(p, out))
    if not found:
        raise ValueError(f"{folder}: no images ({', '.join(SUFFIXES)}) in this folder")
    return found


def _is_image(path: Path, out: Path) -> bool:
    """Return whether a path is a regular file with an image suffix, outside `out`."""
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        return False
    return not _real(path).is_relative_to(_real(out))


def _real(path: Path) -> Path:
    """Return the path without links.

    Unlike Path.resolve, it does not fail on a circle of links.
    """
    return Path(os.path.realpath(path))


def _check_collisions(jobs: Sequence[Job], out: Path) -> None:
    taken: dict[Path, Path] = {}
    images = {_real(job.image) for job in jobs}
    for job in jobs:
        for path in (*job.outputs, out / LEGEND):
            if _real(path) in images:
                raise ValueError(
                    f"{path} is an input image, and the prediction of {job.image} would overwrite "
                    "it: choose another folder with --out"
                )
        other = taken.setdefault(job.target, job.image)
        if other is not job.image:
            raise ValueError(
                f"{other} and {job.image} would both be written to {job.labels}: "
                "predict them in two calls with different --out"
            )


class Picture(Protocol):
    """An image that can be drawn."""

    def read_rgb(self, rows: Span, columns: Span) -> NDArray[np.uint8]: ...  # (H, W, 3)


class ImageFile:
    """A decoded image that is read in regions.

    The whole image stays in memory as 8-bit pixels. Only regions are converted to floating point,
    because the feature maps of a network need about a hundred times more memory.
    """

    def __init__(self, path: Path, free: int) -> None:
        """Decode an image; raise DataError if it needs more than `free` bytes."""
        with _no_pixel_limit():
            _check_memory(free, path)
            self._image = open_image(path)
        check_eight_bit(self._image, path)

    @property
    def size(self) -> Size:
        return self._image.height, self._image.width

    def read(
        self, rows: Span, columns: Span, mode: Literal["RGB", "L"] = "RGB"
    ) -> NDArray[np.uint8]:
        """Read a region as RGB (H, W, 3), or as gray values (H, W, 1)."""
        region = self._image.crop((columns[0], rows[0], columns[1], rows[1]))
        return np.atleast_3d(np.array(region.convert(mode)))

    def read_rgb(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Read a region for a picture (H, W, 3)."""
        return self.read(rows, columns)


class PixelFormat(NamedTuple):
    """How to turn the pixels of a file into the input of a network."""

    channels: int
    value_range: Range | None = None  # for images with more than 8 bits

    @classmethod
    def of_run(cls, channels: int, derived: dict[str, Any]) -> "PixelFormat":
        """Return the format of a run, from the derived values in its config.json."""
        found = derived.get("value_range")
        if found is None:
            return cls(channels)
        if not isinstance(found, list) or len(found) != 2:
            raise ValueError(f"config.json: value_range must be two numbers, got {found!r}")
        return cls(channels, (float(found[0]), float(found[1])))

    def open(self, path: Path) -> "DecodedImage":
        """Decode an image; raise DataError if its channels do not match."""
        return DecodedImage(to_eight_bit(path, decode(path), self.channels, self.value_range))


class DecodedImage:
    """An image in memory, (H, W, C) of 8 bits, that is read in regions."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array = array

    @property
    def size(self) -> Size:
        return self.array.shape[0], self.array.shape[1]

    def read(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Read a region (H, W, C)."""
        return self.array[rows[0] : rows[1], columns[0] : columns[1]]

    def read_rgb(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Read a region for a picture (H, W, 3)."""
        return as_rgb(self.read(rows, columns))


@contextlib.contextmanager
def _no_pixel_limit() -> Iterator[None]:
    """Disable Pillow's pixel limit: the free memory is the limit here."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _check_memory(free: int, path: Path) -> None:
    try:
        with open_header(path) as opened:
            height, width = opened.height, opened.width  # before the orientation, unlike `size`
    except ImageError:
        return  # open_image reports unreadable files
    needed = BYTES_PER_PIXEL * height * width
    if needed > free:
        raise DataError(
            path,
            f"{height}x{width} pixels with labels and overlay need {needed / 2**30:.1f} GiB, but "
            f"only {free / 2**30:.1f} GiB are free: split the image",
        )


def write_outputs(
    job: Job,
    image: Picture,
    ids: NDArray[np.uint8],
    palette: Palette,
    probabilities: NDArray[np.float32] | None = None,
) -> list[Path]:
    """Write labels, overlay and, if they are given, probabilities; return the files.

    The labels are class ids (H, W) in an 8-bit PNG with the colors of the classes as its palette.
    For a GeoTIFF, they are also written as a TIFF file with the image's georeference.
    """
    with replacing(job.labels, inside=job.out) as file:
        as_palette_image(ids, palette).save(file, "PNG")
    overlay = np.empty((*ids.shape, 3), np.uint8)
    for top in range(0, len(ids), _BAND):  # blending in floating point needs more memory
        rows = slice(top, min(top + _BAND, len(ids)))
        pixels = image.read_rgb((rows.start, rows.stop), (0, ids.shape[1]))
        colors = colored(ids[rows], palette)
        overlay[rows] = (1 - OVERLAY_ALPHA) * pixels + OVERLAY_ALPHA * colors
    with replacing(job.overlay, inside=job.out) as file:
        Image.fromarray(overlay).save(file, "PNG")
    written = [job.overlay, job.labels]
    tags = geo_tags(job.image)
    if tags:
        with replacing(job.geo_labels, inside=job.out) as file:
            write_labels_tiff(file, ids, palette, tags)
        written.append(job.geo_labels)
    if probabilities is not None:
        with replacing(job.probabilities, inside=job.out) as file:
            write_bands_tiff(file, probabilities, tags)
        written.append(job.probabilities)
    return written


def as_palette_image(ids: NDArray[np.uint8], palette: Palette) -> Image.Image:
    """Return class ids as an image whose palette has the colors of the classes."""
    image = Image.fromarray(ids, "P")
    image.putpalette([part for color in palette for part in color])
    return image


def write_legend(out: Path, classes: Sequence[str], palette: Palette) -> Path:
    """Write a picture of the class ids, names and colors; return its path."""
    entries = [(f"{i} {name}", palette[i]) for i, name in enumerate(classes)]
    with replacing(out / LEGEND, inside=out) as file:
        Image.fromarray(draw_legend(entries, LEGEND_WIDTH)).save(file, "PNG")
    return out / LEGEND


# GeoTIFF


def geo_tags(path: Path) -> list[Tag]:
    """Return the tags with a TIFF file's georeference; an empty list without any."""
    if path.suffix.lower() not in TIFF_SUFFIXES:
        return []
    try:
        with tifffile.TiffFile(path) as file:
            tags = file.pages[0].tags  # type: ignore[union-attr]
            turned = tags.get(ORIENTATION) is not None and tags[ORIENTATION].value != UPRIGHT
            found = [tags[code] for code in GEO_TAGS if code in tags]
            if turned:  # the labels are upright, and the tags are about the rows of the file
                return []
            return [(tag.code, int(tag.dtype), tag.count, tag.value, True) for tag in found]
    except Exception:  # the file is damaged; another decoder has read the image
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
    """Return a handle with a name, which tifffile needs and descriptors lack."""
    return tifffile.FileHandle(file, name="labels.tif")
