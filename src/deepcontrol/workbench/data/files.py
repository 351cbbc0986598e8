"""Read images and label maps from files, split them by name, and tell when they change."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .. import imagefile
from .sample import VOID, DataError, Palette, Sample, Size, Task, covering

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
_SYSTEM_FILES = ("thumbs.db", "desktop.ini")  # of file managers
# Pillow modes with at most 8 bits per channel. Others lose values in the conversion to RGB.
EIGHT_BIT_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
CONTENT_BYTES = 64 * 2**20  # of a split's files that a fingerprint reads, about
CONTENT_BLOCK = 4096
T = TypeVar("T", bound=Hashable)
_UNKNOWN = 254  # marks ids without a class in the lookup table


@dataclass(frozen=True)
class Pair:
    """The files of one sample."""

    image: Path
    labels: Path
    instances: Path | None = None

    @property
    def maps(self) -> tuple[Path, ...]:
        return (self.labels,) if self.instances is None else (self.labels, self.instances)


@dataclass(frozen=True)
class PairedFiles:
    """A `Source` of image and label files. A table maps their ids to classes."""

    name: str
    classes: tuple[str, ...]
    palette: Palette
    pairs: tuple[Pair, ...]
    class_of: tuple[tuple[int, int], ...]  # (id in the file, class id or VOID)
    native: Size  # size of every image

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def task(self) -> Task:
        return "segmentation"

    @property
    def origin(self) -> str:
        return str(self.pairs[0].image.parent.resolve()) if self.pairs else ""

    def fingerprint(self) -> str:
        files = [path for pair in self.pairs for path in (pair.image, *pair.maps)]
        return fingerprint(files, salt=repr(self.class_of))

    def read(self, index: int, size: Size) -> Sample:
        pair = self.pairs[index]
        own = native_size(pair.image, *pair.maps)
        if own != self.native:
            (h, w), (own_h, own_w) = self.native, own
            raise DataError(pair.image, f"size {own_h}x{own_w}, but other images have {h}x{w}")
        size = covering(own, size)
        image = read_image(pair.image, size)
        labels = self._to_classes(pair.labels, read_ids(pair.labels, size))
        if pair.instances is None:
            return Sample(image, labels, labels.astype(np.uint16))
        ids = read_ids(pair.instances, size)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > np.iinfo(np.uint16).max:
            raise DataError(
                pair.instances, f"instance ids from {low} to {high}, expected 0 to 65535"
            )
        return Sample(image, labels, ids.astype(np.uint16))

    def _to_classes(self, path: Path, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        table = np.full(256, _UNKNOWN, np.uint8)
        for file_id, class_id in self.class_of:
            table[file_id] = class_id
        labels = table[ids.clip(0, 255)]
        bad = (labels == _UNKNOWN) | (ids < 0) | (ids > 255)
        if bad.any():
            known = sorted(i for i, _ in self.class_of if i != VOID)
            worst = ids[bad].max()
            raise DataError(
                path,
                f"class id {worst} in {(ids == worst).sum()} pixels, "
                f"expected {known[0]} to {known[-1]}, or {VOID} for void",
            )
        return labels


def open_image(path: Path) -> Image.Image:
    """Decode a whole image, upright as its EXIF orientation says; raise DataError if damaged."""
    with _naming(path):
        return imagefile.open_image(path)


def check_eight_bit(image: Image.Image, path: Path) -> None:
    """Raise DataError unless the image has at most 8 bits per channel."""
    if image.mode not in EIGHT_BIT_MODES:
        raise DataError(
            path, f"expected a gray, RGB or CMYK image of 8 bits per channel, got {image.mode}"
        )


def read_image(path: Path, size: Size) -> NDArray[np.uint8]:
    """Read an RGB image (H, W, 3), resized with antialiasing. An alpha channel is ignored."""
    image = open_image(path)
    check_eight_bit(image, path)
    image = image.convert("RGB")
    if image.size != size[::-1]:
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(image)


def cover_and_crop(image: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """Resize an image (H, W, C) to cover `size`, and crop its center."""
    own = (image.shape[0], image.shape[1])
    if own == size:
        return image
    height, width = covering(own, size)
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    resized = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    crop = resized[top : top + size[0], left : left + size[1]]
    return crop.reshape(*size, image.shape[2])


def read_ids(path: Path, size: Size | None = None) -> NDArray[np.int32]:
    """Read ids (H, W) from a single-channel image, resized by nearest neighbor."""
    image = open_image(path)
    if image.mode not in ("L", "P", "I", "I;16"):
        raise DataError(path, f"expected one channel of integer ids, got {image.mode}")
    if size is not None and image.size != size[::-1]:
        image = image.resize(size[::-1], Image.Resampling.NEAREST)
    return np.asarray(image).astype(np.int32)


def native_size(image: Path, *maps: Path) -> Size:
    """Return the size of an image; raise DataError if a label map differs."""
    size = _size(image)
    for path in maps:
        if _size(path) != size:
            (h, w), (own_h, own_w) = size, _size(path)
            raise DataError(path, f"{own_h}x{own_w} for an image of {h}x{w} ({image.name})")
    return size


def _size(path: Path) -> Size:
    with _naming(path), imagefile.open_header(path) as opened:
        return imagefile.upright_size(opened)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an ImageError into a DataError that names the file."""
    try:
        yield
    except imagefile.ImageError as error:
        raise DataError(path, str(error)) from error


def list_entries(folder: Path) -> list[Path]:
    """List a folder by name, without hidden files and those of file managers."""
    return sorted(
        path
        for path in folder.iterdir()
        if not path.name.startswith(".") and path.name.lower() not in _SYSTEM_FILES
    )


def list_images(folder: Path) -> tuple[list[Path], list[DataError]]:
    """List the images of a folder by name, and an error for each other file."""
    if not folder.is_dir():
        return [], [DataError(folder, "no such folder")]
    entries = list_entries(folder)
    images = [p for p in entries if p.suffix.lower() in IMAGE_SUFFIXES and not _is_special(p)]
    known = ", ".join(IMAGE_SUFFIXES)
    faults = [DataError(p, f"not an image ({known})") for p in entries if p not in set(images)]
    return images, faults if entries else [DataError(folder, f"no images ({known}) in this folder")]


def _is_special(path: Path) -> bool:
    """Return whether a path is a device, a FIFO or a socket, on which reading may wait forever."""
    return path.exists() and not path.is_file() and not path.is_dir()


def split_by_name(
    samples: Sequence[T], name: Callable[[T], str], fraction: float
) -> dict[str, list[T]]:
    """Split samples by a hash of their names, so that new samples do not move others.

    Of two or more samples, each split has at least one.
    """
    by_hash = sorted(samples, key=lambda own: _name_hash(name(own)))
    count = sum(_name_hash(name(own)) < fraction for own in samples)
    if len(samples) > 1:
        count = min(max(count, 1), len(samples) - 1)
    val = set(by_hash[:count])
    return {"train": [s for s in samples if s not in val], "val": [s for s in samples if s in val]}


def _name_hash(name: str) -> float:
    digest = hashlib.sha256(os.fsencode(name)).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def fingerprint(paths: Iterable[Path], salt: str) -> str:
    """Hash the names, sizes, modification times and parts of the content of files.

    The parts are blocks at equal distances, about 64 MiB over all files and at least one block of
    each, so that a file that was replaced by one of equal size and time is noticed too.
    """
    files = list(paths)
    blocks = max(1, CONTENT_BYTES // CONTENT_BLOCK // max(1, len(files)))
    digest = hashlib.sha256(os.fsencode(salt))
    for path in files:
        try:
            with path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                digest.update(f" {status.st_size} {status.st_mtime_ns}\n".encode())
                digest.update(os.fsencode(path.name))
                for start in _block_starts(status.st_size, blocks):
                    digest.update(os.pread(file.fileno(), CONTENT_BLOCK, start))
        except FileNotFoundError:
            raise DataError(path, "no such file") from None
        except OSError as error:
            raise DataError(path, f"cannot be read ({error.strerror})") from None
    return digest.hexdigest()[:16]


def _block_starts(size: int, blocks: int) -> Iterable[int]:
    """Return where `blocks` blocks start in a file, at equal distances; all if they are fewer.

    >>> list(_block_starts(size=10_000, blocks=2)), list(_block_starts(size=10_000, blocks=9))
    ([0, 5904], [0, 4096, 8192])
    """
    if size <= blocks * CONTENT_BLOCK:
        return range(0, size, CONTENT_BLOCK)
    last = size - CONTENT_BLOCK
    if blocks == 1:
        return (last // 2,)
    return (i * last // (blocks - 1) for i in range(blocks))
