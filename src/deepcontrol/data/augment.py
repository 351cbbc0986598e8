"""Augmentation: how a training image is seen, as a function of (seed, epoch, index) alone.

`Augment` says what may vary; `Augment.view` draws one `View`; `look` applies one view a sample to
images that are already on their device. No state, so no worker and no order can change anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .randomness import Dice, key
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
    colour: float = 0.0
    """Change brightness, contrast and saturation by up to this share: 0.3 is 0.7 to 1.3 times."""

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale must be 0 < low <= high, got {self.scale}")
        if not 0 <= self.colour < 1:
            raise ValueError(f"colour must be at least 0 and below 1, got {self.colour}")

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
        light = (dice.between(1 - self.colour, 1 + self.colour) for _ in range(3))
        return View(top, left, zoom, flip, *light)


def _offset(u: float, slack: float) -> float:
    """Where a window starts: any whole pixel while it fits, centred where it is too large."""
    return float(int(u * (int(slack) + 1))) if slack >= 0 else slack / 2


def look(
    images: Tensor, labels: Tensor, segments: Tensor, views: Sequence[View], size: Size
) -> tuple[Tensor, Tensor, Tensor]:
    """Images (N, H, W, 3), labels and segments (N, H, W) as their views show them, at `size`.

    Labels and segments take the nearest pixel, images are interpolated and become fp32. What lies
    outside of an image repeats its border and is labelled void.
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
    n, height, width = labels.shape
    device = labels.device
    top, left, zoom, flip = to_device([view[:4] for view in views], device).T[..., None]

    def coordinates(start: Tensor, length: int) -> Tensor:
        return start + (torch.arange(length, device=device) + 0.5) / zoom - 0.5

    rows, columns = coordinates(top, size[0]), coordinates(left, size[1])
    columns = torch.where(flip > 0, columns.flip(1), columns)
    sample = torch.arange(n, device=device)[:, None, None]

    def at(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        row, column = rows.long().clamp(0, height - 1), columns.long().clamp(0, width - 1)
        return sample, row[:, :, None], column[:, None, :]

    nearest = at(rows.round(), columns.round())
    seen_rows = (rows > -0.5) & (rows < height - 0.5)
    seen_columns = (columns > -0.5) & (columns < width - 0.5)
    seen = seen_rows[:, :, None] & seen_columns[:, None, :]

    y0, x0 = rows.floor(), columns.floor()
    y, x = (rows - y0)[:, :, None, None], (columns - x0)[:, None, :, None]
    upper = torch.lerp(images[at(y0, x0)].float(), images[at(y0, x0 + 1)].float(), x)
    lower = torch.lerp(images[at(y0 + 1, x0)].float(), images[at(y0 + 1, x0 + 1)].float(), x)
    return (
        torch.lerp(upper, lower, y),
        torch.where(seen, labels[nearest], VOID),
        torch.where(seen, segments[nearest], 0),
    )


def _in_other_light(
    images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor
) -> Tensor:
    red, green, blue = images.unbind(-1)
    grey = (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(-1)
    images = grey + saturation * (images - grey)
    mean = grey.mean((1, 2), keepdim=True)
    return (brightness * (mean + contrast * (images - mean))).clamp(0, 255)
