"""The images of a prediction: found, read by regions, and written as labels and overlays."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from ..data import DataError, Size
from ..data.files import check_eight_bit, open_image
from ..data.sheet import colored
from .tiles import Span

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
COLOR_SHARE = 0.5  # of a class's color in an overlay
BYTES_A_PIXEL = 8  # of an image, its labels and its overlay, all of which are held in memory
_BAND = 512  # rows of an overlay that are blended at a time


@dataclass(frozen=True)
class Job:
    """An image, and where its labels and its overlay go, as a path without its ending."""

    image: Path
    target: Path

    @property
    def labels(self) -> Path:
        return self.target.with_name(f"{self.target.name}-labels.png")

    @property
    def overlay(self) -> Path:
        return self.target.with_name(f"{self.target.name}-overlay.png")


def find_jobs(paths: Sequence[Path], out: Path) -> list[Job]:
    """A job for each image that is named, or lies in a folder or below it, in sorted order.

    Below `out` a folder's images keep their places; what already lies below `out` is no image.
    """
    jobs: list[Job] = []
    for path in paths:
        if path.is_dir():
            if path.resolve().is_relative_to(out.resolve()):
                raise ValueError(
                    f"{path} lies in {out}, where predictions go: write them elsewhere with --out"
                )
            found = [p for p in sorted(path.rglob("*")) if _is_image(p, out)]
            if not found:
                raise ValueError(f"{path}: no images ({', '.join(SUFFIXES)}) in this folder")
            jobs += [Job(p, out / p.relative_to(path).with_suffix("")) for p in found]
        else:
            jobs.append(Job(path, out / path.stem))
    _refuse_collisions(jobs)
    return jobs


def _is_image(path: Path, out: Path) -> bool:
    ours = path.resolve().is_relative_to(out.resolve())
    return path.suffix.lower() in SUFFIXES and path.is_file() and not ours


def _refuse_collisions(jobs: Sequence[Job]) -> None:
    taken: dict[Path, Path] = {}
    images = {job.image.resolve() for job in jobs}
    for job in jobs:
        for path in (job.labels, job.overlay):
            if path.resolve() in images:
                raise ValueError(
                    f"{path} is one of the images, and the prediction of {job.image} would be "
                    "written over it: choose another --out"
                )
        other = taken.setdefault(job.target, job.image)
        if other is not job.image:
            raise ValueError(
                f"{other} and {job.image} would both be written to {job.labels}: "
                "predict them in two calls, each with its --out"
            )


class OpenImage:
    """An image's pixels by regions: those of its file are held as they are, decoded once.

    Only regions become floating-point numbers, and maps of a network, which take a hundred times
    as much. Pillow decodes PNG and JPEG whole; files without compression it maps into memory.
    """

    def __init__(self, path: Path, free: int) -> None:
        with _of_any_size():
            _refuse_larger_than(free, path)
            image = open_image(path)
        check_eight_bit(image, path)
        self._image = ImageOps.exif_transpose(image)  # as viewers show it

    @property
    def size(self) -> Size:
        return self._image.height, self._image.width

    def read(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """A region (H, W, 3), RGB."""
        region = self._image.crop((columns[0], rows[0], columns[1], rows[1]))
        return np.array(region.convert("RGB"))


@contextlib.contextmanager
def _of_any_size() -> Iterator[None]:
    """Without Pillow's limit on an image's pixels: here the free memory is the limit."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _refuse_larger_than(free: int, path: Path) -> None:
    try:
        with Image.open(path) as opened:  # reads the header alone
            height, width = opened.height, opened.width
    except (OSError, SyntaxError, ValueError):
        return  # whatever it is, to be told by who reads it whole
    needed = BYTES_A_PIXEL * height * width
    if needed > free:
        raise DataError(
            path,
            f"{height}x{width} pixels with their labels and overlay take "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free",
        )


def write(
    job: Job,
    image: OpenImage,
    ids: NDArray[np.uint8],
    palette: Sequence[tuple[int, int, int]],
) -> None:
    """The labels, one byte a pixel, and the image under their colors."""
    job.target.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(ids).save(job.labels)
    overlay = np.empty((*ids.shape, 3), np.uint8)
    for top in range(0, len(ids), _BAND):  # blending takes floats, which are four times as large
        rows = slice(top, min(top + _BAND, len(ids)))
        pixels = image.read((rows.start, rows.stop), (0, ids.shape[1]))
        colors = colored(ids[rows], tuple(palette))
        overlay[rows] = (1 - COLOR_SHARE) * pixels + COLOR_SHARE * colors
    Image.fromarray(overlay).save(job.overlay)
