"""Batches for training and evaluation, gathered on the host or on the device."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streets.randomness import key, words

from .augment import Augment, View, apply_views, to_device
from .cache import Cache
from .sample import VOID, Palette, Size, Task

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
