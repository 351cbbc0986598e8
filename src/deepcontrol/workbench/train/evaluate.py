"""How good a model is: the share of wrongly labeled pixels and the IoU over a whole split."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Batch, Batches
from ..metrics import ConfusionMatrix, sum_over_processes_
from ..sizes import Size
from .faults import NotFiniteError
from .objective import class_logits
from .windows import forward_in_windows


def evaluate(
    model: nn.Module,
    batches: Batches,
    autocast: torch.dtype | None = None,
    after_each: Callable[[Batch, Any], None] = lambda batch, outputs: None,
    window: Size | None = None,
) -> ConfusionMatrix:
    """The confusion matrix over all images, in evaluation mode; the model is left as it was.

    Where several processes evaluate together, each its own share of every batch, all get the sum:
    every image has been counted once. `after_each` gets every batch with the model's outputs, and
    may raise. Images that are larger than `window` are seen in windows of that size.

    NotFiniteError, in all of them, if a logit was not finite: the largest of NaNs is a class too,
    and would be counted as a prediction.
    """
    matrix = ConfusionMatrix(len(batches.cache.classes), batches.device)
    bad = torch.zeros((), dtype=torch.int64, device=batches.device)  # batches
    with evaluating(model, batches.device, autocast):
        for batch in batches.epoch():
            outputs = forward_in_windows(model, batch.images, window)
            logits = class_logits(outputs)
            bad += ~torch.isfinite(logits).all()
            matrix.update(logits.argmax(1), batch.labels)
            after_each(batch, outputs)
    matrix.reduce()
    sum_over_processes_(bad)
    if bad:
        raise NotFiniteError("the network's outputs on the validation images are not finite")
    return matrix


def predict(model: nn.Module, images: Tensor, window: Size | None = None) -> Tensor:
    """The most likely class of each pixel: (N, H, W)."""
    return class_logits(forward_in_windows(model, images, window)).argmax(1)


@contextmanager
def evaluating(
    model: nn.Module, device: torch.device, autocast: torch.dtype | None
) -> Iterator[None]:
    """Evaluation mode, without gradients and in the precision of the run; then as before."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            yield
    finally:
        model.train(was_training)
