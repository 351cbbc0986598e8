"""The loss of a run: from a batch and the outputs of the network to a scalar."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..data import NO_CLASS, VOID, Batch, LabeledSamples, Task
from ..losses import (
    LossName,
    class_cross_entropy,
    class_weights,
    classes_and_contour_loss,
    contour_loss,
    dice_loss,
    focal_loss,
    pixel_cross_entropy,
)
from ..models import task_of
from .config import Train

Loss = Callable[..., Tensor]  # loss(outputs, *targets)


class Objective:
    """The loss of a network: loss(outputs, *targets(batch)).

    In distributed training, and for parts of a batch, `loss` takes the factors of
    `Group.loss_scales` after the targets. It then returns the part's share of the loss over the
    whole batch.

    Args:
        model: Name of the network. classnet adds the contour loss.
        weights: One weight per class, for segmentation.
        loss: Name of the loss.
        task: Task of a network of another library; others have their own.
    """

    def __init__(
        self,
        model: str,
        weights: Tensor | None = None,
        loss: LossName = "ce",
        task: Task | None = None,
    ) -> None:
        self.weights, self.name = weights, loss
        task = task or task_of(model)
        self.ignored_label = VOID if task == "segmentation" else NO_CLASS
        self._has_contours = model == "classnet"
        self.loss: Loss = self._segmentation_loss
        if self._has_contours:
            self.loss = self._classnet_loss
        elif task == "classification":
            self.loss = self._classification_loss

    def targets(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the tensors that the loss needs. A captured step copies them all."""
        return (batch.labels, batch.segments) if self._has_contours else (batch.labels,)

    def _segmentation_loss(
        self, logits: Tensor, labels: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        parts: list[Tensor] = []  # a mean over pixels, and a mean over samples
        if self.name == "focal":
            parts.append(_scaled(focal_loss(logits, labels, self.weights), scales, 0))
        elif self.name != "dice":
            parts.append(_scaled(pixel_cross_entropy(logits, labels, self.weights), scales, 0))
        if "dice" in self.name:
            parts.append(_scaled(dice_loss(logits, labels), scales, 1))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _classification_loss(
        self, logits: Tensor, labels: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        if self.name == "focal":
            loss = focal_loss(logits, labels, ignored_label=NO_CLASS)
        else:
            loss = class_cross_entropy(logits, labels)
        return _scaled(loss, scales, 0)

    def _classnet_loss(
        self, outputs: Any, labels: Tensor, segments: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        classes, contour = outputs
        if scales is None:
            return classes_and_contour_loss(classes, contour, labels, segments, self.weights)
        class_loss = pixel_cross_entropy(classes, labels, self.weights)
        outline_loss = contour_loss(contour, segments, labels)
        return _scaled(class_loss, scales, 0) + _scaled(outline_loss, scales, 1)


def _scaled(loss: Tensor, scales: Tensor | None, index: int) -> Tensor:
    """Scale a mean over pixels (index 0) or samples (index 1) to the whole batch."""
    return loss if scales is None else scales.flatten()[index].to(loss.dtype) * loss


def build_objective(config: Train, data: LabeledSamples, device: torch.device) -> Objective:
    """Return the loss of the run.

    Segmentation has ENet's class weights, computed from the training labels, or none.
    """
    if config.task == "classification" or config.class_weights == "none":
        return Objective(config.model, None, config.loss, config.task)
    weights = config.class_weight_scale * class_weights(torch.from_numpy(data.histogram))
    return Objective(config.model, weights.to(device), config.loss, config.task)


def class_logits(outputs: Any) -> Tensor:
    """Return the class logits (N, classes, *) from the outputs of any network."""
    return outputs if isinstance(outputs, Tensor) else outputs.classes
