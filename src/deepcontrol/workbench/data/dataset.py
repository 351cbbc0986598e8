"""Training data as a torch Dataset of (image, label) pairs.

    dataset[i] -> image, label        len(dataset)

image: (C, H, W), or (C, D, H, W) for volumes. Floating-point images are used as they are, so the
dataset normalizes them; uint8 images are normalized as those of the other datasets.
label: a class id for classification, or class ids (H, W) or (D, H, W) for segmentation. Negative
ids, and 255 in segmentation, mark unlabeled images and pixels.

A dataset may be random. torch, NumPy and Python generators are seeded with (seed, epoch, index)
before a sample is read, so that a sample does not depend on workers, processes or resumption.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from streets.randomness import key

from .batches import PIXEL_MEAN, PIXEL_STD, Batch, shuffled, unnormalized
from .sample import NO_CLASS, VOID, Palette, Task, distinct_colors

MAX_CLASSES = VOID  # labels are stored in a byte; the last value is VOID


class LabeledImages(Protocol):
    """A torch map-style Dataset of (image, label) pairs."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class DatasetSplit:
    """One split of the data, read from a torch Dataset.

    Args:
        dataset: The samples, as the module describes them.
        name: Name in messages, such as "train".
        classes: Names of the classes. By default `dataset.classes`.
        palette: One color per class.

    The first sample tells the task, the channels and the size, and whether images are normalized.

    Raises:
        ValueError: The dataset is empty, or its classes are unknown.
    """

    def __init__(
        self,
        dataset: LabeledImages,
        name: str,
        classes: Sequence[str] | None = None,
        palette: Palette | None = None,
    ) -> None:
        self.dataset, self.name = dataset, name
        if len(dataset) == 0:
            raise ValueError(f"the {name} dataset is empty: expected at least one (image, label)")
        found = getattr(dataset, "classes", None) if classes is None else classes
        if found is None:
            raise ValueError(
                f"the classes of the {name} dataset are unknown: pass classes=[...], or give it an "
                "attribute `classes` with their names"
            )
        self.classes = tuple(map(str, found))
        if not 1 < len(self.classes) <= MAX_CLASSES:
            raise ValueError(f"expected 2 to {MAX_CLASSES} classes, got {len(self.classes)}")
        self.palette = distinct_colors(len(self.classes)) if palette is None else palette
        self.histogram: NDArray[np.int64] = np.zeros(len(self.classes), np.int64)
        self._checksum = 0

    def __len__(self) -> int:
        return len(self.dataset)

    @cached_property
    def _first(self) -> tuple[Tensor, Tensor]:
        self.read(0, epoch=0, seed=0)  # checks it
        return self._raw(0)

    @property
    def task(self) -> Task:
        return "segmentation" if self._first[1].dim() else "classification"

    @property
    def channels(self) -> int:
        return self._first[0].shape[0]

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self._first[0].shape[1:])

    @property
    def is_byte(self) -> bool:
        """Whether images have 8 bits, and are normalized here."""
        return self._first[0].dtype == torch.uint8

    def read(self, index: int, epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return an image in fp32 and its label: ids (*) uint8 or an id () int64.

        Raises:
            ValueError: The sample has another form. The message names it.
        """
        with seeded(key(seed, epoch, index)):
            image, label = self._raw(index)
        if image.dtype == torch.uint8:
            image = (image - PIXEL_MEAN) / PIXEL_STD
        bad = (label >= len(self.classes)) & (label != VOID)
        if bad.any():
            raise self._error(
                index,
                f"label {int(label[bad].max() if label.dim() else label)}, expected 0 to "
                f"{len(self.classes) - 1} for {len(self.classes)} classes, or a negative number "
                f"for no label",
            )
        if label.dim() == 0:
            unlabeled = int(label) < 0 or int(label) >= len(self.classes)
            return image.float(), torch.tensor(NO_CLASS) if unlabeled else label.long()
        return image.float(), label.masked_fill(label < 0, VOID).to(torch.uint8)

    def scan(self, workers: int = 0, progress: Callable[[int, int], None] | None = None) -> None:
        """Read all samples once: count their labels, and compute a checksum of the data."""
        histogram, checksum, done = torch.zeros(len(self.classes), dtype=torch.int64), 0, 0
        loader = _loader(self, [[(0, i)] for i in range(len(self))], 0, workers)
        for images, labels in loader:
            ids = labels.flatten().long()
            ids = ids[(ids >= 0) & (ids < len(self.classes))]
            histogram += torch.bincount(ids, minlength=len(self.classes))
            for part in (images, labels):
                checksum = zlib.crc32(part.contiguous().numpy().data, checksum)
            done += len(images)
            if progress is not None:
                progress(done, len(self))
        self.histogram, self._checksum = histogram.numpy(), checksum

    def fingerprint(self) -> str:
        """Identify the data by the content that `scan` has read."""
        return f"{len(self)} images {self._checksum:08x}"

    def _raw(self, index: int) -> tuple[Tensor, Tensor]:
        sample = self.dataset[index]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise self._error(index, f"{_describe(sample)}, expected a pair (image, label)")
        image, label = sample
        try:
            image, label = torch.as_tensor(image), torch.as_tensor(label)
        except (TypeError, ValueError, RuntimeError):
            raise self._error(
                index,
                f"({_describe(image)}, {_describe(label)}), expected tensors: convert them in the "
                "dataset, for example with torchvision.transforms.v2.functional.pil_to_tensor",
            ) from None
        is_number = image.is_floating_point() or image.dtype == torch.uint8
        if image.dim() not in (3, 4) or not is_number:
            expected = "float or uint8 (C, H, W), or (C, D, H, W)"
            raise self._error(index, f"image {_describe(image)}, expected {expected}")
        if label.is_floating_point() or label.is_complex():
            raise self._error(index, f"label {_describe(label)}, expected integer class ids")
        if label.dim() and label.shape != image.shape[1:]:
            raise self._error(
                index,
                f"label {_describe(label)} for an image {_describe(image)}, expected a class id, "
                f"or class ids of shape {tuple(image.shape[1:])}",
            )
        return image, label

    def _error(self, index: int, reason: str) -> ValueError:
        return ValueError(f"sample {index} of the {self.name} dataset: {reason}")


class DatasetBatches:
    """Batches of a `DatasetSplit` on a device.

    Batch k of an epoch is always the same.

    Args:
        dataset: The samples.
        batch_size: Samples per batch over all processes. The last batch may be smaller.
        shuffle: Random order, and new random samples in every epoch. For training.
        seed: Seed for the order and for random datasets.
        device: Device of the batches.
        workers: Processes that read samples. 0 reads them when they are used.
        rank: Rank of this process. It gets samples rank, rank + world, ... of each batch. If that
            leaves none, it gets the first sample without its label.
        world: Number of processes.
    """

    def __init__(
        self,
        dataset: DatasetSplit,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.device, self.workers = torch.device(device), workers
        self.rank, self.world = rank, world
        self.ignored_label = VOID if dataset.task == "segmentation" else NO_CLASS

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-len(self.dataset) // self.batch_size)

    def order(self, epoch: int) -> list[int]:
        """Return the sample indices of an epoch in order."""
        if not self.shuffle:
            return list(range(len(self.dataset)))
        return shuffled(len(self.dataset), self.seed, epoch).tolist()

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch, from batch `start` on."""
        if start < 0:
            raise ValueError(f"start must be at least 0, got {start}")
        order = self.order(epoch)
        chunks = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        shards = [chunk[self.rank :: self.world] or chunk[:1] for chunk in chunks[start:]]
        drawn = epoch if self.shuffle else 0
        keys = [[(drawn, i) for i in shard] for shard in shards]
        loaded = _loader(self.dataset, keys, self.seed, self.workers, self.device.type == "cuda")
        for chunk, (images, labels) in zip(chunks[start:], loaded, strict=True):
            yield self._batch(images, labels, is_padding=self.rank >= len(chunk))

    def samples(self, indices: Sequence[int]) -> Batch:
        """Return samples by index, as an evaluation reads them."""
        images, labels = _collate([(i, self.dataset.read(i, 0, self.seed)) for i in indices])
        return self._batch(images, labels, is_padding=False)

    def pixels(self, image: Tensor) -> NDArray[np.uint8]:
        """Return an image (C, H, W) of a batch as pixels (H, W, C).

        The normalization of a dataset's own images is unknown: their range becomes 0 to 255.
        """
        if self.dataset.is_byte:
            return unnormalized(image)
        shown = image.permute(1, 2, 0).float()
        low, high = shown.amin(), shown.amax()
        shown = 255 * (shown - low) / (high - low).clamp(min=1e-12)
        return shown.round().to(torch.uint8).cpu().numpy()

    def _batch(self, images: Tensor, labels: Tensor, is_padding: bool) -> Batch:
        if is_padding:
            labels = torch.full_like(labels, self.ignored_label)
        layout = torch.channels_last if images.dim() == 4 else torch.channels_last_3d
        images = images.to(self.device, non_blocking=True).contiguous(memory_format=layout)
        no_segments = torch.empty(0, dtype=torch.int16, device=self.device)
        return Batch(images, labels.to(self.device, non_blocking=True), no_segments)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, NumPy and Python while the block runs, and restore their states."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 (transforms use it)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed & (2**63 - 1))
        np.random.seed(seed & (2**32 - 1))  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


class _Keyed(Dataset):
    """Samples by (epoch, index), with their index for error messages."""

    def __init__(self, split: DatasetSplit, seed: int) -> None:
        self.split, self.seed = split, seed

    def __getitem__(self, sample: tuple[int, int]) -> tuple[int, tuple[Tensor, Tensor]]:
        epoch, index = sample
        return index, self.split.read(index, epoch, self.seed)


def _loader(
    split: DatasetSplit,
    keys: list[list[tuple[int, int]]],
    seed: int,
    workers: int,
    pin_memory: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    loader = DataLoader(
        _Keyed(split, seed),
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=pin_memory,
        # The loader draws a seed for its workers; it must not come from the run's generator.
        generator=torch.Generator().manual_seed(0),
    )
    return iter(loader)


def _collate(samples: list[tuple[int, tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
    first_index, (first, _) = samples[0]
    for index, (image, _) in samples:
        if image.shape != first.shape:
            raise ValueError(
                f"samples {first_index} and {index} of a batch have images of shape "
                f"{tuple(first.shape)} and {tuple(image.shape)}, expected one shape: crop, resize "
                "or pad them in the dataset, or evaluate with eval_batch_size=1"
            )
    images, labels = zip(*(sample for _, sample in samples), strict=True)
    return torch.stack(images), torch.stack(labels)


def _describe(value: object) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__
