"""CIFAR, Fashion-MNIST and folders of images by class, complete and damaged."""

import gzip
import json
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data import DataError, open_source
from deepcontrol.workbench.data.classification import CIFAR_100
from deepcontrol.workbench.data.imagefolder import ImageFolder, open_imagefolder
from tests.workbench.data.classification import write_cifar, write_folders, write_idx, write_sheets


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("split", ["train", "val"])
def test_binary_version(tmp_path: Path, classes: int, split: str) -> None:
    images, labels = write_cifar(tmp_path, classes)[split]
    source = open_source(f"cifar{classes}", split, tmp_path)
    assert (source.name, source.task) == (f"cifar{classes}-{split}", "classification")
    assert len(source) == len(images)
    assert len(source.classes) == len(set(source.classes)) == len(source.palette) == classes
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        sample = source.read(i, (32, 32))
        assert np.array_equal(sample.image, image)
        assert (sample.labels.shape, sample.labels.dtype) == ((), np.int16)
        assert (sample.segments.shape, sample.segments.dtype) == ((), np.uint16)
        assert sample.labels == label
        assert sample.segments == 0


def test_names_of_cifar100() -> None:
    """The label order is alphabetical."""
    assert list(CIFAR_100) == sorted(CIFAR_100)
    assert (CIFAR_100[0], CIFAR_100[51], CIFAR_100[99]) == ("apple", "mushroom", "worm")


@pytest.mark.parametrize("split", ["train", "val"])
def test_png_sheets(tmp_path: Path, split: str) -> None:
    images, labels = write_sheets(tmp_path / "package")[split]
    source = open_source("cifar10", split, tmp_path)
    assert len(source) == len(images)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        sample = source.read(i, (32, 32))
        assert np.array_equal(sample.image, image)
        assert sample.labels == label


def test_both_formats_have_the_same_samples(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar-10-batches-bin")
    write_sheets(tmp_path / "sheets")
    binary = open_source("cifar10", "train", tmp_path)
    sheets = open_source("cifar10", "train", tmp_path / "sheets")
    for i in range(len(binary)):
        for a, b in zip(binary.read(i, (32, 32)), sheets.read(i, (32, 32)), strict=True):
            assert np.array_equal(a, b)


def test_limit_and_fingerprint(tmp_path: Path) -> None:
    images, _ = write_cifar(tmp_path)["train"]
    source = open_source("cifar10", "train", tmp_path, limit=7)
    assert len(source) == 7
    assert np.array_equal(source.read(6, (32, 32)).image, images[6])
    before = source.fingerprint()
    assert open_source("cifar10", "train", tmp_path).fingerprint() == before
    file = tmp_path / "data_batch_3.bin"
    file.write_bytes(2 * file.read_bytes())
    assert open_source("cifar10", "train", tmp_path).fingerprint() != before
    with pytest.raises(ValueError, match=r"cifar10-val has 4 samples, fewer than the limit 5"):
        open_source("cifar10", "val", tmp_path, limit=5)


def test_other_sizes_are_resized_to_cover_and_cropped(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    source = open_source("cifar10", "train", tmp_path)
    native = source.read(0, (32, 32)).image
    image = source.read(0, (64, 32)).image
    whole = np.asarray(Image.fromarray(native).resize((64, 64), Image.Resampling.BILINEAR))
    assert np.array_equal(image, whole[:, 16:48])
    assert source.read(0, (8, 8)).image.shape == (8, 8, 3)


def test_python_version_is_refused_without_loading_it(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(pickle.dumps(Path.cwd))
    for root in (tmp_path, folder):
        with pytest.raises(DataError, match=r"pickle.*use the binary version, cifar-10-binary"):
            open_source("cifar10", "train", root)
    other = tmp_path / "cifar-100-python"
    other.mkdir()
    (other / "train").write_bytes(b"")
    with pytest.raises(DataError, match=r"use the binary version, cifar-100-binary"):
        open_source("cifar100", "train", other)


def test_damaged_binaries(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    file = tmp_path / "data_batch_2.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"data_batch_2\.bin: 12,291 bytes.*multiple of 3,073"):
        open_source("cifar10", "train", tmp_path)
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"data_batch_2\.bin: 0 bytes"):
        open_source("cifar10", "train", tmp_path)
    file.write_bytes(content[:3073] + b"\x0a" + content[3074:])
    source = open_source("cifar10", "train", tmp_path)
    with pytest.raises(
        DataError, match=r"data_batch_2\.bin: label 10 of sample 1, expected 0 to 9"
    ):
        source.read(0, (32, 32))
    file.unlink()
    with pytest.raises(DataError, match=r"data_batch_2\.bin: no such file"):
        open_source("cifar10", "train", tmp_path)
    assert len(open_source("cifar10", "val", tmp_path)) == 4  # the test file is complete


def test_damaged_sheets(tmp_path: Path) -> None:
    write_sheets(tmp_path)
    labels = tmp_path / "train_lables.json"
    values = json.loads(labels.read_text())
    cases = {
        "not a JSON file": "[1, 2",
        "expected a list of integers": json.dumps([*values[:-1], 1.5]),
        "19 labels for 20 images": json.dumps(values[:-1]),
        "label -1 of sample 0, expected 0 to 9": json.dumps([-1, *values[1:]]),
    }
    for reason, content in cases.items():
        labels.write_text(content)
        with pytest.raises(DataError, match=f"train_lables.json: {reason}"):
            open_source("cifar10", "train", tmp_path).read(0, (32, 32))
    labels.unlink()
    with pytest.raises(DataError, match=r"train_lables\.json: no such file"):
        open_source("cifar10", "train", tmp_path).read(0, (32, 32))

    sheet = tmp_path / "test_batch.png"
    content = sheet.read_bytes()
    sheet.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"test_batch\.png: not a readable image"):
        open_source("cifar10", "val", tmp_path).read(0, (32, 32))
    Image.new("RGB", (1000, 4)).save(sheet)
    with pytest.raises(DataError, match=r"test_batch\.png: 4x1000 pixels, expected rows of 1024"):
        open_source("cifar10", "val", tmp_path)
    Image.new("L", (1024, 4)).save(sheet)
    with pytest.raises(DataError, match=r"test_batch\.png: expected an RGB image, got L"):
        open_source("cifar10", "val", tmp_path).read(0, (32, 32))


def test_other_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not CIFAR-10: .*data_batch_1\.bin.*data_batch_1\.png"):
        open_source("cifar10", "train", tmp_path)
    with pytest.raises(DataError, match=r"not CIFAR-100: expected the binary version \(train\.bin"):
        open_source("cifar100", "train", tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        open_source("cifar10", "train", tmp_path / "none")
    write_cifar(tmp_path)
    with pytest.raises(ValueError, match="unknown split 'test': choose train or val"):
        open_source("cifar10", "test", tmp_path)
    with pytest.raises(ValueError, match="cifar10 needs --data-root"):
        open_source("cifar10", "train")


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


CLASSES = ("bird", "cat", "dog")


def opened(root: Path, split: str = "train") -> ImageFolder:
    source = open_source("imagefolder", split, root)
    assert isinstance(source, ImageFolder)
    return source


@pytest.fixture
def split_root(tmp_path: Path) -> Path:
    write_folders(tmp_path / "train", CLASSES, 6)
    write_folders(tmp_path / "val", CLASSES, 2)
    return tmp_path


def test_split_folders(split_root: Path) -> None:
    train, val = opened(split_root), opened(split_root, "val")
    assert (len(train), len(val)) == (18, 6)
    assert train.classes == val.classes == CLASSES
    assert (train.name, train.task, len(train.palette)) == (
        "imagefolder-train",
        "classification",
        3,
    )
    for i, (path, label) in enumerate(train.images):
        sample = train.read(i, (16, 24))
        assert sample.image.shape == (16, 24, 3)
        assert (sample.labels.dtype, sample.labels.shape) == (np.int16, ())
        assert path.parent.name == CLASSES[int(sample.labels)] == CLASSES[label]
        assert (sample.image[..., 0] == 40 * label).all()


def test_images_are_resized_to_cover_and_cropped_at_the_center(split_root: Path) -> None:
    source = opened(split_root)
    index = next(i for i, image in enumerate(source.images) if image.path.name == "000.png")
    with Image.open(source.images[index].path) as image:
        assert image.size == (30, 20)
        whole = np.asarray(image.resize((15, 10), Image.Resampling.BILINEAR))
    assert np.array_equal(source.read(index, (10, 11)).image, whole[:, 2:13])


def test_flat_folders_are_split_by_hash(tmp_path: Path) -> None:
    write_folders(tmp_path / "a", CLASSES, 60)
    train, val = opened(tmp_path / "a"), opened(tmp_path / "a", "val")
    names = {s.name: {i.path.relative_to(s.root) for i in s.images} for s in (train, val)}
    assert not names[train.name] & names[val.name]
    assert len(train) + len(val) == 180
    assert 20 <= len(val) <= 52  # a fifth: 36 expected
    fewer = open_imagefolder(tmp_path / "a", "val", 0.05)
    assert {i.path.relative_to(fewer.root) for i in fewer.images} < names[val.name]
    # Neither the place of the folder nor other images change the split of an image.
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for path in sorted((tmp_path / "b" / "cat").iterdir())[::2]:
        path.unlink()
    fewer = opened(tmp_path / "b", "val")
    kept = {i.path.relative_to(fewer.root) for i in fewer.images}
    assert kept == {p for p in names[val.name] if (tmp_path / "b" / p).exists()}


def test_each_class_has_validation_images(tmp_path: Path) -> None:
    write_folders(tmp_path, CLASSES, 2)
    for split in ("train", "val"):
        labels = [image.label for image in opened(tmp_path, split).images]
        assert sorted(labels) == [0, 1, 2]


def test_a_limit_takes_images_of_all_classes(tmp_path: Path) -> None:
    write_folders(tmp_path, CLASSES, 40)
    source = open_source("imagefolder", "train", tmp_path, limit=20)
    assert len(source) == 20
    assert {int(source.read(i, (4, 4)).labels) for i in range(20)} == {0, 1, 2}


def test_fingerprint_changes_with_names_classes_and_contents(split_root: Path) -> None:
    seen = {opened(split_root).fingerprint()}
    assert opened(split_root).fingerprint() in seen
    path = split_root / "train" / "cat" / "000.png"
    path.rename(path.with_name("new.png"))
    seen.add(opened(split_root).fingerprint())
    path.with_name("new.png").rename(split_root / "train" / "dog" / "new.png")
    seen.add(opened(split_root).fingerprint())
    Image.new("RGB", (9, 9)).save(split_root / "train" / "dog" / "new.png")
    seen.add(opened(split_root).fingerprint())
    assert len(seen) == 4


def test_gray_and_palette_images_become_rgb(split_root: Path) -> None:
    for mode in ("L", "P", "RGBA", "1"):
        Image.new(mode, (20, 20)).save(split_root / "train" / "cat" / f"{mode}.png")
    source = opened(split_root)
    for i in range(len(source)):
        assert source.read(i, (8, 8)).image.shape == (8, 8, 3)


def test_faults_name_the_folder(split_root: Path) -> None:
    (split_root / "val" / "cat").rename(split_root / "val" / "cow")
    with pytest.raises(DataError, match="val/cat: no such folder, but train/ has this class"):
        opened(split_root)
    shutil.rmtree(split_root / "val" / "cow")
    write_folders(split_root / "val", ("cat", "emu"), 1)
    with pytest.raises(DataError, match="val/emu: class without a folder in train/"):
        opened(split_root)
    shutil.rmtree(split_root / "val" / "emu")
    opened(split_root)
    (split_root / "train" / "emu").mkdir()
    (split_root / "val" / "emu").mkdir()
    with pytest.raises(DataError, match="train/emu: no images"):
        opened(split_root)
    shutil.rmtree(split_root / "train" / "emu")
    shutil.rmtree(split_root / "val")
    with pytest.raises(DataError, match="val: no such folder"):
        opened(split_root)


def test_too_few_classes_or_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        opened(tmp_path / "none")
    with pytest.raises(DataError, match=r"0 class folders, expected at least 2 \(train/CLASS/"):
        opened(tmp_path)
    write_folders(tmp_path, ("cat",), 2)
    with pytest.raises(DataError, match="1 class folders, expected at least 2"):
        opened(tmp_path)
    (tmp_path / "cat" / "001.png").unlink()
    write_folders(tmp_path, ("dog",), 1)
    with pytest.raises(DataError, match="none of 2 images is in the validation set"):
        opened(tmp_path)


def test_class_with_only_validation_images(tmp_path: Path) -> None:
    write_folders(tmp_path, CLASSES, 60)
    val = opened(tmp_path, "val")
    kept = next(i.path for i in val.images if i.path.parent.name == "cat")
    for path in (tmp_path / "cat").iterdir():
        if path != kept:
            path.unlink()
    with pytest.raises(DataError, match="cat: all images are in the validation set"):
        opened(tmp_path)


def test_unreadable_images_are_named(split_root: Path) -> None:
    (split_root / "train" / "dog" / "001.png").write_bytes(b"broken")
    source = opened(split_root)
    index = next(i for i, image in enumerate(source.images) if image.path.match("dog/001.png"))
    with pytest.raises(DataError, match=r"dog/001\.png: not a readable image"):
        source.read(index, (8, 8))
    (split_root / "train" / "dog" / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"notes\.txt: not an image"):
        opened(split_root)


def test_images_and_masks_are_no_classes(tmp_path: Path) -> None:
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="which are no classes: use --data folder"):
        open_imagefolder(tmp_path, "train")


def test_init(split_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "init", str(split_root)]) == 0
    printed = capsys.readouterr().out
    assert "valid samples: train 18, val 6" in printed
    assert f"--data imagefolder --data-root {split_root} --model resnet18" in printed
    assert (split_root / "contact-sheet.png").is_file()
    assert main(["data", "check", str(split_root)]) == 0  # the sheet is no image of the dataset
