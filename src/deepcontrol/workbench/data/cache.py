"""Decode samples once into .npy files and map them into memory.

A cache is a folder of .npy files and an index.json with checksums. It is built in a temporary
folder and renamed under a lock, so that concurrent processes see a complete cache or none. Its name
contains the fingerprint of the source, so that a changed source gets a new cache.
"""

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..folders.storage import open_append, read_json, sync, write_json
from ..hardware import total_memory
from .sample import Palette, Progress, ReadsAll, Size, Source, Task

FORMAT = 3  # part of the folder name; increase it when the stored content changes
INDEX = "index.json"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Stored arrays. The segments of classification are zeros.
_ARRAYS: dict[Task, tuple[str, ...]] = {
    "segmentation": ("images", "labels", "segments"),
    "classification": ("images", "labels"),
}


@dataclass(frozen=True)
class Cache:
    """All samples of a source at one size, memory-mapped."""

    name: str
    classes: tuple[str, ...]
    palette: Palette
    images: NDArray[np.uint8]  # (N, H, W, C)
    labels: NDArray[np.uint8 | np.int16]  # (N, H, W) uint8; in classification (N,) int16
    segments: NDArray[np.uint16]  # (N, H, W); in classification (N,) zeros
    histogram: NDArray[np.int64]  # pixels or images per class
    task: Task = "segmentation"

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> Size:
        return self.images.shape[1], self.images.shape[2]

    @property
    def nbytes(self) -> int:
        return self.images.nbytes + self.labels.nbytes + self.segments.nbytes

    def fingerprint(self) -> str:
        """Identify the samples by their decoded content, so that their files may move."""
        checksum = 0
        for array in (self.images, self.labels, self.segments):
            for sample in array:
                checksum = zlib.crc32(sample.data, checksum)
        return f"{len(self)} images {checksum:08x}"


def default_folder() -> Path:
    """Return the default folder for caches, in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deepcontrol"


def prepare(
    source: Source, size: Size, folder: Path | None = None, progress: Progress | None = None
) -> Cache:
    """Open the cache of a source, or build it if it is missing or damaged.

    Images are resized to cover `size` and keep their aspect ratio: the 3:4 images of CamVid at
    256x512 are stored at 384x512. Training crops them; evaluation reads them in windows.
    Classification images have exactly `size`.

    Args:
        source: Dataset split.
        size: Height and width to cover.
        folder: Folder for caches; `default_folder()` by default.
        progress: Called with (samples done, samples in total) while the cache is built.
    """
    folder = folder or default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    origin = hashlib.sha256(os.fsencode(source.origin)).hexdigest()[:8]
    stem = f"{source.name}-{origin}-{len(source)}-{size[0]}x{size[1]}"
    place = folder / f"{stem}-{FORMAT}-{source.fingerprint()}"
    with _locked(folder / f"{stem}.lock"):
        if not _is_valid(place, source.task):
            # Remove damaged, outdated and unfinished caches of this source.
            for old in (*folder.glob(f"{stem}-*"), *folder.glob(f".building-{stem}-*")):
                shutil.rmtree(old)
            _build(source, size, place, folder / f".building-{stem}-{os.getpid()}", progress)
        return _open(place, source)


def _build(
    source: Source, size: Size, place: Path, temporary: Path, progress: Progress | None
) -> None:
    count = len(source)
    if count == 0:
        raise ValueError(f"{source.name} has no samples to cache")
    _check_room(source, size, place.parent)
    temporary.mkdir()
    try:
        whole = source.read_all(size) if isinstance(source, ReadsAll) else None
        first: Sequence[NDArray] = source.read(0, size)
        names = _ARRAYS[source.task]
        parts = dict(zip(names, first, strict=False))
        needed = count * sum(part.nbytes for part in parts.values())
        with _explain_full_disk(temporary, source, needed):
            arrays = {
                name: np.lib.format.open_memmap(
                    temporary / f"{name}.npy", "w+", part.dtype, (count, *part.shape)
                )
                for name, part in parts.items()
            }
            _reserve_space(temporary)
        if whole is None:
            _write_samples(source, size, arrays, progress)
        else:
            for name, array in zip(names, whole, strict=True):
                arrays[name][:] = array
            if progress:
                progress(count, count)
        histogram = _histogram(arrays["labels"], len(source.classes))
        index = {
            "histogram": histogram.tolist(),
            "crc32": {name: _checksum(array) for name, array in arrays.items()}
            | {"histogram": _checksum(histogram)},
        }
        write_json(temporary / INDEX, index, indent=2)
        del arrays  # closes the files
        for file in (*temporary.iterdir(), temporary):
            sync(file)  # the rename must not become durable before the content
        temporary.rename(place)
        sync(place.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_room(source: Source, size: Size, folder: Path) -> None:
    """Refuse impossible sizes before the first image of that size is allocated."""
    least = 3 * math.prod(size)  # bytes of an image
    if source.task == "classification":
        least = math.prod(size)  # gray
    free, memory = shutil.disk_usage(folder).free, total_memory(torch.device("cpu"))
    if least > memory or least * len(source) > free:
        raise ValueError(
            f"images of {size[0]}x{size[1]} are too large: {len(source)} of {source.name} take at "
            f"least {least * len(source) / 2**30:,.1f} GiB in {folder}, which has "
            f"{free / 2**30:,.1f} GiB left, and one takes {least / 2**30:,.1f} of "
            f"{memory / 2**30:,.1f} GiB of memory. Choose a smaller --size, or set XDG_CACHE_HOME "
            "to a folder with more space."
        )


def _write_samples(
    source: Source, size: Size, arrays: Mapping[str, NDArray], progress: Progress | None
) -> None:
    """Read all samples in threads and write them to the arrays."""
    count = len(source)
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        samples = pool.map(lambda i: source.read(i, size), range(count))
        for i, sample in enumerate(samples):
            for array, part in zip(arrays.values(), sample, strict=False):
                array[i] = part
            if progress:
                progress(i + 1, count)
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt does not wait for the other samples


def _histogram(labels: NDArray, classes: int) -> NDArray[np.int64]:
    """Count the pixels or images of each class, without VOID and NO_CLASS."""
    counts = np.zeros(classes, np.int64)
    for part in labels if labels.ndim > 1 else (labels,):
        counts += np.bincount(part[(part >= 0) & (part < classes)], minlength=classes)
    return counts


def _reserve_space(folder: Path) -> None:
    """Allocate all blocks: a mapped write on a full disk kills the process (SIGBUS)."""
    for file in folder.iterdir():
        with file.open("r+b") as opened:
            try:
                os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
            except OSError as error:
                if error.errno in DISK_FULL:
                    raise
                return  # not every file system supports it; continue without the reservation


@contextlib.contextmanager
def _explain_full_disk(folder: Path, source: Source, needed: int) -> Iterator[None]:
    """Report the needed and the free space if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise OSError(
            f"{folder.parent} has no room for {source.name} ({error.strerror}): the cache needs "
            f"{needed:,} bytes, {shutil.disk_usage(folder).free:,} are free. Free some space or "
            "set XDG_CACHE_HOME to another folder."
        ) from error


def _is_valid(place: Path, task: Task) -> bool:
    try:
        index = read_json(place / INDEX)
        arrays = {name: np.load(place / f"{name}.npy", mmap_mode="r") for name in _ARRAYS[task]}
        arrays["histogram"] = np.array(index["histogram"], np.int64)
        return index["crc32"] == {name: _checksum(array) for name, array in arrays.items()}
    except Exception:  # numpy and json raise anything on damaged files
        return False


def _open(place: Path, source: Source) -> Cache:
    index = read_json(place / INDEX)
    # Copy-on-write: torch.from_numpy warns about read-only arrays. Nothing writes to these.
    names = _ARRAYS[source.task]
    arrays = {name: np.load(place / f"{name}.npy", mmap_mode="c") for name in names}
    segments = arrays.get("segments", np.zeros(len(source), np.uint16))
    return Cache(
        source.name,
        source.classes,
        source.palette,
        arrays["images"],
        arrays["labels"],
        segments,
        np.array(index["histogram"], np.int64),
        source.task,
    )


def _checksum(array: NDArray) -> int:
    value = 0
    for sample in array:
        value = zlib.crc32(np.ascontiguousarray(sample).data, value)
    return value


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open_append(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
