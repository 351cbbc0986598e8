"""Folders of images by class.

A folder has one of two layouts:

    root/train/CLASS/*.png, root/val/CLASS/*.jpg, ...      or      root/CLASS/*.jpg, ...

In the second layout a share of the images of each class is the validation set. A hash of the path
below `root` selects it, so that new images do not move others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .files import IMAGE_SUFFIXES, fingerprint, list_images, name_hash, split_by_name
from .pixels import check_eight_bit, cover_and_crop, open_image
from .sample import SPLITS, DataError, Palette, Sample, Size, Task, check_split, distinct_colors


class LabeledImage(NamedTuple):
    path: Path
    label: int


@dataclass(frozen=True)
class ImageFolder:
    """A classification `Source` of RGB images of any size."""

    name: str
    root: Path
    classes: tuple[str, ...]
    images: tuple[LabeledImage, ...]

    @property
    def task(self) -> Task:
        return "classification"

    @property
    def palette(self) -> Palette:
        return distinct_colors(len(self.classes))

    @property
    def origin(self) -> str:
        return str(self.root.resolve())

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> str:
        labels = [(str(i.path.relative_to(self.root)), i.label) for i in self.images]
        return fingerprint((i.path for i in self.images), salt=repr((self.classes, labels)))

    def read(self, index: int, size: Size) -> Sample:
        path, label = self.images[index]
        image = open_image(path)
        check_eight_bit(image, path)
        pixels = cover_and_crop(np.asarray(image.convert("RGB")), size)
        return Sample(pixels, np.array(label, np.int16), np.zeros((), np.uint16))


def open_imagefolder(root: Path, split: str, val_fraction: float = 0.2) -> ImageFolder:
    """Open one split of a folder of images.

    The classes are the folder names, sorted. The images are in the order of a hash of their paths,
    so that the first ones are of all classes.

    Args:
        root: Folder with train/ and val/, or with a folder per class.
        split: "train" or "val".
        val_fraction: Share of the images for validation, if there is no val/.

    Raises:
        DataError: There are less than two classes, a class has no training images, a file is not
            an image, or the classes of train/ and val/ differ.
    """
    check_split(split)
    sources, faults = find_images(root, val_fraction)
    if faults:
        raise faults[0]
    return sources[SPLITS.index(split)]


def find_images(root: Path, val_fraction: float = 0.2) -> tuple[list[ImageFolder], list[DataError]]:
    """Return the training and validation images, and all errors of the folders."""
    if not root.is_dir():
        reason = "is a file, expected a folder" if root.exists() else "no such folder"
        return [], [DataError(root, reason)]
    split = has_splits(root)
    folder = root / "train" if split else root
    classes = _subfolders(folder)
    if classes in (["images", "masks"], ["images", "labels"]):
        reason = f"has {classes[0]}/ and {classes[1]}/, which are no classes: use --data folder"
        return [], [DataError(folder, reason)]
    if len(classes) < 2:
        reason = f"{len(classes)} class folders, expected at least 2"
        return [], [DataError(folder, f"{reason} (train/CLASS/ and val/CLASS/, or CLASS/)")]
    images, faults = _list_classes(folder, classes)
    if split:
        train, (val, val_faults) = images, _list_classes(root / "val", classes)
        faults += _class_differences(root, classes) + val_faults
    else:
        train, val = [], []
        for label in range(len(classes)):
            own = [image for image in images if image.label == label]
            parts = split_by_name(
                own, lambda image: str(image.path.relative_to(root)), val_fraction
            )
            train += parts["train"]
            val += parts["val"]
        faults += _unlearnable(root, classes, train, val)
    sources = [
        ImageFolder(
            f"imagefolder-{name}",
            root,
            tuple(classes),
            tuple(sorted(part, key=lambda i: name_hash(str(i.path.relative_to(root))))),
        )
        for name, part in zip(SPLITS, (train, val), strict=True)
    ]
    return sources, faults


def has_splits(root: Path) -> bool:
    """Return whether a folder has class folders below train/ or val/."""
    return any((root / split).is_dir() and _subfolders(root / split) for split in SPLITS)


def is_imagefolder(root: Path) -> bool:
    """Return whether a folder has class folders in train/ or val/, or image folders."""
    return has_splits(root) or any(
        path.suffix.lower() in IMAGE_SUFFIXES
        for name in _subfolders(root)
        for path in (root / name).iterdir()
    )


def _subfolders(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _list_classes(
    folder: Path, classes: Sequence[str]
) -> tuple[list[LabeledImage], list[DataError]]:
    """List the images of all classes that have a folder."""
    found, faults = [], []
    for label, name in enumerate(classes):
        if (folder / name).is_dir():
            paths, own = list_images(folder / name)
            found += [LabeledImage(path, label) for path in paths]
            faults += own
    return found, faults


def _class_differences(root: Path, classes: Sequence[str]) -> list[DataError]:
    """List the classes that only one of train/ and val/ has."""
    val = root / "val"
    if not val.is_dir():
        return [DataError(val, "no such folder, expected one folder per class")]
    found = _subfolders(val)
    return [
        *(DataError(val / c, "no such folder, but train/ has this class") for c in classes
          if c not in found),
        *(DataError(val / c, "class without a folder in train/") for c in found
          if c not in classes),
    ]  # fmt: skip


def _unlearnable(
    root: Path, classes: Sequence[str], train: Sequence[LabeledImage], val: Sequence[LabeledImage]
) -> list[DataError]:
    """List the classes that a split by hash leaves without training images."""
    faults = [
        DataError(
            root / classes[label],
            "all images are in the validation set: add images, or create train/ and val/",
        )
        for label in sorted({i.label for i in val} - {i.label for i in train})
    ]
    if train and not val:
        reason = f"none of {len(train)} images is in the validation set"
        faults.append(DataError(root, f"{reason}: add images, or create train/ and val/"))
    return faults
