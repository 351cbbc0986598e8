"""Batches of images with one class each, prepared many images at a time.

At batch 1 a GPU needs less than a millisecond per step. Python must not gather, crop and normalize
every image on its own. The random crops and flips of an epoch are therefore drawn as arrays, and a
chunk of about a thousand images is prepared with a few operations. Batches are slices of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streets.randomness import key, words

from .batches import Batch, Batches, normalized, prefetch, shuffled
from .cache import Cache
from .sample import NO_CLASS, Size

CHUNK_IMAGES = 1024
CHUNK_VALUES = 2**25  # at most, unless a batch has more: 128 MiB in fp32
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

    Labels are (N,) int64, NO_CLASS to ignore a sample. In all other respects batches are as those
    of `Batches`: batch k of an epoch is always the same, whatever the device, the number of workers
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
