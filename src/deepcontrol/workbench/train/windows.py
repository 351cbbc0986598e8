"""Images that are larger than in training, seen as in training: in windows of that size.

AGC subtracts the mean of what it sees. Of a whole image that is another mean than of the crops that
a network has learned from, and its error is higher for it (LOG.md, benchmarks/crops.py).
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..sizes import Size

Windows = list[tuple[int, slice]]  # along a side: where each begins, and what it stands for


def forward_in_windows(model: Callable[[Tensor], Any], images: Tensor, size: Size | None) -> Any:
    """The model's outputs for whole images (N, C, H, W), put together from windows of this size.

    Each pixel is of the window whose middle is nearest to it. Images that are no larger, and all
    of them if there is no size, go through at once.
    """
    seen = views(images, size)
    if size is None or len(seen) == 1:
        return model(images)
    rows, columns = _of_both_sides(images, size)
    # Side by side in one batch: samples do not meet, and a GPU is better filled.
    outputs = model(torch.cat(seen).contiguous(memory_format=torch.channels_last))
    if isinstance(outputs, Tensor):
        return _joined(outputs, rows, columns)
    return type(outputs)(*(_joined(output, rows, columns) for output in outputs))


def views(images: Tensor, size: Size | None) -> list[Tensor]:
    """The windows of images (N, C, H, W), row by row; the images if there is nothing to cut."""
    if size is None:
        return [images]
    rows, columns = _of_both_sides(images, size)
    return [
        images[:, :, top : top + size[0], left : left + size[1]]
        for top, _ in rows
        for left, _ in columns
    ]


def windows(whole: int, own: int) -> Windows:
    """Where windows begin along a side, and which pixels each of them stands for.

    >>> windows(384, 256)
    [(0, slice(0, 192, None)), (128, slice(192, 384, None))]
    >>> windows(512, 512)
    [(0, slice(0, 512, None))]
    """
    starts = starts_of(whole, own, step=own)
    borders = [(a + b + own) // 2 for a, b in itertools.pairwise(starts)]
    shares = itertools.pairwise([0, *borders, whole])
    return [(start, slice(*share)) for start, share in zip(starts, shares, strict=True)]


def starts_of(whole: int, own: int, step: int) -> list[int]:
    """Where windows begin that cover a side, as far from each other as `step` at most.

    >>> starts_of(384, 256, step=256), starts_of(384, 256, step=64), starts_of(200, 256, step=64)
    ([0, 128], [0, 64, 128], [0])
    """
    rest = max(0, whole - own)
    count = 1 + -(-rest // step)
    return [round(i * rest / max(1, count - 1)) for i in range(count)]


def _of_both_sides(images: Tensor, size: Size) -> tuple[Windows, Windows]:
    rows, columns = (windows(whole, own) for whole, own in zip(images.shape[2:], size, strict=True))
    return rows, columns


def _joined(output: Tensor, rows: Windows, columns: Windows) -> Tensor:
    """One map of all windows' outputs (windows x N, C, h, w)."""
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
