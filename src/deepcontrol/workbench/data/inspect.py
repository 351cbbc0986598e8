"""Inspect a dataset: list the errors of all its files, or draw a contact sheet."""

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from . import camvid, cityscapes
from .files import Pair, PairedFiles, native_size
from .sample import DataError, Palette, Size, Source

LAYOUTS = {"cityscapes": cityscapes, "camvid": camvid}


@dataclass
class Report:
    """The detected layout of a folder, its statistics and its errors."""

    layout: str
    classes: tuple[str, ...]
    splits: dict[str, int] = field(default_factory=dict)  # valid samples per split
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, np.int64))
    faults: list[DataError] = field(default_factory=list)


def check(root: Path, progress: Callable[[int, int], None] | None = None) -> Report:
    """Read every image and label of every split and collect the errors.

    Raises:
        DataError: The folder does not exist or has an unknown layout.
    """
    if not root.is_dir():
        raise DataError(root, "no such folder")
    recognized = [name for name, layout in LAYOUTS.items() if layout.splits_in(root)]
    if not recognized:
        raise DataError(
            root,
            "neither CamVid (train/ and trainannot/) nor Cityscapes (leftImg8bit/ and gtFine/): "
            "pass the folder that contains these",
        )
    layout = LAYOUTS[recognized[0]]
    splits, report = layout.splits_in(root), Report(recognized[0], layout.CLASSES)
    found: dict[str, list[Pair]] = {}
    for split in splits:
        found[split], faults = layout.find_pairs(root, split)
        report.faults += faults
    done, total = 0, sum(map(len, found.values()))
    for split, pairs in found.items():
        source = layout.from_pairs(split, pairs, _most_common_size(pairs))
        valid, counts = 0, np.zeros(256, np.int64)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for outcome in pool.map(lambda i, source=source: _read(source, i), range(len(pairs))):
                if isinstance(outcome, DataError):
                    report.faults.append(outcome)
                else:
                    counts += outcome
                    valid += 1
                done += 1
                if progress:
                    progress(done, total)
        report.splits[split] = valid
        report.histogram += counts
        # Test labels may be withheld, as in Cityscapes.
        if valid and split != "test" and not counts[: len(report.classes)].any():
            report.faults.append(DataError(root, f"split {split} has no labeled pixels"))
    return report


def _read(source: PairedFiles, index: int) -> NDArray[np.int64] | DataError:
    """Return the class histogram of a sample at its native size, or its error."""
    try:
        return np.bincount(source.read(index, source.native).labels.ravel(), minlength=256)
    except DataError as fault:
        return fault


def _most_common_size(pairs: list[Pair]) -> tuple[int, int]:
    """Return the size of most images, so that only the outliers are reported."""
    sizes: Counter[tuple[int, int]] = Counter()
    for pair in pairs:
        try:
            sizes[native_size(pair.image)] += 1
        except DataError:
            continue  # reported when the sample is read
    return sizes.most_common(1)[0][0] if sizes else (1, 1)


def contact_sheet(
    source: Source, count: int, size: Size, columns: int = 3, first: int = 0
) -> Image.Image:
    """Draw `count` samples from `first` on, each next to its colored labels."""
    tiles = []
    for index in range(first, min(first + count, len(source))):
        sample = source.read(index, size)
        tiles.append(np.hstack([sample.image, colored(sample.labels, source.palette)]))
    if not tiles:
        raise ValueError(f"no sample {first} in {source.name}, which has {len(source)} samples")
    height, width, _ = tiles[0].shape
    rows = -(-len(tiles) // columns)
    sheet = np.full((rows * (height + 2) - 2, columns * (width + 2) - 2, 3), 255, np.uint8)
    for i, tile in enumerate(tiles):
        top, left = (i // columns) * (height + 2), (i % columns) * (width + 2)
        sheet[top : top + height, left : left + width] = tile
    return Image.fromarray(sheet)


def colored(labels: NDArray[np.uint8], palette: Palette) -> NDArray[np.uint8]:
    """Map labels (H, W) to colors (H, W, 3). VOID is black."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(palette)] = palette
    return table[labels]
