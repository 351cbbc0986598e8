"""What a labeled image is here, and where such images come from."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

VOID = 255  # the label of pixels that count nowhere

Size = tuple[int, int]  # height, width
Palette = tuple[tuple[int, int, int], ...]


class Sample(NamedTuple):
    """One image with its labels, at one size H x W."""

    image: NDArray[np.uint8]  # (H, W, 3), RGB
    labels: NDArray[np.uint8]  # (H, W), class ids, or VOID
    segments: NDArray[np.uint16]  # (H, W), an id for each instance, or region where there are none


class Source(Protocol):
    """A split of a data set: labeled images that can be had one by one, at any size."""

    @property
    def name(self) -> str: ...  # of data set and split: "camvid-train"

    @property
    def origin(self) -> str: ...  # which copy of the data set: its folder, its seed

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def palette(self) -> Palette: ...

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """A string that changes whenever a sample would."""
        ...

    def read(self, index: int, size: Size) -> Sample:
        """The sample, resized to cover `size`; all samples of a source come out equally large."""
        ...


class DataError(ValueError):
    """Something is wrong with one file: which, and what."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[type, tuple[object, str]]:
        return DataError, (self.path, self.reason)


def covering(native: Size, size: Size) -> Size:
    """The size of an image scaled, aspect kept, until it covers `size`.

    >>> covering(native=(1024, 2048), size=(256, 512)), covering((384, 512), (256, 512))
    ((256, 512), (384, 512))
    """
    scale = max(size[0] / native[0], size[1] / native[1])
    return max(size[0], round(native[0] * scale)), max(size[1], round(native[1] * scale))
