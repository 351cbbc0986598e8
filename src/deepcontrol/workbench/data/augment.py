"""Augmentation as a pure function of (seed, epoch, index).

`Augment` holds the ranges, `Augment.view` draws one `View` per sample, and `apply_views` applies
views to a batch on its device. There is no random state, so the result does not depend on workers
or on the order of samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from streets.randomness import Dice, key

from .sample import VOID, Size


class View(NamedTuple):
    """A crop of an image with zoom, horizontal flip and color jitter."""

    top: float = 0.0
    left: float = 0.0
    zoom: float = 1.0
    flip: bool = False
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0


@dataclass(frozen=True)
class Augment:
    """Ranges of the random augmentation. Larger images are cropped."""

    flip: bool = True
    """Flip half of the images horizontally."""
    scale: tuple[float, float] = (1.0, 1.0)
    """Smallest and largest zoom factor."""
    color: float = 0.0
    """Range of brightness, contrast and saturation factors: 0.3 means 0.7 to 1.3."""

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale must satisfy 0 < low <= high, got {self.scale}")
        if not 0 <= self.color < 1:
            raise ValueError(f"color must be at least 0 and below 1, got {self.color}")

    def view(self, seed: int, epoch: int, index: int, native: Size, size: Size) -> View:
        """Draw the view of sample `index` in an epoch.

        Args:
            seed, epoch, index: The only source of randomness.
            native: Size of the image.
            size: Size of the crop, in pixels of the output.
        """
        dice = Dice(key(seed, epoch, index))
        low, high = self.scale
        # Log-uniform, so that zooming in and out by a factor are equally likely.
        zoom = low * (high / low) ** dice.unit()
        top, left = (
            _offset(dice.unit(), whole - part / zoom)
            for whole, part in zip(native, size, strict=True)
        )
        flip = dice.chance(0.5) and self.flip
        jitter = (dice.between(1 - self.color, 1 + self.color) for _ in range(3))
        return View(top, left, zoom, flip, *jitter)


def _offset(u: float, slack: float) -> float:
    """Place a window at a random whole pixel if it fits, centered if it is too large."""
    return float(int(u * (int(slack) + 1))) if slack >= 0 else slack / 2


def apply_views(
    images: Tensor, labels: Tensor, segments: Tensor, views: Sequence[View], size: Size
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply one view per sample to a batch.

    Images are interpolated bilinearly; labels and segments take the nearest pixel. Pixels outside
    of an image repeat its border and are labeled VOID.

    Args:
        images: (N, H, W, 3).
        labels, segments: (N, H, W).
        views: One per sample.
        size: Height and width of the result.

    Returns:
        Images in fp32, labels and segments, at `size`.
    """
    if all(view.zoom == 1 for view in views):  # slicing is cheaper than resampling
        images, labels, segments = (_crop(a, views, size) for a in (images, labels, segments))
        images = images.float()
    else:
        images, labels, segments = _resample(images, labels, segments, views, size)
    if any(view[4:] != (1.0, 1.0, 1.0) for view in views):
        jitter = to_device([view[4:] for view in views], images.device)
        images = _color_jitter(images, *jitter.T[:, :, None, None, None])
    return images, labels, segments


def to_device(values: Sequence[object], device: torch.device) -> Tensor:
    """Copy a few values to a device without synchronizing."""
    tensor = torch.tensor(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _crop(maps: Tensor, views: Sequence[View], size: Size) -> Tensor:
    crops = []
    for a, view in zip(maps, views, strict=True):
        top, left = int(view.top), int(view.left)
        window = a[top : top + size[0], left : left + size[1]]
        crops.append(window.flip(1) if view.flip else window)
    return torch.stack(crops)


def _resample(
    images: Tensor, labels: Tensor, segments: Tensor, views: Sequence[View], size: Size
) -> tuple[Tensor, Tensor, Tensor]:
    native = (labels.shape[1], labels.shape[2])
    maps = to_device([_affine(view, native, size) for view in views], labels.device)
    grid = functional.affine_grid(maps, [len(views), 1, *size], align_corners=False)
    shown = functional.grid_sample(
        images.permute(0, 3, 1, 2).float(), grid, padding_mode="border", align_corners=False
    )
    # Ids are integers below 2^16, which fp32 represents exactly. They are shifted by 1 to
    # distinguish id 0 from the zeros that grid_sample returns outside of an image.
    ids = torch.stack([labels.float() + 1, segments.float() + 1], 1)
    ids = functional.grid_sample(ids, grid, "nearest", "zeros", align_corners=False)
    outside = ids[:, 0] == 0
    return (
        shown.permute(0, 2, 3, 1),
        (ids[:, 0] - 1).masked_fill(outside, VOID).to(labels.dtype),
        (ids[:, 1] - 1).masked_fill(outside, 0).to(segments.dtype),
    )


def _affine(view: View, native: Size, size: Size) -> list[list[float]]:
    """Return the 2x3 affine_grid matrix from the window to the image, both [-1, 1]."""
    sign = -1.0 if view.flip else 1.0
    height, width = (part / view.zoom for part in size)
    return [
        [sign * width / native[1], 0.0, (2 * view.left + width) / native[1] - 1],
        [0.0, height / native[0], (2 * view.top + height) / native[0] - 1],
    ]


def _color_jitter(
    images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor
) -> Tensor:
    red, green, blue = images.unbind(-1)
    gray = (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(-1)
    images = gray + saturation * (images - gray)
    mean = gray.mean((1, 2), keepdim=True)
    return (brightness * (mean + contrast * (images - mean))).clamp(0, 255)
