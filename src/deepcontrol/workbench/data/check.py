"""Is this folder a data set that can be trained on? All faults at once, nothing skipped."""

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import camvid, cityscapes
from .files import native_size
from .pairs import Pair, PairedFiles
from .sample import DataError

LAYOUTS = {"cityscapes": cityscapes, "camvid": camvid}


@dataclass
class Report:
    """What a folder was taken for, and what is wrong with it."""

    layout: str
    classes: tuple[str, ...]
    splits: dict[str, int] = field(default_factory=dict)  # sound samples of each split
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, np.int64))
    faults: list[DataError] = field(default_factory=list)


def check(root: Path, progress: Callable[[int, int], None] | None = None) -> Report:
    """Read every image and label of every split that is there, and list what is wrong."""
    if not root.is_dir():
        raise DataError(root, "there is no such folder")
    recognized = [name for name, layout in LAYOUTS.items() if layout.splits_in(root)]
    if not recognized:
        raise DataError(
            root,
            "neither CamVid (train/ and trainannot/) nor Cityscapes (leftImg8bit/ and gtFine/)",
        )
    layout = LAYOUTS[recognized[0]]
    splits, report = layout.splits_in(root), Report(recognized[0], layout.CLASSES)
    found: dict[str, list[Pair]] = {}
    for split in splits:
        found[split], faults = layout.find_pairs(root, split)
        report.faults += faults
    done, total = 0, sum(map(len, found.values()))
    for split, pairs in found.items():
        source = layout.from_pairs(split, pairs, _usual_size(pairs))
        sound, counts = 0, np.zeros(256, np.int64)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for outcome in pool.map(lambda i, source=source: _read(source, i), range(len(pairs))):
                if isinstance(outcome, DataError):
                    report.faults.append(outcome)
                else:
                    counts += outcome
                    sound += 1
                done += 1
                if progress:
                    progress(done, total)
        report.splits[split] = sound
        report.histogram += counts
        # The labels of a test split may be withheld, as those of Cityscapes are.
        if sound and split != "test" and not counts[: len(report.classes)].any():
            report.faults.append(DataError(root, f"no pixel of the split {split} has a label"))
    return report


def _read(source: PairedFiles, index: int) -> NDArray[np.int64] | DataError:
    """The class histogram of one sample at its own size, or what is wrong with it."""
    try:
        return np.bincount(source.read(index, source.native).labels.ravel(), minlength=256)
    except DataError as fault:
        return fault


def _usual_size(pairs: list[Pair]) -> tuple[int, int]:
    """The size that most images have: an odd one out is then a fault, wherever it stands."""
    sizes: Counter[tuple[int, int]] = Counter()
    for pair in pairs:
        try:
            sizes[native_size(pair.image)] += 1
        except DataError:
            continue  # reading it again will report it
    return sizes.most_common(1)[0][0] if sizes else (1, 1)
