"""What the networks are trained on: weighted pixel classes, and contours near boundaries.

Void pixels count nowhere, and everything is computed in fp32 or better.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .data.sample import VOID

NEAR = 4  # pixels: how far from a boundary the contour loss looks


def class_weights(histogram: Tensor) -> Tensor:
    """ENet's weights 1 / ln(1.02 + p) from pixel counts per class, scaled to a mean of 1.

    The mean is over the classes that occur, and those that don't get 1: a class nobody has seen
    must not change the weight, and so the learning rate, of the others.

    >>> class_weights(torch.tensor([600, 300, 100, 0]))
    tensor([0.4289, 0.7453, 1.8258, 1.0000])
    """
    counts = histogram.double()
    if counts.dim() != 1 or not counts.sum() > 0:
        raise ValueError(f"expected pixel counts of the classes, got {histogram.tolist()}")
    weights = 1 / torch.log(1.02 + counts / counts.sum())
    occurs = counts > 0
    weights = weights / weights[occurs].mean()
    return torch.where(occurs, weights, 1.0).float()


def pixel_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean over labeled pixels of weight[class] * cross-entropy.

    logits (N, classes, *), labels (N, *) with VOID where there is none, weights (classes,).
    It is *not* divided by the sum of the weights as torch's weighted cross-entropy is: with weights
    of mean 1 the learning rate then means the same with and without them. No labeled pixel: 0.
    """
    if labels.shape != logits.shape[:1] + logits.shape[2:]:
        raise ValueError(f"logits of {tuple(logits.shape)} for labels of {tuple(labels.shape)}")
    target, logits = labels.long(), _exact(logits)
    if weights is not None:
        weights = weights.to(logits.dtype)
    if logits.dim() > 2 and logits.stride(1) == 1:
        # A pixel's logits are neighbors: rows of a matrix, which torch has faster kernels for.
        logits, target = logits.movedim(1, -1).flatten(0, -2), target.flatten()
    # Torch's own sum would do, but on a GPU it is one block of threads for a whole sample's pixels,
    # forward and backward, and not the same in every run.
    losses = functional.cross_entropy(logits, target, weights, ignore_index=VOID, reduction="none")
    return losses.sum() / (target != VOID).sum().clamp(min=1)


def contour_loss(logits: Tensor, segments: Tensor, labels: Tensor, near: int = NEAR) -> Tensor:
    """1 - soft IoU of the predicted and the true boundaries, over points near a boundary.

        IoU = sum(p t) / sum(p + t - p t)        p = sigmoid(logits), t = 1 on a boundary

    logits (N, 1, H, W); segments (N, H, W) name each pixel's instance or region; labels say where
    it is void. The sums run over the points of one sample within `near` pixels of a boundary, void
    ones left out; the loss is the mean over the samples, and a sample without boundary adds 0.
    """
    if logits[:, 0].shape != segments.shape or logits.shape[1] != 1:
        raise ValueError(
            f"contour logits of {tuple(logits.shape)} for segments of {tuple(segments.shape)}"
        )
    target = boundaries(segments, labels)
    close = _dilate(target, near) & (labels != VOID)
    # Masked before the sigmoid, so that not even a NaN gets through from elsewhere.
    p = torch.sigmoid(_exact(logits[:, 0]).masked_fill(~close, -torch.inf))
    t = target.to(p.dtype)
    dims = (1, 2)
    both = (p * t).sum(dims)
    either = (p + t).sum(dims) - both
    found = target.any(2).any(1)
    iou = both / torch.where(found, either, 1.0)
    return (found * (1 - iou)).mean()


def boundaries(segments: Tensor, labels: Tensor) -> Tensor:
    """Where a pixel touches, along rows or columns, one of another segment: bool (N, H, W).

    Both sides of a boundary are marked, so it is two pixels wide. Void borders nothing.
    """
    ids = segments.to(torch.int32)  # torch compares no uint16
    labeled = labels != VOID
    marked = torch.zeros_like(labeled)
    for dim in (1, 2):
        n = ids.shape[dim] - 1
        here, there = ids.narrow(dim, 0, n), ids.narrow(dim, 1, n)
        valid = labeled.narrow(dim, 0, n) & labeled.narrow(dim, 1, n)
        differ = (here != there) & valid
        marked.narrow(dim, 0, n).logical_or_(differ)
        marked.narrow(dim, 1, n).logical_or_(differ)
    return marked


def classes_and_contour_loss(
    classes: Tensor,
    contour: Tensor,
    labels: Tensor,
    segments: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """ClassNet's loss: the class loss and the contour loss, simply added, as in the paper."""
    return pixel_cross_entropy(classes, labels, weights) + contour_loss(contour, segments, labels)


def _dilate(mask: Tensor, radius: int) -> Tensor:
    """True within `radius` rows and columns of a True: bool (N, H, W)."""
    window = 2 * radius + 1
    spread = functional.max_pool2d(mask[:, None].float(), window, stride=1, padding=radius)
    return spread[:, 0] > 0


def _exact(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
