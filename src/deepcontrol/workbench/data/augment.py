"""Augmentation: how a training image is seen, as a function of (seed, epoch, index) alone.

`Augment` says what may vary; `Augment.view` draws one `View`; `look` applies one view a sample to
images that are already on their device. No state, so no worker and no order can change anything.
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
    """A window of an image, mirrored or not, magnified, in another light."""

    top: float = 0.0
    left: float = 0.0
    zoom: float = 1.0
    flip: bool = False
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0


@dataclass(frozen=True)
class Augment:
    """What may vary from epoch to epoch. A crop is drawn wherever images are larger than needed."""

    flip: bool = True
    """Mirror half of the images left to right."""
    scale: tuple[float, float] = (1.0, 1.0)
    """Magnify by a factor between these."""
    color: float = 0.0
    """Change brightness, contrast and saturation by up to this share: 0.3 is 0.7 to 1.3 times."""

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale must be 0 < low <= high, got {self.scale}")
        if not 0 <= self.color < 1:
            raise ValueError(f"color must be at least 0 and below 1, got {self.color}")

    def view(self, seed: int, epoch: int, index: int, native: Size, size: Size) -> View:
        """The view of sample `index` in an epoch: a window of `size` in images of `native`."""
        dice = Dice(key(seed, epoch, index))
        low, high = self.scale
        # Geometric, so that magnifying and reducing by a factor are equally likely.
        zoom = low * (high / low) ** dice.unit()
        top, left = (
            _offset(dice.unit(), whole - part / zoom)
            for whole, part in zip(native, size, strict=True)
        )
        flip = dice.chance(0.5) and self.flip
        light = (dice.between(1 - self.color, 1 + self.color) for _ in range(3))
        return View(top, left, zoom, flip, *light)


def _offset(u: float, slack: float) -> float:
    """Where a window starts: any whole pixel while it fits, centered where it is too large."""
    return float(int(u * (int(slack) + 1))) if slack >= 0 else slack / 2


def look(
    images: Tensor, labels: Tensor, segments: Tensor, views: Sequence[View], size: Size
) -> tuple[Tensor, Tensor, Tensor]:
    """Images (N, H, W, 3), labels and segments (N, H, W) as their views show them, at `size`.

    Labels and segments take the nearest pixel, images are interpolated and become fp32. What lies
    outside of an image repeats its border and is labeled void.
    """
    if all(view.zoom == 1 for view in views):  # whole pixels, nothing between them: cheaper
        images, labels, segments = (_crop(a, views, size) for a in (images, labels, segments))
        images = images.float()
    else:
        images, labels, segments = _resample(images, labels, segments, views, size)
    if any(view[4:] != (1.0, 1.0, 1.0) for view in views):
        light = to_device([view[4:] for view in views], images.device)
        images = _in_other_light(images, *light.T[:, :, None, None, None])
    return images, labels, segments


def to_device(values: Sequence[object], device: torch.device) -> Tensor:
    """A small tensor of these values, without waiting for the device to finish what it is at."""
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
    # Ids are whole numbers below 2^16, exact in fp32; shifted by 1, so that the zeros which
    # grid_sample finds outside of an image are told from the id 0.
    ids = torch.stack([labels.float() + 1, segments.float() + 1], 1)
    ids = functional.grid_sample(ids, grid, "nearest", "zeros", align_corners=False)
    outside = ids[:, 0] == 0
    return (
        shown.permute(0, 2, 3, 1),
        (ids[:, 0] - 1).masked_fill(outside, VOID).to(labels.dtype),
        (ids[:, 1] - 1).masked_fill(outside, 0).to(segments.dtype),
    )


def _affine(view: View, native: Size, size: Size) -> list[list[float]]:
    """The view as affine_grid wants it: from the window's [-1, 1] to the image's."""
    sign = -1.0 if view.flip else 1.0
    height, width = (part / view.zoom for part in size)
    return [
        [sign * width / native[1], 0.0, (2 * view.left + width) / native[1] - 1],
        [0.0, height / native[0], (2 * view.top + height) / native[0] - 1],
    ]


def _in_other_light(
    images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor
) -> Tensor:
    red, green, blue = images.unbind(-1)
    gray = (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(-1)
    images = gray + saturation * (images - gray)
    mean = gray.mean((1, 2), keepdim=True)
    return (brightness * (mean + contrast * (images - mean))).clamp(0, 255)
