"""Write tiny classification datasets in the formats of the real ones."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
from PIL import Image

PER_FILE = 4  # samples per CIFAR file
TRAIN_BATCHES = [f"data_batch_{i}" for i in range(1, 6)]


def noise(count: int, side: int, channels: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, channels), np.uint8)


def write_cifar(root: Path, classes: int = 10) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write the binary version, and return images and labels of each split."""
    root.mkdir(parents=True, exist_ok=True)
    files = {"train": TRAIN_BATCHES, "val": ["test_batch"]}
    if classes == 100:
        files = {"train": ["train"], "val": ["test"]}
    written = {}
    for seed, (split, names) in enumerate(files.items()):
        images = noise(PER_FILE * len(names), 32, 3, seed)
        labels = np.random.default_rng(seed).integers(0, classes, len(images))
        records = [
            bytes([*([7] if classes == 100 else []), label]) + image.transpose(2, 0, 1).tobytes()
            for image, label in zip(images, labels, strict=True)
        ]
        for i, name in enumerate(names):
            part = records[PER_FILE * i : PER_FILE * (i + 1)]
            (root / f"{name}.bin").write_bytes(b"".join(part))
        written[split] = images, labels
    return written


def write_sheets(root: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write PNG sheets and JSON labels, and return images and labels of each split."""
    root.mkdir(parents=True, exist_ok=True)
    written = {}
    names = {"train": (TRAIN_BATCHES, "train"), "val": (["test_batch"], "test")}
    for seed, (split, (sheets, prefix)) in enumerate(names.items()):
        images = noise(PER_FILE * len(sheets), 32, 3, seed)
        labels = np.random.default_rng(seed).integers(0, 10, len(images))
        for i, name in enumerate(sheets):
            rows = images[PER_FILE * i : PER_FILE * (i + 1)].reshape(PER_FILE, 1024, 3)
            Image.fromarray(rows).save(root / f"{name}.png")
        (root / f"{prefix}_lables.json").write_text(json.dumps(labels.tolist()))
        written[split] = images, labels
    return written


def write_idx(root: Path, compress: bool = True) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write Fashion-MNIST's files, and return images and labels of each split."""
    root.mkdir(parents=True, exist_ok=True)
    written = {}
    for seed, (split, prefix, count) in enumerate((("train", "train", 12), ("val", "t10k", 5))):
        images = noise(count, 28, 1, seed)
        labels = np.random.default_rng(seed).integers(0, 10, count)
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        files = {
            f"{prefix}-images-idx3-ubyte": header + images.tobytes(),
            f"{prefix}-labels-idx1-ubyte": struct.pack(">II", 0x801, count)
            + bytes(labels.tolist()),
        }
        for name, content in files.items():
            if compress:
                (root / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (root / name).write_bytes(content)
        written[split] = images, labels
    return written


def write_folders(root: Path, classes: tuple[str, ...], count: int) -> None:
    """Write `count` images of different sizes per class, as root/CLASS/000.png."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            image = rng.integers(0, 256, (20 + i % 7, 30 - i % 5, 3), np.uint8)
            image[..., 0] = 40 * label
            Image.fromarray(image).save(root / name / f"{i:03d}.png")
