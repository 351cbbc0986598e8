"""Samples decoded once into arrays on disk, mapped into memory from then on.

A cache is a folder of plain .npy files and an index.json with their checksums. It is written beside
its place and renamed into it, under a lock, so that it is there whole or not at all, whoever else
starts at the same time. Its name holds the source's fingerprint: another source, another cache.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .sample import Palette, Size, Source

FORMAT = 1  # part of each cache's name; counts up when what is stored changes
FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk's ways to be
_ARRAYS = ("images", "labels", "segments")

Progress = Callable[[int, int], None]  # (samples done, samples in all)


@dataclass(frozen=True)
class Cache:
    """All samples of a source at one size, as arrays mapped from disk."""

    name: str
    classes: tuple[str, ...]
    palette: Palette
    images: NDArray[np.uint8]  # (N, H, W, 3)
    labels: NDArray[np.uint8]  # (N, H, W)
    segments: NDArray[np.uint16]  # (N, H, W)
    histogram: NDArray[np.int64]  # pixels of each class

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> Size:
        return self.images.shape[1], self.images.shape[2]

    @property
    def nbytes(self) -> int:
        return self.images.nbytes + self.labels.nbytes + self.segments.nbytes


def default_folder() -> Path:
    """Where caches go unless told otherwise: the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deepcontrol"


def prepare(
    source: Source, size: Size, folder: Path | None = None, progress: Progress | None = None
) -> Cache:
    """The cache of a source at a size: opened if it is there and whole, made if not.

    Images are resized to cover `size` with their aspect kept: CamVid's 3:4 images at 256x512 are
    held at 384x512. Training crops from them, evaluation looks at them in windows.
    """
    folder = folder or default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    origin = hashlib.sha256(source.origin.encode()).hexdigest()[:8]
    stem = f"{source.name}-{origin}-{len(source)}-{size[0]}x{size[1]}"
    place = folder / f"{stem}-{FORMAT}-{source.fingerprint()}"
    with _locked(folder / f"{stem}.lock"):
        if not _is_whole(place):
            # Of this source there may be a broken cache, an outdated one, and one never finished.
            for old in (*folder.glob(f"{stem}-*"), *folder.glob(f".building-{stem}-*")):
                shutil.rmtree(old)
            _build(source, size, place, folder / f".building-{stem}-{os.getpid()}", progress)
        return _open(place, source)


def _build(
    source: Source, size: Size, place: Path, temporary: Path, progress: Progress | None
) -> None:
    count = len(source)
    if count == 0:
        raise ValueError(f"{source.name} has no samples")
    temporary.mkdir()
    try:
        parts: list[NDArray] = list(source.read(0, size))
        needed = count * sum(part.nbytes for part in parts)
        with _said_if_full(temporary, source, needed):
            arrays = {
                name: np.lib.format.open_memmap(
                    temporary / f"{name}.npy", "w+", part.dtype, (count, *part.shape)
                )
                for name, part in zip(_ARRAYS, parts, strict=True)
            }
            _take_room(temporary)
        histogram = np.zeros(256, np.int64)
        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            samples = pool.map(lambda i: source.read(i, size), range(count))
            for i, sample in enumerate(samples):
                for name, array in zip(_ARRAYS, sample, strict=True):
                    arrays[name][i] = array
                histogram += np.bincount(sample.labels.ravel(), minlength=256)
                if progress:
                    progress(i + 1, count)
        finally:
            pool.shutdown(cancel_futures=True)  # whoever interrupts does not wait for the rest
        histogram = histogram[: len(source.classes)]
        index = {
            "histogram": histogram.tolist(),
            "crc32": {name: _checksum(array) for name, array in arrays.items()}
            | {"histogram": _checksum(histogram)},
        }
        (temporary / "index.json").write_text(json.dumps(index, indent=2))
        del arrays  # closes the files
        for file in (*temporary.iterdir(), temporary):
            _sync(file)
        temporary.rename(place)
        _sync(place.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _take_room(folder: Path) -> None:
    """Let the disk set all bytes aside: a mapped file that finds none later ends the process."""
    for file in folder.iterdir():
        with file.open("r+b") as opened:
            try:
                os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
            except OSError as error:
                if error.errno in FULL:
                    raise
                return  # not every file system can: then it may end as it may


@contextlib.contextmanager
def _said_if_full(folder: Path, source: Source, needed: int) -> Iterator[None]:
    """Where the disk has no room, how much it would take."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(
            f"{folder.parent} has no room for {source.name} ({error.strerror}): it needs "
            f"{needed:,} bytes, {shutil.disk_usage(folder).free:,} are free. XDG_CACHE_HOME may "
            "name another folder."
        ) from error


def _is_whole(place: Path) -> bool:
    try:
        index = json.loads((place / "index.json").read_text())
        arrays = {name: np.load(place / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        arrays["histogram"] = np.array(index["histogram"], np.int64)
        return index["crc32"] == {name: _checksum(array) for name, array in arrays.items()}
    except (OSError, EOFError, ValueError, KeyError, TypeError):  # numpy's and json's ways to fail
        return False


def _open(place: Path, source: Source) -> Cache:
    index = json.loads((place / "index.json").read_text())
    # Copy on write: torch wants arrays that it could write to, and none of ours is written.
    images, labels, segments = (np.load(place / f"{name}.npy", mmap_mode="c") for name in _ARRAYS)
    histogram = np.array(index["histogram"], np.int64)
    return Cache(source.name, source.classes, source.palette, images, labels, segments, histogram)


def _sync(path: Path) -> None:
    """On the disk before the rename is: a name must not outlive its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(array: NDArray) -> int:
    value = 0
    for sample in array:
        value = zlib.crc32(np.ascontiguousarray(sample).data, value)
    return value


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
