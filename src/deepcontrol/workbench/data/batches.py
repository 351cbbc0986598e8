"""Batches for training and evaluation, gathered on the host or on the device."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streets.randomness import key, words

from .augment import Augment, View, apply_views, to_device
from .cache import Cache
from .sample import NO_CLASS, VOID, Palette, Size, Task

Job = TypeVar("Job")
Result = TypeVar("Result")

# Maps pixel values to about zero mean and unit variance.
PIXEL_MEAN, PIXEL_STD = 127.5, 64.0


class Batch(NamedTuple):
    images: Tensor  # (N, C, H, W) or (N, C, D, H, W), fp32, channels_last, normalized
    labels: Tensor  # (N, H, W) or (N, D, H, W) uint8; (N,) int64 for classification
    # (N, H, W) int16 with the bits of the uint16 cache: torch has few uint16 ops; empty for
    # classification and torch datasets
    segments: Tensor


class LabeledSamples(Protocol):
    """The samples behind batches: a `Cache`, or a torch Dataset's `DatasetSplit`."""

    @property
    def name(self) -> str: ...

    @property
    def task(self) -> Task: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def palette(self) -> Palette: ...

    @property
    def size(self) -> tuple[int, ...]: ...

    @property
    def histogram(self) -> NDArray[np.int64]: ...  # pixels or images per class

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """Identify the samples by their content."""
        ...


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the indices of `count` samples in the random order of an epoch."""
    return np.argsort(words(key(seed, epoch), count), kind="stable")


class BatchStream(Protocol):
    """Batches that training and evaluation read: `Batches` or `DatasetBatches`.

    Batch k of an epoch is always the same, so that a run can resume at any step.
    """

    batch_size: int  # over all processes
    device: torch.device
    rank: int
    world: int
    ignored_label: int

    @property
    def dataset(self) -> LabeledSamples: ...

    def __len__(self) -> int: ...

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator["Batch"]:
        """Iterate over the batches of an epoch, from batch `start` on."""
        ...

    def samples(self, indices: Sequence[int]) -> "Batch":
        """Return samples by index, without augmentation."""
        ...

    def pixels(self, image: Tensor) -> NDArray[np.uint8]:
        """Return an image (C, H, W) of a batch as pixels (H, W, C) to show."""
        ...


class Batches:
    """Batches of a cache on a device. Batch k of an epoch is always the same.

    With `augment`, the order of an epoch is a function of (seed, epoch), and the view of an image
    is a function of (seed, epoch, index). Without it, images come whole and in order.

    The device, the prefetching and the number of workers do not change a batch. On a GPU, the whole
    cache moves to the device if it fits; otherwise threads prefetch batches from the mapped files.

    Args:
        cache: Samples, all of one size.
        batch_size: Samples per batch over all processes. The last batch may be smaller.
        size: Crop size; needs `augment`. The size of the cache by default.
        augment: Augmentation for training; None for evaluation.
        seed: Seed for shuffling and augmentation.
        device: Device of the batches.
        device_share: Largest share of the free GPU memory that the cache may take.
        workers: Threads that prefetch batches. 0 reads them when they are used; a GPU without room
            for the cache uses at least one.
        rank: Rank of this process. It gets samples rank, rank + world, ... of each batch. If that
            leaves none, it gets the first sample of the batch with all labels VOID.
        world: Number of processes.
    """

    ignored_label: int = VOID

    def __init__(
        self,
        cache: Cache,
        batch_size: int,
        *,
        size: Size | None = None,
        augment: Augment | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        device_share: float = 0.4,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.dataset, self.batch_size, self.augment, self.seed = cache, batch_size, augment, seed
        self.workers, self.rank, self.world = workers, rank, world
        if augment is None and size not in (None, cache.size):
            raise ValueError(
                f"size {size} needs augment: without it, images have the cache size {cache.size}"
            )
        self.size = size or cache.size
        if any(part > whole for part, whole in zip(self.size, cache.size, strict=True)):
            raise ValueError(
                f"size {self.size} is larger than the cache size {cache.size}: "
                "prepare the cache at that size"
            )
        self.device = torch.device(device)
        arrays = (cache.images, cache.labels, cache.segments.view(np.int16))
        self._arrays = tuple(torch.from_numpy(a) for a in arrays)
        on_gpu = self.device.type == "cuda"
        self.on_device = not on_gpu or cache.nbytes < device_share * _free_memory(device)
        if self.on_device:
            self._arrays = tuple(a.to(self.device) for a in self._arrays)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-len(self.dataset) // self.batch_size)

    def order(self, epoch: int) -> list[int]:
        """Return the sample indices of an epoch in order."""
        if self.augment is None:
            return list(range(len(self.dataset)))
        return shuffled(len(self.dataset), self.seed, epoch).tolist()

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch, from batch `start` on."""
        if start < 0:
            raise ValueError(f"start must be at least 0, got {start}")
        order = self.order(epoch)
        chunks = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        chosen = chunks[start:]
        if self.device.type == "cuda":
            # Threads only copy. The main thread applies the views, so that threads and kernel
            # launches do not compete for the interpreter lock.
            gathered = prefetch(self._gather, chosen, self.copying_threads)
            for chunk, arrays in zip(chosen, gathered, strict=True):
                yield self._batch(epoch, chunk, arrays)
        else:
            yield from prefetch(
                lambda chunk: self._batch(epoch, chunk, self._gather(chunk)), chosen, self.workers
            )

    def samples(self, indices: Sequence[int]) -> Batch:
        """Return whole samples by index, without augmentation."""
        chosen = to_device(list(indices), self._arrays[0].device)
        images, labels, segments = (a[chosen].to(self.device) for a in self._arrays)
        return Batch(normalized(images.float()), labels, segments)

    def pixels(self, image: Tensor) -> NDArray[np.uint8]:
        """Return an image (C, H, W) of a batch as pixels (H, W, C)."""
        return unnormalized(image)

    @property
    def copying_threads(self) -> int:
        """Number of threads that copy samples to a GPU without room for the cache."""
        return 0 if self.on_device else max(1, self.workers)

    def _shard(self, chunk: list[int]) -> list[int]:
        """Return this process's samples of a batch, or the first sample if it has none."""
        return chunk[self.rank :: self.world] or chunk[:1]

    def _gather(self, chunk: list[int]) -> list[Tensor]:
        chosen = to_device(self._shard(chunk), self._arrays[0].device)
        arrays = [a[chosen] for a in self._arrays]
        return arrays if self.on_device else [a.pin_memory() for a in arrays]

    def _batch(self, epoch: int, chunk: list[int], arrays: list[Tensor]) -> Batch:
        indices = self._shard(chunk)
        arrays = [a.to(self.device, non_blocking=True) for a in arrays]
        if self.augment is None:
            views = [View()] * len(indices)
        else:
            native = self.dataset.size
            views = [self.augment.view(self.seed, epoch, i, native, self.size) for i in indices]
        images, labels, segments = apply_views(arrays[0], arrays[1], arrays[2], views, self.size)
        if self.rank >= len(chunk):
            labels = torch.full_like(labels, VOID)
        return Batch(normalized(images), labels, segments)


def normalized(images: Tensor) -> Tensor:
    """Normalize images (N, H, W, 3), 0 to 255, to (N, 3, H, W), channels_last."""
    images = ((images - PIXEL_MEAN) / PIXEL_STD).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last)


def unnormalized(image: Tensor) -> NDArray[np.uint8]:
    """Return the pixels (H, W, C), 0 to 255, of a normalized image (C, H, W)."""
    pixels = (image.permute(1, 2, 0).float() * PIXEL_STD + PIXEL_MEAN).round().clamp(0, 255)
    return pixels.to(torch.uint8).cpu().numpy()


def _free_memory(device: torch.device | str) -> int:
    return torch.cuda.mem_get_info(device)[0]


def prefetch(make: Callable[[Job], Result], jobs: Iterable[Job], workers: int) -> Generator[Result]:
    """Yield make(job) for each job in order, computed ahead by `workers` threads."""
    if workers == 0:
        yield from map(make, jobs)
        return
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(make, job))
                if len(waiting) > workers + 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


# Classification. At batch 1 a GPU needs less than a millisecond per step. Python must not gather,
# crop and normalize every image on its own. The random crops and flips of an epoch are therefore
# drawn as arrays, and a chunk of about a thousand images is prepared with a few operations. Batches
# are slices of it.


CHUNK_IMAGES = 1024
CHUNK_VALUES = 2**25  # largest chunk, unless a batch has more: 128 MiB in fp32
_TOP, _LEFT, _FLIP = 1, 2, 3  # streams of random numbers


class Views(NamedTuple):
    """The crop of each sample: its first row and column, and whether to flip it."""

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    flip: NDArray[np.int64]


@dataclass(frozen=True)
class CropFlip:
    """Random crops of padded images, and random horizontal flips.

    >>> CropFlip.of_size((32, 32))
    CropFlip(padding=(4, 4), flip=True)
    """

    padding: Size = (0, 0)
    """Black pixels above and below an image, and on its left and right. Crops have its size."""
    flip: bool = True
    """Flip half of the images."""

    @classmethod
    def of_size(cls, size: Size) -> "CropFlip":
        """Return the usual padding: an eighth of the side, 4 pixels for CIFAR."""
        return cls((size[0] // 8, size[1] // 8))

    def views(self, seed: int, epoch: int, count: int) -> Views:
        """Draw the views of `count` samples in an epoch.

        The view of a sample depends only on the seed, the epoch and the index of the sample.
        """

        def below(limit: int, stream: int) -> NDArray[np.int64]:
            upper_bits = words(key(seed, epoch, stream), count) >> np.uint64(32)
            return ((upper_bits * np.uint64(limit)) >> np.uint64(32)).astype(np.int64)

        vertical, horizontal = self.padding
        return Views(
            below(2 * vertical + 1, _TOP) - vertical,
            below(2 * horizontal + 1, _LEFT) - horizontal,
            below(2, _FLIP) * self.flip,
        )


class ClassificationBatches(Batches):
    """Batches of images with one class each.

    Labels are (N,) int64, NO_CLASS to ignore a sample. Otherwise batches are like those of
    `Batches`: batch k of an epoch is always the same, whatever the device, the number of workers
    and the size of the chunks.

    Args:
        cache: Samples, all of one size.
        batch_size: Samples per batch over all processes. The last batch may be smaller.
        crop_flip: Augmentation for training, in random order; None for evaluation, in order.
        seed: Seed for shuffling and augmentation.
        device: Device of the batches.
        device_share: Largest share of the free GPU memory that the cache may take.
        workers: Threads that prepare chunks ahead of time.
        rank: Rank of this process. It gets samples rank, rank + world, ... of each batch. If that
            leaves none, it gets the first sample of the batch, labeled NO_CLASS.
        world: Number of processes.
        chunk_images: Images to prepare at a time; at least one batch.
    """

    ignored_label: int = NO_CLASS

    def __init__(
        self,
        cache: Cache,
        batch_size: int,
        *,
        crop_flip: CropFlip | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        device_share: float = 0.4,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        chunk_images: int = CHUNK_IMAGES,
    ) -> None:
        super().__init__(
            cache,
            batch_size,
            seed=seed,
            device=device,
            device_share=device_share,
            workers=workers,
            rank=rank,
            world=world,
        )
        self.crop_flip, self.chunk_images = crop_flip, chunk_images
        self._labels = torch.from_numpy(cache.labels).to(self.device, torch.int64)
        self._no_segments = torch.empty(0, dtype=torch.int16, device=self.device)

    def order(self, epoch: int) -> list[int]:
        """Return the sample indices of an epoch in order."""
        return self._order(epoch).tolist()

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch, from batch `start` on."""
        if start < 0:
            raise ValueError(f"start must be at least 0, got {start}")
        views = None
        if self.crop_flip is not None:
            views = self.crop_flip.views(self.seed, epoch, len(self.dataset))
        chunks = self._chunks(self._order(epoch), start)
        if self.device.type == "cuda":
            # Threads only copy, as in Batches.
            gathered = prefetch(
                lambda c: self._gather_images(c.indices), chunks, self.copying_threads
            )
            for chunk, images in zip(chunks, gathered, strict=True):
                yield from self._split(chunk, self._finish(chunk.indices, images, views))
        else:
            finished = prefetch(
                lambda c: self._finish(c.indices, self._gather_images(c.indices), views),
                chunks,
                self.workers,
            )
            for chunk, batch in zip(chunks, finished, strict=True):
                yield from self._split(chunk, batch)

    def samples(self, indices: Sequence[int]) -> Batch:
        """Return samples by index, without augmentation."""
        chosen = np.array(list(indices))
        return self._finish(chosen, self._gather_images(chosen), None)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self.crop_flip is None:
            return np.arange(len(self.dataset))
        return shuffled(len(self.dataset), self.seed, epoch)

    def _chunks(self, order: NDArray[np.int64], start: int) -> list["_Chunk"]:
        """Cut the batches from `start` on into chunks of this process's samples."""
        full = len(order) // self.batch_size
        batches = order[: full * self.batch_size].reshape(full, self.batch_size)[start:]
        own = batches[:, self.rank :: self.world]
        is_padding = self.rank >= self.batch_size
        if is_padding:
            own = batches[:, :1]
        images = min(self.chunk_images, CHUNK_VALUES // self.dataset.images[0].size)
        step = max(1, images // own.shape[1])
        found = [
            _Chunk(part.ravel(), part.shape[1], is_padding)
            for part in (own[i : i + step] for i in range(0, len(own), step))
        ]
        last = order[full * self.batch_size :]
        if len(last) and start <= full:  # a smaller batch
            is_padding = self.rank >= len(last)
            part = last[:1] if is_padding else last[self.rank :: self.world]
            found.append(_Chunk(part, len(part), is_padding))
        return found

    def _gather_images(self, indices: NDArray[np.int64]) -> Tensor:
        images = self._arrays[0]
        found = images[_to_device(indices, images.device)]
        return found if self.on_device else found.pin_memory()

    def _finish(self, indices: NDArray[np.int64], images: Tensor, views: Views | None) -> Batch:
        """Crop, flip and normalize gathered images, and add their labels."""
        images = images.to(self.device, non_blocking=True)
        if views is None:
            chosen = _to_device(indices[None], self.device)
        else:
            chosen = _to_device(np.stack([indices, *(v[indices] for v in views)]), self.device)
            images = crop_and_flip(images, chosen[1], chosen[2], chosen[3].bool())
        return Batch(normalized(images), self._labels[chosen[0]], self._no_segments)

    def _split(self, chunk: "_Chunk", batch: Batch) -> Iterator[Batch]:
        labels = torch.full_like(batch.labels, NO_CLASS) if chunk.is_padding else batch.labels
        parts = zip(
            batch.images.split(chunk.batch_size), labels.split(chunk.batch_size), strict=True
        )
        for images, own in parts:
            yield Batch(images, own, self._no_segments)


class _Chunk(NamedTuple):
    indices: NDArray[np.int64]  # this process's samples of some batches
    batch_size: int  # samples of this process in each of them
    is_padding: bool  # the process has no samples of its own in these batches


def crop_and_flip(images: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
    """Shift each image, then flip some of them; pixels from outside are 0.

    This is a random crop of the padded image.

    Args:
        images: (N, H, W, C).
        top, left: Row and column of the image that become the first ones, (N,) int64. They may be
            negative.
        flip: Whether to flip each image horizontally, (N,) bool.
    """
    count, height, width, _ = images.shape
    y, x = (torch.arange(side, device=images.device) for side in (height, width))
    rows = top[:, None] + y
    columns = left[:, None] + torch.where(flip[:, None], width - 1 - x, x)
    inside_rows, inside_columns = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
    shifted = images[
        torch.arange(count, device=images.device)[:, None, None],
        rows.clamp(0, height - 1)[:, :, None],
        columns.clamp(0, width - 1)[:, None],
    ]
    return shifted * (inside_rows[:, :, None] & inside_columns[:, None])[..., None]


def _to_device(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy an array to a device without synchronizing."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
