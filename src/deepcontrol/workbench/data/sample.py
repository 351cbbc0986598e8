"""The sample format, the interface of a dataset split, class colors, and windows."""

import colorsys
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

VOID = 255  # label of unlabeled pixels; losses and metrics ignore them
NO_CLASS = -1  # label of images without a class; losses and metrics ignore them

SPLITS = ("train", "val")

Task = Literal["segmentation", "classification"]
Size = tuple[int, int]  # height, width
Progress = Callable[[int, int], None]  # (done, in total)
Palette = tuple[tuple[int, int, int], ...]
Windows = list[tuple[int, slice]]  # along one side: start of each window, pixels it predicts

BACKGROUND = (70, 70, 70)  # not black, in which pictures show pixels without a label
STARTERS: Palette = (
    (230, 60, 50), (60, 170, 80), (60, 110, 220), (240, 180, 40),
    (150, 80, 200), (0, 180, 190), (240, 120, 170), (140, 90, 40),
)  # fmt: skip


def check_split(split: str, known: Collection[str] = SPLITS) -> None:
    """Raise ValueError unless a dataset has a split of this name."""
    if split not in known:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(known)}")


class Sample(NamedTuple):
    """One image with its labels.

    In segmentation, labels and segments have the height and width of the image. In classification
    they are arrays without dimensions.
    """

    image: NDArray[np.uint8]  # (H, W, 3), RGB; classification also (H, W, 1), gray
    labels: NDArray[np.uint8 | np.int16]  # (H, W) uint8, ids or VOID; () int16, id or NO_CLASS
    segments: NDArray[np.uint16]  # (H, W), instance ids or else class ids; () zero


class Source(Protocol):
    """A split of a dataset, read sample by sample at any size."""

    @property
    def task(self) -> Task: ...

    @property
    def name(self) -> str: ...  # dataset and split, as in "camvid-train"

    @property
    def origin(self) -> str: ...  # identifies the copy of the dataset: its folder or its seed

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def palette(self) -> Palette: ...

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """Return a digest that changes when any sample changes."""
        ...

    def read(self, index: int, size: Size) -> Sample:
        """Read a sample, resized to cover `size`.

        All samples of a source get the same size. Classification images are also cropped to `size`,
        at their center.
        """
        ...


@runtime_checkable
class ReadsAll(Protocol):
    """A classification `Source` that holds all its samples in memory."""

    def read_all(self, size: Size) -> tuple[NDArray[np.uint8], NDArray[np.int16]] | None:
        """Return images (N, H, W, C) and labels (N,), or None if `size` needs resizing."""
        ...


class DataError(ValueError):
    """A file or folder of a dataset is invalid. The message starts with its path."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[type, tuple[object, str]]:
        return DataError, (self.path, self.reason)


def covering(native: Size, size: Size) -> Size:
    """Return the smallest size with the aspect ratio of `native` that covers `size`.

    >>> covering(native=(1024, 2048), size=(256, 512)), covering((384, 512), (256, 512))
    ((256, 512), (384, 512))
    """
    scale = max(size[0] / native[0], size[1] / native[1])
    return max(size[0], round(native[0] * scale)), max(size[1], round(native[1] * scale))


def distinct_colors(count: int) -> Palette:
    """Return `count` different colors; more classes do not change the first ones.

    Hue, saturation and brightness follow sequences with irrational steps, which fill their ranges
    evenly.

    >>> distinct_colors(2)
    ((140, 77, 77), (35, 85, 206))
    """
    colors: dict[tuple[int, int, int], None] = {}  # a set that keeps the order
    step = 0
    while len(colors) < count:
        hue, saturation, value = (step * a % 1 for a in (0.6180340, 0.7548777, 0.5698403))
        color = colorsys.hsv_to_rgb(hue, 0.45 + 0.5 * saturation, 0.55 + 0.45 * value)
        red, green, blue = (round(255 * part) for part in color)
        colors[red, green, blue] = None
        step += 1
    return tuple(colors)


def starter_colors(ids: Sequence[int]) -> Palette:
    """Return a color for each id of a mask: gray for 0, and others that differ well.

    >>> starter_colors([0, 1])
    ((70, 70, 70), (230, 60, 50))
    """
    colors = [*STARTERS, *distinct_colors(len(ids))]
    return tuple(([BACKGROUND] if ids[0] == 0 else []) + colors)[: len(ids)]


def window_starts(length: int, size: int, stride: int) -> list[int]:
    """Return evenly spaced starts of windows over a side, at most `stride` apart.

    >>> window_starts(384, 256, 256), window_starts(384, 256, 64), window_starts(200, 256, 64)
    ([0, 128], [0, 64, 128], [0])
    """
    rest = max(0, length - size)
    count = 1 + -(-rest // stride)
    return [round(i * rest / max(1, count - 1)) for i in range(count)]


def windows(length: int, size: int) -> Windows:
    """Return the windows along one side: each start, and the pixels that it predicts.

    Each pixel belongs to the window with the nearest center.

    >>> windows(384, 256)
    [(0, slice(0, 192, None)), (128, slice(192, 384, None))]
    >>> windows(512, 512)
    [(0, slice(0, 512, None))]
    """
    starts = window_starts(length, size, stride=size)
    borders = [(a + b + size) // 2 for a, b in itertools.pairwise(starts)]
    predicted = itertools.pairwise([0, *borders, length])
    return [(start, slice(*part)) for start, part in zip(starts, predicted, strict=True)]
