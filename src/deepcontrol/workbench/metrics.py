"""Error and IoU from an integer confusion matrix, exact for any split of data.

`ImageErrors` has the error of each single image.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .data.sample import VOID


class ConfusionMatrix:
    """Count pixels or images by true and predicted class, int64 (classes, classes).

    Args:
        classes: Number of classes.
        device: Device of the counts.
        ignored_label: Label of pixels or images that are not counted.

    >>> matrix = ConfusionMatrix(2)
    >>> matrix.update(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 255]))
    >>> matrix.pixel_error
    0.3333333333333333
    """

    def __init__(
        self,
        classes: int,
        device: torch.device | str | None = None,
        ignored_label: int = VOID,
    ) -> None:
        self.classes, self.ignored_label = classes, ignored_label
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        """Add predicted classes and labels of the same shape; skip `ignored_label`."""
        if predicted.shape != labels.shape:
            raise ValueError(
                f"expected predictions and labels of the same shape, got {tuple(predicted.shape)} "
                f"and {tuple(labels.shape)}"
            )
        # Cell 0 counts ignored labels, the cell after the matrix counts invalid ids.
        cells = 1 + self.classes**2
        true, guess = labels.long(), predicted.long()
        inside = (true >= 0) & (true < self.classes) & (guess >= 0) & (guess < self.classes)
        pairs = torch.where(inside, 1 + true * self.classes + guess, cells)
        pairs = torch.where(true == self.ignored_label, 0, pairs)
        counts = torch.bincount(pairs.flatten(), minlength=cells)
        if len(counts) > cells:
            raise ValueError(
                f"labels and predictions must be from 0 to {self.classes - 1}, or "
                f"{self.ignored_label} for labels to ignore"
            )
        self.counts += counts[1:].reshape(self.classes, self.classes)

    def reduce(self) -> None:
        """Sum the counts over all processes of the default group, if it is initialized."""
        sum_over_processes_(self.counts)

    @property
    def pixel_error(self) -> float:
        """Share of labeled pixels or images with a wrong class; NaN without labels."""
        total = self.counts.sum()
        return ((total - self.counts.trace()).double() / total).item()

    @property
    def only_class(self) -> int | None:
        """The class that is predicted everywhere although several occur, or None."""
        predicted, labeled = self.counts.sum(0).nonzero(), self.counts.sum(1).nonzero()
        return int(predicted) if len(predicted) == 1 and len(labeled) > 1 else None

    @property
    def class_error(self) -> Tensor:
        """Return the share of errors per true class in fp64; NaN for unlabeled classes."""
        counts = self.counts.double()
        return 1 - counts.diag() / counts.sum(1)

    @property
    def class_iou(self) -> Tensor:
        """IoU per class in fp64; NaN for classes neither labeled nor predicted."""
        counts = self.counts.double()
        union = counts.sum(0) + counts.sum(1) - counts.diag()
        return counts.diag() / union

    @property
    def mean_iou(self) -> float:
        """Mean IoU over the classes that are labeled or predicted."""
        return self.class_iou.nanmean().item()


def sum_over_processes_(counts: Tensor) -> None:
    """Sum a tensor in-place over the default process group, if it is initialized."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(counts)


class ImageError(NamedTuple):
    """The error of one image of a split."""

    sample: int  # index in the split
    error: float  # share of wrong pixels; in classification 1 - probability of its class


class ImageErrors:
    """Collect the error of each image, without waiting for a GPU.

    Args:
        ignored_label: Label of pixels or images that are not counted.
        rank: Rank of this process, which gets images rank, rank + world, ... of each batch.
        world: Number of processes.

    >>> errors = ImageErrors(-1)
    >>> errors.update(0, torch.tensor([[9.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
    >>> [image.sample for image in errors.worst(2)]
    [1, 0]
    """

    def __init__(self, ignored_label: int, rank: int = 0, world: int = 1) -> None:
        self.ignored_label, self.rank, self.world = ignored_label, rank, world
        self._parts: list[tuple[int, Tensor]] = []

    def update(self, start: int, logits: Tensor, labels: Tensor) -> None:
        """Add this process's part of the batch that starts with image `start`.

        Args:
            start: Index of the first image of the batch over all processes.
            logits: (N, classes, H, W), or (N, classes) in classification.
            labels: (N, H, W), or (N,).
        """
        labels = labels.long()
        is_labeled = labels != self.ignored_label
        if labels.ndim == 1:
            own = logits.float().softmax(1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
            error = torch.where(is_labeled, 1 - own, torch.nan)
        else:
            wrong = (logits.argmax(1) != labels) & is_labeled
            error = wrong.flatten(1).sum(1).double() / is_labeled.flatten(1).sum(1)
        self._parts.append((start, error))

    def worst(self, count: int) -> list[ImageError]:
        """Return the images of this process with the highest errors, the worst first."""
        if not self._parts:
            return []
        errors = torch.cat([part for _, part in self._parts]).double().nan_to_num(-1.0)
        indices = [
            start + self.rank + i * self.world
            for start, part in self._parts
            for i in range(len(part))
        ]
        found = errors.sort(descending=True, stable=True)
        pairs = zip(found.indices[:count].tolist(), found.values[:count].tolist(), strict=True)
        return [ImageError(indices[i], error) for i, error in pairs if error >= 0]
