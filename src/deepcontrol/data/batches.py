"""Batches for training and evaluation, from memory or from the device itself."""

import queue
import threading
from collections.abc import Generator, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from .augment import Augment, View, look, to_device
from .cache import Cache
from .randomness import key, words
from .sample import Size

T = TypeVar("T")

# Images become about 0 in mean and 1 in spread.
CENTRE, SPREAD = 127.5, 64.0


class Batch(NamedTuple):
    images: Tensor  # (N, 3, H, W) fp32, channels_last, centred and scaled
    labels: Tensor  # (N, H, W) uint8
    segments: Tensor  # (N, H, W) int16: the bits of the cache's uint16, which torch half supports


class Batches:
    """The samples of a cache in batches on a device; batch k of an epoch is always the same.

    With `augment`, an epoch is a permutation keyed on (seed, epoch), and each image is seen as
    keyed on (seed, epoch, index), at `size`. Without, all images come whole and in order.

    On a GPU the arrays are held there where they fit in `device_share` of its free memory, and are
    read ahead from the mapped cache by a thread otherwise. On a CPU they are read as they are used.
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
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.cache, self.batch_size, self.augment, self.seed = cache, batch_size, augment, seed
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
        gathered = (self._gather(chunk) for chunk in chosen)
        if not self.on_device:
            # The thread does the copying alone: views are applied where the device is driven from,
            # so that the two do not fight over the interpreter.
            gathered = _ahead(gathered)
        for indices, arrays in zip(chosen, gathered, strict=True):
            yield self._batch(epoch, indices, arrays)

    def _gather(self, indices: list[int]) -> list[Tensor]:
        chosen = to_device(indices, self._arrays[0].device)
        arrays = [a[chosen] for a in self._arrays]
        return arrays if self.on_device else [a.pin_memory() for a in arrays]

    def _batch(self, epoch: int, indices: list[int], arrays: list[Tensor]) -> Batch:
        arrays = [a.to(self.device, non_blocking=True) for a in arrays]
        if self.augment is None:
            views = [View()] * len(indices)
        else:
            views = [
                self.augment.view(self.seed, epoch, i, self.cache.size, self.size) for i in indices
            ]
        images, labels, segments = look(arrays[0], arrays[1], arrays[2], views, self.size)
        return Batch(normalised(images), labels, segments)


def normalised(images: Tensor) -> Tensor:
    """Images (N, H, W, 3) of values 0 to 255 as networks see them: (N, 3, H, W), channels_last."""
    images = ((images - CENTRE) / SPREAD).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last)


def _free(device: torch.device | str) -> int:
    return torch.cuda.mem_get_info(device)[0]


def _ahead(items: Iterator[T], depth: int = 2) -> Generator[T]:
    """The same items, made by a thread while the last one is being used."""
    end = object()
    ready: queue.Queue[object] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: object) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(item)
                if stopped.is_set():
                    return
            put(end)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not end:
            if isinstance(item, BaseException):
                raise item
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()
