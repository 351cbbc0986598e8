"""Labeled images: made (streets) or read (CamVid, Cityscapes), cached, augmented, batched."""

from dataclasses import replace
from pathlib import Path

from .augment import Augment
from .batches import Batch, Batches
from .cache import Cache, prepare
from .camvid import open_camvid
from .cityscapes import open_cityscapes
from .sample import VOID, DataError, Sample, Size, Source
from .streets import open_streets

NAMES = ("streets", "camvid", "cityscapes", "cityscapes14")

__all__ = [
    "NAMES",
    "VOID",
    "Augment",
    "Batch",
    "Batches",
    "Cache",
    "DataError",
    "Sample",
    "Size",
    "Source",
    "open_source",
    "prepare",
]


def open_source(
    name: str, split: str, root: Path | None = None, limit: int | None = None
) -> Source:
    """A split of a data set by its name; `root` is its folder, `limit` takes the first samples."""
    if name not in NAMES:
        raise ValueError(f"unknown data {name!r}: choose one of {', '.join(NAMES)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if name == "streets":
        return open_streets(split, limit)  # the street is endless
    if root is None:
        raise ValueError(f"{name} needs the folder it lies in: --data-root")
    if name == "camvid":
        files = open_camvid(root, split)
    else:
        files = open_cityscapes(root, split, classes=14 if name == "cityscapes14" else 19)
    if limit is not None and limit > len(files):
        raise ValueError(f"{files.name} has {len(files)} samples, fewer than the limit {limit}")
    return files if limit is None else replace(files, pairs=files.pairs[:limit])
