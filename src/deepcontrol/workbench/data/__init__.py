"""Labeled images: datasets, cache, augmentation, batches.

Segmentation: streets, CamVid, Cityscapes, folders of images and masks, COCO annotations, volumes.
Classification: CIFAR, Fashion-MNIST, folders of images. From Python: any torch Dataset of
(image, label) pairs.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from .augment import Augment
from .batches import Batch, Batches, BatchStream, ClassificationBatches, CropFlip, LabeledSamples
from .cache import Cache, prepare
from .classification import DecodedFiles, open_cifar, open_fashion
from .coco import open_coco
from .dataset import DatasetBatches, DatasetSplit, LabeledImages
from .folder import Fit, FolderOptions, open_folder
from .imagefolder import ImageFolder, open_imagefolder
from .road_scenes import PairedFiles, open_camvid, open_cityscapes, open_streets
from .sample import NO_CLASS, VOID, DataError, Sample, Size, Source, Task, distinct_colors

DataName = Literal[
    "streets", "camvid", "cityscapes", "cityscapes14", "folder", "coco", "nnunet",
    "cifar10", "cifar100", "fashion-mnist", "imagefolder",
]  # fmt: skip
NAMES: tuple[str, ...] = get_args(DataName)
# Data that were passed to `Trainer`, as config.json names them.
DatasetName = Literal["torch-segmentation", "torch-classification"]
DATASET_NAMES: tuple[str, ...] = get_args(DatasetName)
# Default size of the images for training.
DEFAULT_SIZES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("streets", "camvid", "cityscapes", "cityscapes14"), (256, 512)),
    **dict.fromkeys(("folder", "coco"), (256, 256)),
    "nnunet": (96, 96, 96),
    "cifar10": (32, 32),
    "cifar100": (32, 32),
    "fashion-mnist": (28, 28),
    "imagefolder": (224, 224),
    **dict.fromkeys(DATASET_NAMES, (256, 256)),  # Trainer sets the size of the first image
}

__all__ = [
    "DATASET_NAMES",
    "DEFAULT_SIZES",
    "NAMES",
    "NO_CLASS",
    "VOID",
    "Augment",
    "Batch",
    "BatchStream",
    "Batches",
    "Cache",
    "ClassificationBatches",
    "CropFlip",
    "DataError",
    "DataName",
    "DatasetBatches",
    "DatasetName",
    "DatasetSplit",
    "Fit",
    "FolderOptions",
    "LabeledImages",
    "LabeledSamples",
    "Sample",
    "Size",
    "Source",
    "Task",
    "channels_of",
    "data_task",
    "distinct_colors",
    "open_source",
    "prepare",
]


def data_task(name: str) -> Task:
    """Return the task of a dataset: its labels are of pixels or of images."""
    classified = ("cifar10", "cifar100", "fashion-mnist", "imagefolder", "torch-classification")
    return "classification" if name in classified else "segmentation"


def channels_of(name: str) -> int:
    """Return the channels of a dataset's images; folders may have others."""
    return 1 if name == "fashion-mnist" else 3


def open_source(
    name: str,
    split: str,
    root: Path | None = None,
    limit: int | None = None,
    folder: FolderOptions | None = None,
) -> Source:
    """Open one split of a dataset by name.

    Args:
        name: One of NAMES.
        split: "train" or "val"; CamVid and Cityscapes also have "test". CIFAR and Fashion-MNIST
            have no validation set: "val" is their test set, on which the literature reports errors.
        root: Dataset folder. Streets needs none.
        limit: Use only the first `limit` samples.
        folder: How to read the datasets "folder" and "coco", and the split of "imagefolder".

    Raises:
        ValueError: The name, the split or the limit is invalid, or `root` is missing.
        DataError: The folder does not have the expected layout.
    """
    if name in DATASET_NAMES:
        raise ValueError(
            f"the data of this run are a torch Dataset ({name}), which a command cannot open: "
            "resume and evaluate the run from Python, with deepcontrol.workbench.train.Trainer"
        )
    if name not in NAMES:
        raise ValueError(f"unknown dataset {name!r}: choose one of {', '.join(NAMES)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if name == "streets":
        return open_streets(split, limit)  # generated on demand, so any limit is possible
    if root is None:
        raise ValueError(f"--data {name} needs --data-root, the folder of the dataset")
    if name == "nnunet":
        raise ValueError(
            f"nnunet has volumes, so its split {split!r} cannot be opened as images: expected "
            "another dataset"
        )
    if name == "folder":
        return open_folder(root, split, folder, limit)
    if name == "coco":
        return open_coco(root, split, folder, limit)
    files: PairedFiles | DecodedFiles | ImageFolder
    if name == "camvid":
        files = open_camvid(root, split)
    elif name in ("cityscapes", "cityscapes14"):
        files = open_cityscapes(root, split, classes=14 if name == "cityscapes14" else 19)
    elif name in ("cifar10", "cifar100"):
        files = open_cifar(root, split, classes=10 if name == "cifar10" else 100)
    elif name == "fashion-mnist":
        files = open_fashion(root, split)
    else:
        files = open_imagefolder(root, split, (folder or FolderOptions()).val_fraction)
    if limit is None:
        return files
    if limit > len(files):
        raise ValueError(f"{files.name} has {len(files)} samples, fewer than the limit {limit}")
    if isinstance(files, PairedFiles):
        return replace(files, pairs=files.pairs[:limit])
    if isinstance(files, DecodedFiles):
        return replace(files, count=limit)
    return replace(files, images=files.images[:limit])
