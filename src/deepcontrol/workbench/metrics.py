"""Pixel error and IoU from one confusion matrix of integers, so that any split adds up exactly."""

import torch
import torch.distributed as dist
from torch import Tensor

from .data.sample import VOID


class ConfusionMatrix:
    """Counts of (true class, predicted class) over all labeled pixels seen, as int64 (C, C).

    >>> matrix = ConfusionMatrix(2)
    >>> matrix.update(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 255]))
    >>> matrix.pixel_error
    0.3333333333333333
    """

    def __init__(self, classes: int, device: torch.device | str | None = None) -> None:
        self.classes = classes
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        """Add predicted classes and labels of one shape; pixels labeled VOID count nowhere."""
        if predicted.shape != labels.shape:
            raise ValueError(
                f"predictions of shape {tuple(predicted.shape)} "
                f"for labels of shape {tuple(labels.shape)}"
            )
        # Void gets a cell of its own before the matrix, and what is no class one behind it.
        cells = 1 + self.classes**2
        true, guess = labels.long(), predicted.long()
        inside = (true >= 0) & (true < self.classes) & (guess >= 0) & (guess < self.classes)
        pairs = torch.where(inside, 1 + true * self.classes + guess, cells)
        counts = torch.bincount(torch.where(true == VOID, 0, pairs).flatten(), minlength=cells)
        if len(counts) > cells:
            raise ValueError(f"labels or predictions outside of the {self.classes} classes")
        self.counts += counts[1:].reshape(self.classes, self.classes)

    def reduce(self) -> None:
        """Sum over all processes of the default group, if there is one; every process gets it."""
        sum_over_processes_(self.counts)

    @property
    def pixel_error(self) -> float:
        """The share of labeled pixels that got a wrong class; NaN before any was seen."""
        total = self.counts.sum()
        return ((total - self.counts.trace()).double() / total).item()

    @property
    def class_iou(self) -> Tensor:
        """Intersection over union of each class, fp64; NaN for those neither seen nor predicted."""
        counts = self.counts.double()
        union = counts.sum(0) + counts.sum(1) - counts.diag()
        return counts.diag() / union

    @property
    def mean_iou(self) -> float:
        """The mean IoU over the classes that were seen or predicted."""
        return self.class_iou.nanmean().item()


def sum_over_processes_(counts: Tensor) -> None:
    """In place, over the default group; nothing where there is none."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(counts)
