"""Predict images as a run on --data folder reads them: any bit depth and channels, resized."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ..data import Size
from ..data.batches import normalized
from ..data.classfile import Range
from ..data.folder import fit_image, fitting
from ..data.pixels import decode, to_eight_bit
from ..data.survey import as_rgb
from .tiling import RegionReader, Span

_BAND_VALUES = 2**25  # logits that are interpolated at a time: 128 MiB


class PixelFormat(NamedTuple):
    """How to turn the pixels of a file into the input of a network."""

    channels: int
    value_range: Range | None = None  # of images with more than 8 bits

    @classmethod
    def of_run(cls, channels: int, derived: dict[str, Any]) -> "PixelFormat":
        """Return the format of a run, from the derived values in its config.json."""
        found = derived.get("value_range")
        if found is None:
            return cls(channels)
        if not isinstance(found, list) or len(found) != 2:
            raise ValueError(f"config.json: value_range must be two numbers, got {found!r}")
        return cls(channels, (float(found[0]), float(found[1])))

    def open(self, path: Path) -> "DecodedImage":
        """Decode an image; raise DataError if its channels do not match."""
        return DecodedImage(to_eight_bit(path, decode(path), self.channels, self.value_range))


class DecodedImage:
    """An image in memory, (H, W, C) of 8 bits, that is read in regions."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array = array

    @property
    def size(self) -> Size:
        return self.array.shape[0], self.array.shape[1]

    def read(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Read a region (H, W, C)."""
        return self.array[rows[0] : rows[1], columns[0] : columns[1]]

    def read_rgb(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Read a region for a picture (H, W, 3)."""
        return as_rgb(self.read(rows, columns))


@torch.inference_mode()
def label_resized(
    model: nn.Module,
    image: RegionReader,
    size: Size,
    probabilities: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """Return the class of each pixel (H, W) of an image that the network sees at `size`.

    The image is resized to fit into `size` and padded, as in training. The logits are interpolated
    back to its own size. `probabilities` (classes, H, W) is filled if it is given.
    """
    height, width = image.size
    pixels = fit_image(image.read((0, height), (0, width)), size)
    device = next(model.parameters()).device
    outputs = model(normalized(torch.from_numpy(pixels).to(device).unsqueeze(0)))
    logits: Tensor = getattr(outputs, "classes", outputs)  # ClassNet also returns contours
    own = fitting(image.size, size)
    return enlarge_labels(logits[:, :, : own[0], : own[1]].float(), image.size, probabilities)


def enlarge_labels(
    logits: Tensor, size: Size, probabilities: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Return the classes (H, W) of logits (1, classes, h, w), interpolated to `size`.

    The interpolation is bilinear. It runs in bands of rows, because the logits of a large image
    with many classes need gigabytes.
    """
    height, width = size
    ids = np.empty(size, np.uint8)
    rows_at_once = max(1, _BAND_VALUES // (logits.shape[1] * width))
    x = (torch.arange(width, device=logits.device) + 0.5) / width * 2 - 1
    for top in range(0, height, rows_at_once):
        bottom = min(height, top + rows_at_once)
        y = (torch.arange(top, bottom, device=logits.device) + 0.5) / height * 2 - 1
        grid = torch.stack(
            [x.expand(bottom - top, width), y.unsqueeze(1).expand(bottom - top, width)], -1
        )
        band = functional.grid_sample(
            logits, grid.unsqueeze(0), padding_mode="border", align_corners=False
        )
        ids[top:bottom] = band.argmax(1)[0].to(torch.uint8).cpu().numpy()
        if probabilities is not None:
            probabilities[:, top:bottom] = band[0].softmax(0).cpu().numpy()
    return ids
