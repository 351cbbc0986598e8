"""Evaluate a model: error and IoU over a dataset, in windows if images are larger.

AGC subtracts the mean over the image. The mean over a whole image differs from the means over the
crops that a network was trained on, and the error is higher for it (dev/LOG.md,
benchmarks/crops.py). Images larger than the training size are therefore evaluated in windows of
that size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Batch, BatchStream
from ..data.sample import Windows, windows
from ..metrics import ConfusionMatrix, sum_over_processes_
from ..sizes import Size
from .build import class_logits
from .faults import NotFiniteError


def evaluate(
    model: nn.Module,
    batches: BatchStream,
    autocast: torch.dtype | None = None,
    after_batch: Callable[[Batch, Any], None] = lambda batch, outputs: None,
    window: Size | None = None,
) -> ConfusionMatrix:
    """Return the confusion matrix over all images.

    The model runs in evaluation mode and returns to its former mode. In distributed training each
    process evaluates its own images, and all processes return the sum.

    Args:
        model: The network.
        batches: The images and labels.
        autocast: Dtype for autocast, or None.
        after_batch: Called with each batch and the model's outputs. It may raise.
        window: Evaluate larger images in windows of this size.

    Raises:
        NotFiniteError: A logit of any process was not finite. argmax would count NaN as a class.
    """
    matrix = ConfusionMatrix(len(batches.dataset.classes), batches.device, batches.ignored_label)
    bad_batches = torch.zeros((), dtype=torch.int64, device=batches.device)
    with evaluating(model, batches.device, autocast):
        for batch in batches.epoch():
            outputs = forward_in_windows(model, batch.images, window)
            logits = class_logits(outputs)
            bad_batches += ~torch.isfinite(logits).all()
            matrix.update(logits.argmax(1), batch.labels)
            after_batch(batch, outputs)
    matrix.reduce()
    sum_over_processes_(bad_batches)
    if bad_batches:
        raise NotFiniteError("the network's outputs on the validation images are not finite")
    return matrix


def predict(model: nn.Module, images: Tensor, window: Size | None = None) -> Tensor:
    """Return the most likely class of each pixel (N, H, W), or of each image (N,)."""
    return class_logits(forward_in_windows(model, images, window)).argmax(1)


@contextmanager
def evaluating(
    model: nn.Module, device: torch.device, autocast: torch.dtype | None
) -> Iterator[None]:
    """Switch to evaluation mode, no_grad and autocast while the block runs."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            yield
    finally:
        model.train(was_training)


def forward_in_windows(model: Callable[[Tensor], Any], images: Tensor, size: Size | None) -> Any:
    """Return the model's outputs for whole images, stitched from windows.

    Each pixel comes from the window with the nearest center.

    Args:
        model: Returns a map or a named tuple of maps, of the images' size.
        images: (N, C, H, W).
        size: Window size. Images that are not larger, or all if None, take one forward pass.
    """
    crops = split_windows(images, size)
    if size is None or len(crops) == 1:
        return model(images)
    rows, columns = _windows_of(images, size)
    # All windows form one batch: samples are independent, and a larger batch fills a GPU better.
    outputs = model(torch.cat(crops).contiguous(memory_format=torch.channels_last))
    if isinstance(outputs, Tensor):
        return _stitch(outputs, rows, columns)
    return type(outputs)(*(_stitch(output, rows, columns) for output in outputs))


def split_windows(images: Tensor, size: Size | None) -> list[Tensor]:
    """Return the windows of images (N, C, H, W) as views, row by row."""
    if size is None:
        return [images]
    rows, columns = _windows_of(images, size)
    return [
        images[:, :, top : top + size[0], left : left + size[1]]
        for top, _ in rows
        for left, _ in columns
    ]


def _windows_of(images: Tensor, size: Size) -> tuple[Windows, Windows]:
    height, width = images.shape[2:]
    return windows(height, size[0]), windows(width, size[1])


def _stitch(output: Tensor, rows: Windows, columns: Windows) -> Tensor:
    """Join the outputs of all windows (windows x N, C, h, w) into one map."""
    parts = iter(output.chunk(len(rows) * len(columns)))

    def cut(part: Tensor, top: int, height: slice, left: int, width: slice) -> Tensor:
        return part[
            :, :, height.start - top : height.stop - top, width.start - left : width.stop - left
        ]

    lines = [
        torch.cat([cut(next(parts), top, height, left, width) for left, width in columns], 3)
        for top, height in rows
    ]
    return torch.cat(lines, 2)
