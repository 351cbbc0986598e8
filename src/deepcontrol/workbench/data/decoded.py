"""Classification datasets in a few files that are decoded in one go: CIFAR, Fashion-MNIST."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .files import fingerprint
from .sample import DataError, Palette, Sample, Size, Task, covering, distinct_colors

Arrays = tuple[NDArray[np.uint8], NDArray[np.int16]]  # images (N, H, W, C), labels (N,)


@dataclass(frozen=True)
class DecodedFiles:
    """A classification `Source` that decodes all its files when the first sample is read."""

    name: str
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    decode: Callable[[], Arrays]
    count: int  # at most the number of samples in the files

    @property
    def task(self) -> Task:
        return "classification"

    @property
    def palette(self) -> Palette:
        return distinct_colors(len(self.classes))

    @property
    def origin(self) -> str:
        return str(self.files[0].parent.resolve())

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> str:
        return fingerprint(self.files, salt=repr(self.classes))

    @cached_property
    def arrays(self) -> Arrays:
        """All images at their own size, and their labels."""
        images, labels = self.decode()
        return images[: self.count], labels[: self.count]

    def read(self, index: int, size: Size) -> Sample:
        images, labels = self.arrays
        image = cover_and_crop(images[index], size)
        return Sample(image, np.array(labels[index]), np.zeros((), np.uint16))

    def read_all(self, size: Size) -> Arrays | None:
        return self.arrays if self.arrays[0].shape[1:3] == size else None


def cover_and_crop(image: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """Resize an image (H, W, C) to cover `size`, and crop its center."""
    own = (image.shape[0], image.shape[1])
    if own == size:
        return image
    height, width = covering(own, size)
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    resized = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    crop = resized[top : top + size[0], left : left + size[1]]
    return crop.reshape(*size, image.shape[2])


def check_labels(path: Path, labels: NDArray[np.integer], classes: int) -> NDArray[np.int16]:
    """Return labels as int16; raise DataError if one is not 0 to `classes` - 1."""
    bad = (labels < 0) | (labels >= classes)
    if bad.any():
        first = int(bad.argmax())
        raise DataError(
            path, f"label {labels[first]} of sample {first}, expected 0 to {classes - 1}"
        )
    return labels.astype(np.int16)


def check_split(split: str) -> None:
    """Raise ValueError unless the split is "train" or "val"."""
    if split not in ("train", "val"):
        raise ValueError(f"unknown split {split!r}: choose train or val, which is the test set")
