"""Losses: cross-entropy and focal loss, Dice, and ClassNet's contour loss.

Cross-entropy and focal loss are for images and for pixels. Pixels labeled VOID and images labeled
NO_CLASS are ignored. Losses are computed in fp32, or in fp64 for fp64 logits.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from .data.sample import NO_CLASS, VOID

LossName = Literal["ce", "dice", "ce+dice", "focal"]

FOCAL_GAMMA = 2.0
DICE_SMOOTHING = 1.0  # pixels; keeps the gradient of very small objects bounded
CONTOUR_RADIUS = 4  # the contour loss covers pixels up to this distance from a boundary


def class_weights(histogram: Tensor) -> Tensor:
    """Return the class weights of ENet, 1 / ln(1.02 + p), scaled to mean 1.

    p is the share of pixels of a class. The mean is over the classes that occur. Absent classes get
    weight 1, so that they do not change the weights, and the learning rate, of the others.

    Paper: https://arxiv.org/abs/1606.02147

    Args:
        histogram: Pixels per class, (classes,).

    >>> class_weights(torch.tensor([600, 300, 100, 0]))
    tensor([0.4289, 0.7453, 1.8258, 1.0000])
    """
    counts = histogram.double()
    if counts.dim() != 1 or not counts.sum() > 0:
        raise ValueError(
            f"expected a 1-d histogram with at least one pixel, got {histogram.tolist()}"
        )
    weights = 1 / torch.log(1.02 + counts / counts.sum())
    occurs = counts > 0
    weights = weights / weights[occurs].mean()
    return torch.where(occurs, weights, 1.0).float()


def pixel_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean over labeled pixels of weight[class] * cross-entropy.

    Unlike torch's weighted cross-entropy, the sum is divided by the number of pixels, not by the
    sum of their weights. With weights of mean 1, a learning rate then suits both the weighted and
    the plain loss. Without labeled pixels the loss is 0.

    Args:
        logits: (N, classes, *).
        labels: (N, *), class ids or VOID.
        weights: (classes,), optional.
    """
    if labels.shape != logits.shape[:1] + logits.shape[2:]:
        raise ValueError(
            f"shapes do not match: logits of {tuple(logits.shape)} for labels of "
            f"{tuple(labels.shape)}, expected (N, classes, *) and (N, *)"
        )
    target, logits = labels.long(), _upcast(logits)
    if weights is not None:
        weights = weights.to(logits.dtype)
    if logits.dim() > 2 and logits.stride(1) == 1:
        # Channels last: view the logits as rows of a matrix, for which torch has faster kernels.
        logits, target = logits.movedim(1, -1).flatten(0, -2), target.flatten()
    # Not reduction="sum": on a GPU it uses one thread block per sample and is not deterministic.
    losses = functional.cross_entropy(logits, target, weights, ignore_index=VOID, reduction="none")
    return losses.sum() / (target != VOID).sum().clamp(min=1)


def class_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over labeled images; 0 without labeled images.

    Args:
        logits: (N, classes).
        labels: (N,), class ids or NO_CLASS.

    >>> class_cross_entropy(torch.zeros(3, 2), torch.tensor([0, 1, NO_CLASS]))
    tensor(0.6931)
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"shapes do not match: logits of {tuple(logits.shape)} for labels of "
            f"{tuple(labels.shape)}, expected (N, classes) and (N,)"
        )
    target = labels.long()
    losses = functional.cross_entropy(
        _upcast(logits), target, ignore_index=NO_CLASS, reduction="none"
    )
    return losses.sum() / (target != NO_CLASS).sum().clamp(min=1)


def focal_loss(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    gamma: float = FOCAL_GAMMA,
    ignored_label: int = VOID,
) -> Tensor:
    """Return the mean over labels of weight[class] * (1 - p)^gamma * cross-entropy.

    p is the probability of the true class, so that pixels that are right already count little.
    Without labels the loss is 0.

    Paper: https://arxiv.org/abs/1708.02002

    Args:
        logits: (N, classes, *).
        labels: (N, *), class ids or `ignored_label`.
        weights: (classes,), optional.
        gamma: Exponent; 0 is cross-entropy.
        ignored_label: Label to ignore.

    >>> focal_loss(torch.zeros(1, 2, 1), torch.tensor([[1]]))
    tensor(0.1733)
    """
    target = labels.long()
    losses = functional.cross_entropy(
        _upcast(logits), target, ignore_index=ignored_label, reduction="none"
    )
    labeled = target != ignored_label
    losses = (1 - torch.exp(-losses)).clamp(min=0) ** gamma * losses
    if weights is not None:
        losses = losses * weights.to(losses.dtype)[target.masked_fill(~labeled, 0)]
    return losses.sum() / labeled.sum().clamp(min=1)


def dice_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 - soft Dice, averaged over the classes of a sample, then over samples.

        Dice = (2 sum(p t) + 1) / (sum(p) + sum(t) + 1)      p = softmax(logits), t = one-hot labels

    The sums are over the labeled pixels of a sample, and the mean is over the classes that these
    pixels have. Each sample has its own Dice, so that the loss of a batch is the mean over any
    parts of it. A sample without labels has loss 0.

    Args:
        logits: (N, classes, *).
        labels: (N, *), class ids or VOID.

    >>> dice_loss(torch.tensor([[[99.0, -99.0], [-99.0, 99.0]]]), torch.tensor([[0, 1]]))
    tensor(0.)
    """
    target, p = labels.long().flatten(1), _upcast(logits).flatten(2).softmax(1)
    labeled = target != VOID
    one_hot = torch.zeros_like(p).scatter_(1, target.masked_fill(~labeled, 0).unsqueeze(1), 1.0)
    one_hot = one_hot * labeled.unsqueeze(1)
    both = (p * one_hot).sum(2)
    either = (p * labeled.unsqueeze(1)).sum(2) + one_hot.sum(2)
    dice = (2 * both + DICE_SMOOTHING) / (either + DICE_SMOOTHING)
    occurs = one_hot.sum(2) > 0
    return ((1 - dice) * occurs).sum(1).div(occurs.sum(1).clamp(min=1)).mean()


def contour_loss(
    logits: Tensor, segments: Tensor, labels: Tensor, radius: int = CONTOUR_RADIUS
) -> Tensor:
    """Return 1 - soft IoU of predicted and true boundaries, averaged over samples.

        IoU = sum(p t) / sum(p + t - p t)        p = sigmoid(logits), t = 1 on a boundary

    The sums are over the labeled pixels of a sample near a boundary. A sample without a boundary
    has loss 0.

    Args:
        logits: (N, 1, H, W).
        segments: (N, H, W), instance or region ids.
        labels: (N, H, W), class ids or VOID.
        radius: Largest distance to a boundary, in pixels along rows and columns.
    """
    if logits[:, 0].shape != segments.shape or logits.shape[1] != 1:
        raise ValueError(
            f"shapes do not match: contour logits of {tuple(logits.shape)} for segments of "
            f"{tuple(segments.shape)}, expected (N, 1, H, W) and (N, H, W)"
        )
    target = boundaries(segments, labels)
    close = _dilate(target, radius) & (labels != VOID)
    # Masked before the sigmoid, so that a NaN in an ignored pixel has no effect.
    p = torch.sigmoid(_upcast(logits[:, 0]).masked_fill(~close, -torch.inf))
    t = target.to(p.dtype)
    dims = (1, 2)
    both = (p * t).sum(dims)
    either = (p + t).sum(dims) - both
    found = target.any(2).any(1)
    iou = both / torch.where(found, either, 1.0)
    return (found * (1 - iou)).mean()


def boundaries(segments: Tensor, labels: Tensor) -> Tensor:
    """Mark pixels with a neighbor of another segment: bool (N, H, W).

    Neighbors are along rows and columns. Both sides of a boundary are marked, so that it is two
    pixels wide. There are no boundaries to VOID pixels.
    """
    ids = segments.to(torch.int32)  # torch cannot compare uint16
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
    """Return the loss of ClassNet: the sum of the class loss and the contour loss."""
    return pixel_cross_entropy(classes, labels, weights) + contour_loss(contour, segments, labels)


def _dilate(mask: Tensor, radius: int) -> Tensor:
    """Dilate a mask (N, H, W) by `radius` along rows and columns."""
    window = 2 * radius + 1
    spread = functional.max_pool2d(mask[:, None].float(), window, stride=1, padding=radius)
    return spread[:, 0] > 0


def _upcast(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
