"""Folders of images and masks: layouts, splits, sizes, tiles, and every mistake."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data import VOID, DataError, FolderOptions, open_source, prepare
from deepcontrol.workbench.data.folder import FolderSource, find_files, open_folder
from deepcontrol.workbench.data.inspect import check
from tests.workbench.own_data import draw, make_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "own")


def by_name(source: FolderSource, name: str) -> int:
    return next(i for i, f in enumerate(source.files) if f.image.stem == name)


def test_samples_fit_into_the_size(root: Path) -> None:
    source = open_folder(root, "train")
    assert source.classes == ("table", "apple", "leaf")
    index = by_name(source, "01")  # 40x56, so that 32x32 holds 23x32
    sample = source.read(index, (32, 32))
    assert sample.image.shape == (32, 32, 3)
    assert (sample.labels[23:] == VOID).all()
    assert set(np.unique(sample.labels[:23])) == {0, 1, 2}
    assert (sample.image[23:] == sample.image[22]).all()
    assert (sample.segments[:23] == sample.labels[:23]).all()
    image, ids = draw(1)
    whole = source.read(index, (40, 56))
    assert (whole.image == image).all()
    assert (whole.labels == ids).all()


def test_split_is_stable_when_files_are_added(root: Path) -> None:
    before, _ = find_files(root, 0.4)
    names = {split: {f.image.name for f in files} for split, files in before.items()}
    assert len(names["train"]) + len(names["val"]) == 12
    assert all(names.values())
    for kind in ("images", "masks"):
        shutil.copy(root / kind / "00.png", root / kind / "000-new.png")
    after, _ = find_files(root, 0.4)
    for split, files in after.items():
        assert {f.image.name for f in files} - {"000-new.png"} == names[split]


def test_train_and_val_folders(root: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(root / "images", tmp_path / "split" / split / "images")
        shutil.copytree(root / "masks", tmp_path / "split" / split / "labels")
    (tmp_path / "split" / "classes.txt").write_text("table\napple\nleaf\n")
    for split in ("train", "val"):
        assert len(open_source("folder", split, tmp_path / "split")) == 12
    assert len(open_source("folder", "val", tmp_path / "split", limit=3)) == 3
    with pytest.raises(ValueError, match="12 images in val, fewer than 13"):
        open_source("folder", "val", tmp_path / "split", limit=13)


def test_tiles_cover_the_images(root: Path) -> None:
    options = FolderOptions(tile=(32, 32))
    source = open_folder(root, "train", options)
    index = by_name(source, "01")
    places = [i for i, place in enumerate(source.places) if place.file == index]
    assert len(places) == 4  # 40x56 in 2 x 2 tiles
    image, ids = draw(1)
    first, last = (source.read(places[i], (32, 32)) for i in (0, -1))
    assert (first.image == image[:32, :32]).all()
    assert (last.labels == ids[8:, 24:]).all()
    large = open_folder(root, "train", FolderOptions(tile=(64, 64)))
    assert len(large) == len(large.files)
    assert (large.read(index, (64, 64)).labels[:40, 56:] == VOID).all()


def test_cache_follows_the_options(root: Path, tmp_path: Path) -> None:
    caches = [
        prepare(open_folder(root, "val", FolderOptions(channels=channels)), (32, 32), tmp_path)
        for channels in (3, 1)
    ]
    assert [cache.images.shape[3] for cache in caches] == [3, 1]
    mask = next(iter(open_folder(root, "val").files)).mask
    before = open_folder(root, "val").fingerprint()
    Image.fromarray(np.asarray(Image.open(mask)) * 0 + 1).save(mask)
    assert open_folder(root, "val").fingerprint() != before


def test_instances(root: Path) -> None:
    (root / "instances").mkdir()
    for path in (root / "masks").iterdir():
        ids = np.asarray(Image.open(path)).astype(np.uint16) + 300
        Image.fromarray(ids).save(root / "instances" / path.name)
    source = open_folder(root, "train")
    index = by_name(source, "01")
    assert (source.read(index, (40, 56)).segments == draw(1)[1].astype(int) + 300).all()
    (root / "instances" / "01.png").unlink()
    with pytest.raises(DataError, match=r"01\.png: has no file instances/01\.png"):
        open_folder(root, "train")


def test_mask_endings(root: Path) -> None:
    for path in list((root / "masks").iterdir()):
        path.rename(path.with_name(f"{path.stem}_mask.png"))
    assert find_files(root)[1] == []


def test_faults_name_the_file(root: Path, tmp_path: Path) -> None:
    (root / "masks" / "03.png").unlink()
    (root / "images" / "04.png").unlink()
    (root / "images" / "05.txt").write_text("")
    shutil.copy(root / "images" / "06.png", root / "images" / "06.bmp")
    _, faults = find_files(root)
    texts = [str(fault).removeprefix(f"{root}/") for fault in faults]
    assert texts[0].startswith("images/05.txt: not an image (.png, ")
    assert "images/03.png: has no mask masks/03.png" in texts
    assert f"masks/04.png: mask without an image in {root}/images" in texts
    assert any("06.png: has the same name as 06.bmp" in text for text in texts)
    with pytest.raises(DataError, match=r"the first of 4 faults; `deepcontrol data check` lists"):
        open_folder(root, "train")
    with pytest.raises(DataError, match=r"own: no such folder"):
        open_folder(tmp_path / "none" / "own", "train")
    (tmp_path / "other" / "pictures").mkdir(parents=True)
    with pytest.raises(DataError, match="other: has pictures/, expected images/ and masks/"):
        open_folder(tmp_path / "other", "train")
    shutil.copy(root / "images" / "00.png", tmp_path / "other" / "pictures")
    with pytest.raises(DataError, match="For a folder per class use --data imagefolder"):
        open_folder(tmp_path / "other", "train")


def test_empty_splits(root: Path) -> None:
    assert len(open_folder(root, "val", FolderOptions(val_fraction=1e-6))) == 1
    assert len(open_folder(root, "train", FolderOptions(val_fraction=1 - 1e-6))) == 1
    (root / "train").mkdir()
    for name in ("images", "masks"):
        (root / name).rename(root / "train" / name)
    assert len(open_folder(root, "train")) + len(open_folder(root, "val")) == 12
    for name in ("images", "masks"):
        for path in sorted((root / "train" / name).iterdir())[1:]:
            path.unlink()
    with pytest.raises(DataError, match="own: 1 image, expected at least one for train and one"):
        open_folder(root, "val")


def test_sizes_must_match(root: Path) -> None:
    Image.fromarray(np.zeros((56, 40), np.uint8)).save(root / "masks" / "01.png")
    source = open_folder(root, "train")
    with pytest.raises(
        DataError, match=r"01.png: 56x40 for an image of 40x56 \(01.png\).*turned by 90"
    ):
        source.read(by_name(source, "01"), (32, 32))


def test_files_of_file_managers_are_skipped(root: Path) -> None:
    (root / "images" / "Thumbs.db").write_bytes(b"")
    (root / "masks" / "desktop.ini").write_bytes(b"")
    assert check(root).faults == []
    (root / "images" / "notes.txt").write_bytes(b"")
    assert [fault.path.name for fault in check(root).faults] == ["notes.txt"]


def test_check_lists_all_faults(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(root).faults == []
    assert main(["data", "check", str(root)]) == 0
    for i, value in ((1, 9), (2, 8)):
        _, ids = draw(i, (40, 56) if i % 2 else (48, 40))
        ids[0, 0] = value
        Image.fromarray(ids).save(root / "masks" / f"{i:02d}.png")
    report = check(root)
    assert sorted(str(fault).split(": ")[1][:7] for fault in report.faults) == [
        "value 8",
        "value 9",
    ]
    assert sum(report.splits.values()) == 10
    assert main(["data", "check", str(root)]) == 1
    assert "2 faults." in capsys.readouterr().out
    (root / "classes.yaml").write_text("classes: [a, b, c, d]\nignore: [8, 9]")
    report = check(root)
    assert not report.faults
    assert "class 'd' has no pixels in the train images" in report.notes
