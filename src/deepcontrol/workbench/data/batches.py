"""Batches for training and evaluation, from memory or from the device itself."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from streets.randomness import key, words

from .augment import Augment, View, look, to_device
from .cache import Cache
from .sample import VOID, Size

Job = TypeVar("Job")
Made = TypeVar("Made")

# Images become about 0 in mean and 1 in spread.
CENTER, SPREAD = 127.5, 64.0


class Batch(NamedTuple):
    images: Tensor  # (N, 3, H, W) fp32, channels_last, centered and scaled
    labels: Tensor  # (N, H, W) uint8
    segments: Tensor  # (N, H, W) int16: the bits of the cache's uint16, which torch half supports


class Batches:
    """The samples of a cache in batches on a device; batch k of an epoch is always the same.

    With `augment`, an epoch is a permutation keyed on (seed, epoch), and each image is seen as
    keyed on (seed, epoch, index), at `size`. Without, all images come whole and in order.

    On a GPU the arrays are held there where they fit in `device_share` of its free memory, and are
    read ahead from the mapped cache by a thread otherwise. On a CPU they are read as they are used,
    or ahead by `workers` threads. None of that changes a batch.

    Of `world` processes, that of `rank` gets every world-th image of each batch, so that all have
    the same number of batches and each image is seen once. A process for which a batch has no image
    left gets the batch's first, labeled void throughout: it counts nowhere.
    """

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
        self.cache, self.batch_size, self.augment, self.seed = cache, batch_size, augment, seed
        self.workers, self.rank, self.world = workers, rank, world
        if augment is None and size not in (None, cache.size):
            raise ValueError(f"size {size} needs an augmentation: without, images come whole")
        self.size = size or cache.size
        if any(part > whole for part, whole in zip(self.size, cache.size, strict=True)):
            raise ValueError(
                f"size {self.size} is larger than the cache's {cache.size}: prepare it at that size"
            )
        self.device = torch.device(device)
        arrays = (cache.images, cache.labels, cache.segments.view(np.int16))
        self._arrays = tuple(torch.from_numpy(a) for a in arrays)
        self.on_device = self.device.type != "cuda" or cache.nbytes < device_share * _free(device)
        if self.on_device:
            self._arrays = tuple(a.to(self.device) for a in self._arrays)

    def __len__(self) -> int:
        """Batches in an epoch; the last may be smaller."""
        return -(-len(self.cache) // self.batch_size)

    def order(self, epoch: int) -> list[int]:
        """The samples of an epoch in their order."""
        if self.augment is None:
            return list(range(len(self.cache)))
        return np.argsort(words(key(self.seed, epoch), len(self.cache)), kind="stable").tolist()

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on."""
        if start < 0:
            raise ValueError(f"start must be at least 0, got {start}")
        order = self.order(epoch)
        chunks = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        chosen = chunks[start:]
        if self.device.type == "cuda":
            # Threads do the copying alone: views are applied where the device is driven from, so
            # that the two do not fight over the interpreter.
            gathered = _ahead(self._gather, chosen, 0 if self.on_device else max(1, self.workers))
            for chunk, arrays in zip(chosen, gathered, strict=True):
                yield self._batch(epoch, chunk, arrays)
        else:
            yield from _ahead(
                lambda chunk: self._batch(epoch, chunk, self._gather(chunk)), chosen, self.workers
            )

    def _own(self, chunk: list[int]) -> list[int]:
        """What of a batch is this process's; its first image where nothing is."""
        return chunk[self.rank :: self.world] or chunk[:1]

    def _gather(self, chunk: list[int]) -> list[Tensor]:
        chosen = to_device(self._own(chunk), self._arrays[0].device)
        arrays = [a[chosen] for a in self._arrays]
        return arrays if self.on_device else [a.pin_memory() for a in arrays]

    def _batch(self, epoch: int, chunk: list[int], arrays: list[Tensor]) -> Batch:
        indices = self._own(chunk)
        arrays = [a.to(self.device, non_blocking=True) for a in arrays]
        if self.augment is None:
            views = [View()] * len(indices)
        else:
            views = [
                self.augment.view(self.seed, epoch, i, self.cache.size, self.size) for i in indices
            ]
        images, labels, segments = look(arrays[0], arrays[1], arrays[2], views, self.size)
        if self.rank >= len(chunk):
            labels = torch.full_like(labels, VOID)
        return Batch(normalized(images), labels, segments)


def normalized(images: Tensor) -> Tensor:
    """Images (N, H, W, 3) of values 0 to 255 as networks see them: (N, 3, H, W), channels_last."""
    images = ((images - CENTER) / SPREAD).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last)


def _free(device: torch.device | str) -> int:
    return torch.cuda.mem_get_info(device)[0]


def _ahead(make: Callable[[Job], Made], jobs: Iterable[Job], workers: int) -> Generator[Made]:
    """make(job) for each, in order; made by `workers` threads while earlier ones are being used."""
    if workers == 0:
        yield from map(make, jobs)
        return
    waiting: deque[Future[Made]] = deque()
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
