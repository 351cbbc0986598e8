"""Inspect a dataset: its layout, its label counts, and all files' errors."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import classification, coco, folder, imagefolder, nifti, nnunet, volumes
from .classfile import find_class_file, read_class_file
from .classification import DecodedFiles
from .files import split_by_name
from .folder import FolderOptions, FolderSource
from .imagefolder import ImageFolder
from .pixels import native_size
from .road_scenes import LAYOUTS, Pair, PairedFiles
from .sample import SPLITS, DataError, Progress, Sample, Source, Task

SPACING_RATIO = 1.5  # ratio of voxel sizes along an axis that is reported as another scale


@dataclass
class Report:
    """The detected layout of a folder, its statistics and its errors."""

    layout: str
    classes: tuple[str, ...]
    splits: dict[str, int] = field(default_factory=dict)  # valid samples per split
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, np.int64))
    faults: list[DataError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # findings that are no errors
    options: list[str] = field(default_factory=list)  # options of `train` that the data need
    task: Task = "segmentation"  # the histogram counts pixels; in classification, images


def layout_of(root: Path) -> str | None:
    """Return the --data name of a folder's layout; None if it is unknown.

    Raises:
        DataError: The folder does not exist.
    """
    if not root.is_dir():
        raise DataError(root, "is a file, expected a folder" if root.exists() else "no such folder")
    if nnunet.is_nnunet(root):
        return "nnunet"
    if coco.is_coco(root):
        return "coco"
    if folder.is_folder(root) or find_class_file(root) is not None:
        return "folder"
    recognized = [name for name, layout in LAYOUTS.items() if layout.splits_in(root)]
    # Both CamVid and image folders have train/; only image folders have folders in it.
    if recognized and (any(root.glob("*annot")) or not imagefolder.has_splits(root)):
        return recognized[0]
    if classes := classification.cifar_classes_in(root):
        return f"cifar{classes}"
    if classification.is_fashion(root):
        return "fashion-mnist"
    return "imagefolder" if imagefolder.is_imagefolder(root) else None


def check(root: Path, progress: Progress | None = None) -> Report:
    """Read every image and label of every split and collect the errors.

    Raises:
        DataError: The folder does not exist or has an unknown layout.
    """
    layout = layout_of(root)
    match layout:
        case "nnunet":
            return _check_volumes(root, progress)
        case "coco":
            return _check_coco(root, progress)
        case "folder":
            return _check_folder(root, progress)
        case "camvid" | "cityscapes":
            return _check_segmentation(root, layout, progress)
        case "cifar10" | "cifar100":
            classes = int(layout.removeprefix("cifar"))
            open_split = partial(classification.open_cifar, root, classes=classes)
            return _check_decoded(layout, open_split, progress)
        case "fashion-mnist":
            return _check_decoded(layout, partial(classification.open_fashion, root), progress)
        case "imagefolder":
            return _check_imagefolder(root, progress)
    raise DataError(
        root,
        "not a known dataset: expected the folder of CamVid (train/ and trainannot/), Cityscapes "
        "(leftImg8bit/ and gtFine/), images with masks (images/ and masks/), COCO (annotations/), "
        "nnU-Net (imagesTr/, labelsTr/ and dataset.json), CIFAR "
        "(data_batch_1.bin or .png, train.bin), Fashion-MNIST "
        "(train-images-idx3-ubyte) or images (train/CLASS/ and val/CLASS/, or CLASS/)",
    )


def _check_segmentation(root: Path, name: str, progress: Progress | None) -> Report:
    layout = LAYOUTS[name]
    splits, report = layout.splits_in(root), Report(name, layout.classes)
    found: dict[str, list[Pair]] = {}
    for split in splits:
        found[split], faults = layout.find_pairs(root, split)
        report.faults += faults
    advance = _advance(progress, sum(map(len, found.values())))
    for split, pairs in found.items():
        source = layout.from_pairs(split, pairs, _most_common_size(pairs))
        counts = _count_split(report, split, partial(_read, source), len(pairs), advance)
        # Test labels may be withheld, as in Cityscapes.
        if report.splits[split] and split != "test" and not counts[: len(report.classes)].any():
            report.faults.append(DataError(root, f"split {split} has no labeled pixels"))
    return report


def _count_split(
    report: Report,
    split: str,
    read: Callable[[int], NDArray[np.int64] | DataError],
    samples: int,
    advance: Callable[[], None],
) -> NDArray[np.int64]:
    """Read all samples of a split; add their faults and labels to the report.

    Returns:
        The number of pixels of each label.
    """
    report.splits[split], counts = 0, np.zeros(256, np.int64)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for outcome in pool.map(read, range(samples)):
            if isinstance(outcome, DataError):
                report.faults.append(outcome)
            else:
                counts += outcome
                report.splits[split] += 1
            advance()
    report.histogram += counts
    return counts


def _advance(progress: Progress | None, total: int) -> Callable[[], None]:
    """Return a function that reports one sample more at each call."""
    done = itertools.count(1)
    return lambda: progress(next(done), total) if progress else None


def _check_folder(root: Path, progress: Progress | None) -> Report:
    """Read all images and masks; images must have as many channels as the first."""
    found, faults = folder.find_files(root)
    report = Report("folder", (), faults=faults)
    try:
        class_file = read_class_file(root)
    except DataError as fault:
        report.faults.append(fault)
        return report
    report.classes = class_file.names
    channels = folder.common_channels([f.image for part in found.values() for f in part])
    advance = _advance(progress, sum(map(len, found.values())))
    for split, files in found.items():
        options = FolderOptions(channels=channels)
        source = folder.make_source(root, split, class_file, files, options)
        counts = _count_split(report, split, partial(_count_file, source), len(files), advance)
        labeled = counts[: len(class_file.names)]
        if report.splits[split] and not labeled.any():
            report.faults.append(DataError(root, f"split {split} has no labeled pixels"))
        report.notes += [
            f"class {name!r} has no pixels in the {split} images"
            for name, count in zip(class_file.names, labeled, strict=True)
            if labeled.any() and not count
        ]
    if channels != FolderOptions().channels and any(found.values()):
        report.options.append(f"--channels {channels}")
        report.notes.append(
            f"the images have {'one channel' if channels == 1 else f'{channels} channels'}: "
            f"train with --channels {channels}"
        )
    return report


def _check_coco(root: Path, progress: Progress | None) -> Report:
    report, sources = Report("coco", ()), {}
    for split in SPLITS:
        try:
            sources[split] = coco.open_coco(root, split)
        except DataError as fault:
            report.faults.append(fault)
    advance = _advance(progress, sum(map(len, sources.values())))
    for split, source in sources.items():
        report.classes = source.classes
        _count_split(report, split, partial(_count_file, source), len(source), advance)
    return report


def _check_volumes(root: Path, progress: Progress | None) -> Report:
    layout = nnunet.read_layout(root)
    report = Report("nnunet", layout.classes)
    parts = split_by_name(nnunet.find_cases(root, layout), lambda case: case.name, 0.2)
    advance = _advance(progress, sum(map(len, parts.values())))
    for split, cases in parts.items():
        read = partial(_count_volume, cases, layout)
        _count_split(report, split, read, len(cases), advance)
    spacings = [
        found
        for cases in parts.values()
        for case in cases
        if (found := _voxel_size(case.labels)) is not None
    ]
    if not spacings:
        return report
    low, high = np.array(spacings).min(0), np.array(spacings).max(0)
    if (high > SPACING_RATIO * low).any():
        report.options.append("--resample")
        report.notes.append(
            f"the voxels have sizes from {low.min():g} to {high.max():g} mm: train with "
            "--resample, which gives all volumes the median voxel size"
        )
    return report


def _voxel_size(path: Path) -> nifti.Spacing | None:
    """Return a file's voxel size; None if it is damaged, which is a fault already."""
    try:
        return nifti.voxel_size(path)
    except DataError:
        return None


def _count_volume(
    cases: Sequence[nnunet.Case], layout: nnunet.Layout, index: int
) -> NDArray[np.int64] | DataError:
    """Return the class histogram of a volume, or its error."""
    try:
        return np.bincount(volumes.load_case(cases[index], layout).labels.ravel(), minlength=256)
    except DataError as fault:
        return fault


def _count_file(source: FolderSource, index: int) -> NDArray[np.int64] | DataError:
    """Return the class histogram of a file, or its error."""
    try:
        return np.bincount(source.read_file(index).labels.ravel(), minlength=256)
    except DataError as fault:
        return fault


def _check_decoded(
    name: str, open_split: Callable[[str], DecodedFiles], progress: Progress | None
) -> Report:
    """Decode the splits of a dataset of few files. An error concerns a whole split."""
    report = Report(name, (), task="classification", histogram=np.zeros(0, np.int64))
    for done, split in enumerate(SPLITS):
        try:
            source = open_split(split)
            labels = source.arrays[1]
        except DataError as fault:
            report.faults.append(fault)
            report.splits[split] = 0
            continue
        _count(report, source, split, labels)
        if progress:
            progress(done + 1, len(SPLITS))
    return report


def _check_imagefolder(root: Path, progress: Progress | None) -> Report:
    sources, faults = imagefolder.find_images(root)
    report = Report("imagefolder", (), faults=faults, task="classification")
    report.histogram = np.zeros(0, np.int64)
    done, total = 0, sum(map(len, sources))
    for split, source in zip(SPLITS, sources, strict=False):
        labels = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for outcome in pool.map(lambda i, s=source: _try(s, i), range(len(source))):
                if isinstance(outcome, DataError):
                    report.faults.append(outcome)
                else:
                    labels.append(int(outcome.labels))
                done += 1
                if progress:
                    progress(done, total)
        _count(report, source, split, np.array(labels, np.int16))
    return report


def _try(source: ImageFolder, index: int) -> Sample | DataError:
    try:
        return source.read(index, (1, 1))
    except DataError as fault:
        return fault


def _count(report: Report, source: Source, split: str, labels: NDArray[np.int16]) -> None:
    """Add the valid samples of a split to a report."""
    report.classes = source.classes
    counts = np.bincount(labels, minlength=len(source.classes))
    report.histogram = counts + (report.histogram if report.histogram.size else 0)
    report.splits[split] = len(labels)


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
