"""What a model is trained on: its loss, and what the loss needs of a batch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..data import Batch
from ..losses import classes_and_contour_loss, contour_loss, pixel_cross_entropy

Loss = Callable[..., Tensor]  # loss(outputs, *targets)


class Objective:
    """loss(outputs, *targets(batch)) of a model by its name, with the classes' weights.

    With `shares` (Group.shares) after the targets, the loss is this process's part of a batch that
    several processes see together.
    """

    def __init__(self, model: str, weights: Tensor) -> None:
        self.weights = weights
        self._contours = model == "classnet"
        self.loss: Loss = self._classnet if self._contours else self._segnet

    def targets(self, batch: Batch) -> tuple[Tensor, ...]:
        """No more than is needed: a captured step copies them."""
        return (batch.labels, batch.segments) if self._contours else (batch.labels,)

    def _segnet(self, logits: Tensor, labels: Tensor, shares: Tensor | None = None) -> Tensor:
        loss = pixel_cross_entropy(logits, labels, self.weights)
        return loss if shares is None else shares[0].to(loss.dtype) * loss

    def _classnet(
        self, outputs: Any, labels: Tensor, segments: Tensor, shares: Tensor | None = None
    ) -> Tensor:
        classes, contour = outputs
        if shares is None:
            return classes_and_contour_loss(classes, contour, labels, segments, self.weights)
        of_classes = pixel_cross_entropy(classes, labels, self.weights)
        of_contours = contour_loss(contour, segments, labels)
        pixels, samples = shares.to(of_classes.dtype)
        return pixels * of_classes + samples * of_contours


def class_logits(outputs: Any) -> Tensor:
    """The class logits (N, classes, H, W) of any of the networks."""
    return outputs if isinstance(outputs, Tensor) else outputs.classes
