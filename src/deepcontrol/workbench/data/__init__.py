"""Labeled images: datasets (streets, CamVid, Cityscapes), cache, augmentation, batches."""

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
    """Open one split of a dataset by name.

    Args:
        name: One of NAMES.
        split: "train" or "val"; CamVid and Cityscapes also have "test".
        root: Dataset folder. Streets needs none.
        limit: Use only the first `limit` samples.

    Raises:
        ValueError: The name, the split or the limit is invalid, or `root` is missing.
        DataError: The folder does not have the expected layout.
    """
    if name not in NAMES:
        raise ValueError(f"unknown dataset {name!r}: choose one of {', '.join(NAMES)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if name == "streets":
        return open_streets(split, limit)  # generated on demand, so any limit is possible
    if root is None:
        raise ValueError(f"{name} needs the folder of the dataset: set --data-root")
    if name == "camvid":
        files = open_camvid(root, split)
    else:
        files = open_cityscapes(root, split, classes=14 if name == "cityscapes14" else 19)
    if limit is not None and limit > len(files):
        raise ValueError(f"{files.name} has {len(files)} samples, fewer than the limit {limit}")
    return files if limit is None else replace(files, pairs=files.pairs[:limit])
