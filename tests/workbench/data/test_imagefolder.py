"""Images in one folder per class."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data import DataError, open_source
from deepcontrol.workbench.data.imagefolder import ImageFolder, open_imagefolder
from tests.workbench.data.classification import write_folders

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
