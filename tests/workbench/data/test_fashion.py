"""Fashion-MNIST's IDX files, complete and damaged."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from deepcontrol.workbench.data import DataError, open_source
from tests.workbench.data.classification import write_idx

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("split", ["train", "val"])
def test_idx_files(tmp_path: Path, split: str, compress: bool) -> None:
    images, labels = write_idx(tmp_path, compress)[split]
    source = open_source("fashion-mnist", split, tmp_path)
    assert (source.name, source.task) == (f"fashion-mnist-{split}", "classification")
    assert (len(source), len(source.classes)) == (len(images), 10)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        sample = source.read(i, (28, 28))
        assert np.array_equal(sample.image, image)
        assert sample.image.shape == (28, 28, 1)
        assert sample.labels == label
    assert source.read(0, (32, 32)).image.shape == (32, 32, 1)


def read_all(root: Path) -> None:
    open_source("fashion-mnist", "train", root).read(0, (28, 28))


def test_missing_files(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / f"{LABELS}.gz").unlink()
    with pytest.raises(DataError, match=f"has no {LABELS} or {LABELS}.gz"):
        read_all(tmp_path)
    with pytest.raises(DataError, match=f"has no {IMAGES} or {IMAGES}.gz"):
        read_all(tmp_path / "none")
    with pytest.raises(ValueError, match="unknown split 'test'"):
        open_source("fashion-mnist", "test", tmp_path)


@pytest.mark.parametrize("compress", [True, False])
def test_damaged_contents(tmp_path: Path, compress: bool) -> None:
    write_idx(tmp_path, compress)
    suffix = ".gz" if compress else ""
    images, labels = tmp_path / f"{IMAGES}{suffix}", tmp_path / f"{LABELS}{suffix}"
    pack = gzip.compress if compress else bytes
    unpack = gzip.decompress if compress else bytes
    content, ids = unpack(images.read_bytes()), unpack(labels.read_bytes())
    cases = {
        "9,407 bytes of data, expected 9,408": content[:-1],
        "more than 9,408 bytes of data": content + b"\0",
        "starts with 00 00 08 01, expected an IDX file of bytes with 3 dimensions": ids + content,
        "starts with nothing": b"",
        "12 images of 28x27 pixels, expected 28x28": struct.pack(">IIII", 0x803, 12, 28, 27),
        "0 images of 28x28": struct.pack(">IIII", 0x803, 0, 28, 28),
    }
    for reason, damaged in cases.items():
        images.write_bytes(pack(damaged))
        with pytest.raises(DataError, match=f"{images.name}: {reason}"):
            read_all(tmp_path)
    images.write_bytes(pack(content))
    cases = {
        "11 labels for 12 images": struct.pack(">II", 0x801, 11) + ids[8:-1],
        "label 10 of sample 11, expected 0 to 9": ids[:-1] + b"\x0a",
    }
    for reason, damaged in cases.items():
        labels.write_bytes(pack(damaged))
        with pytest.raises(DataError, match=f"{labels.name}: {reason}"):
            read_all(tmp_path)


def test_damaged_compression(tmp_path: Path) -> None:
    write_idx(tmp_path)
    images = tmp_path / f"{IMAGES}.gz"
    content = images.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 255
    for damaged in (content[: len(content) // 2], bytes(flipped), b"not gzip at all"):
        images.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{images.name}: not a readable file"):
            read_all(tmp_path)
