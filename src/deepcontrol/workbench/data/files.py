"""List image files, split them by name, and tell when they change."""

import hashlib
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from .sample import DataError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
_SYSTEM_FILES = ("thumbs.db", "desktop.ini")  # written by file managers
CONTENT_BYTES = 64 * 2**20  # a fingerprint reads about this much of a split's files
CONTENT_BLOCK = 4096
T = TypeVar("T", bound=Hashable)


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
    """Return whether a path is a device, FIFO or socket: reading may wait forever."""
    return path.exists() and not path.is_file() and not path.is_dir()


def split_by_name(
    samples: Sequence[T], name: Callable[[T], str], fraction: float
) -> dict[str, list[T]]:
    """Split samples by a hash of their names, so that new samples do not move others.

    Of two or more samples, each split has at least one.
    """
    by_hash = sorted(samples, key=lambda own: name_hash(name(own)))
    count = sum(name_hash(name(own)) < fraction for own in samples)
    if len(samples) > 1:
        count = min(max(count, 1), len(samples) - 1)
    val = set(by_hash[:count])
    return {"train": [s for s in samples if s not in val], "val": [s for s in samples if s in val]}


def name_hash(name: str) -> float:
    """Return a number from 0 to 1 that depends only on a name."""
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
    """Return where `blocks` blocks start in a file, at equal distances; all if fewer.

    >>> list(_block_starts(size=10_000, blocks=2)), list(_block_starts(size=10_000, blocks=9))
    ([0, 5904], [0, 4096, 8192])
    """
    if size <= blocks * CONTENT_BLOCK:
        return range(0, size, CONTENT_BLOCK)
    last = size - CONTENT_BLOCK
    if blocks == 1:
        return (last // 2,)
    return (i * last // (blocks - 1) for i in range(blocks))
