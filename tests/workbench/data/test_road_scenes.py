"""Reading CamVid and Cityscapes, and errors for invalid files."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepcontrol.workbench.data import NAMES, VOID, DataError, open_source
from deepcontrol.workbench.data.road_scenes import (
    CLASSES,
    CLASSES_14,
    class_of_label_id,
    open_cityscapes,
)
from deepcontrol.workbench.data.sample import covering

Save = Callable[[np.ndarray, Path], Path]


def test_camvid(camvid_root: Path) -> None:
    source = open_source("camvid", "train", camvid_root)
    assert (source.name, len(source), len(source.classes)) == ("camvid-train", 6, 11)
    for i, suffix in enumerate(["png", "jpg", "png"]):
        sample = source.read(i, (24, 32))
        image = np.asarray(Image.open(camvid_root / "train" / f"{i}.{suffix}"))
        labels = np.asarray(Image.open(camvid_root / "trainannot" / f"{i}.png"))
        assert np.array_equal(sample.image, image)
        assert np.array_equal(sample.labels, np.where(labels >= 11, VOID, labels))
        assert (sample.labels == VOID).sum() > 1  # the void class 11, and 255
        assert np.array_equal(sample.segments, sample.labels)
    assert len(open_source("camvid", "train", camvid_root, limit=2)) == 2


def test_cityscapes(cityscapes_root: Path) -> None:
    source = open_source("cityscapes", "train", cityscapes_root)
    assert (len(source), source.classes) == (3, CLASSES)
    sample = source.read(2, (16, 32))
    folder = cityscapes_root / "gtFine" / "train" / "ulm"
    raw = np.asarray(Image.open(folder / "ulm_000000_000019_gtFine_labelIds.png"))
    ids = np.asarray(Image.open(folder / "ulm_000000_000019_gtFine_instanceIds.png"))
    assert ids.max() > np.iinfo(np.int16).max
    assert np.array_equal(sample.segments, ids)
    for label_id, class_id in {7: 0, 11: 2, 23: 10, 26: 13, 33: 18, 0: VOID, 14: VOID}.items():
        assert set(sample.labels[raw == label_id]) == {class_id}


def test_cityscapes_in_14_classes(cityscapes_root: Path) -> None:
    assert len(CLASSES_14) == 14
    to_19, to_14 = dict(class_of_label_id(19)), dict(class_of_label_id(14))
    joined = {CLASSES_14[to_14[i]]: set() for i in range(34) if to_14[i] != VOID}
    for label_id, class_id in to_14.items():
        assert (class_id == VOID) == (to_19[label_id] == VOID)
        if class_id != VOID:
            joined[CLASSES_14[class_id]].add(CLASSES[to_19[label_id]])
    assert {name: group for name, group in joined.items() if len(group) > 1} == {
        "barrier": {"wall", "fence"},
        "signal or sign": {"traffic light", "traffic sign"},
        "large vehicle": {"truck", "bus", "train"},
        "two-wheeler": {"motorcycle", "bicycle"},
    }
    labels = open_source("cityscapes14", "val", cityscapes_root).read(0, (16, 32)).labels
    assert set(np.unique(labels)) == {*range(14), VOID}


def test_resizing_keeps_ids_and_aspect(cityscapes_root: Path) -> None:
    source = open_source("cityscapes", "train", cityscapes_root)
    small = source.read(0, (8, 8))
    assert small.image.shape == (8, 16, 3)
    assert small.labels.shape == small.segments.shape == (8, 16)
    assert set(np.unique(small.labels)) <= {*range(19), VOID}
    assert covering(native=(3, 7), size=(10, 10)) == (10, 23)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_names_and_splits_raise(name: str, camvid_root: Path) -> None:
    with pytest.raises(ValueError, match="'training'"):
        open_source(name, "training", camvid_root)
    with pytest.raises(ValueError, match=r"'kitti'.*streets, camvid"):
        open_source("kitti", "train")
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        open_source(name, "train", camvid_root, limit=0)
    if name != "streets":
        with pytest.raises(ValueError, match=f"--data {name} needs --data-root"):
            open_source(name, "train")


def assert_data_error(read: Callable[[], object], *words: str) -> None:
    with pytest.raises(DataError) as error:
        read()
    for word in words:
        assert word in str(error.value)


def test_invalid_files_raise_with_their_name(camvid_root: Path, saved: Save) -> None:
    def read_all() -> None:
        source = open_source("camvid", "train", camvid_root)
        for i in range(len(source)):
            source.read(i, (24, 32))

    image, labels = camvid_root / "train" / "2.png", camvid_root / "trainannot" / "2.png"
    good_image, good_labels = image.read_bytes(), labels.read_bytes()

    image.write_bytes(good_image[: len(good_image) // 2])
    assert_data_error(read_all, "train/2.png", "not a readable image")
    image.write_bytes(b"not an image at all")
    assert_data_error(read_all, "train/2.png", "not a readable image")
    saved(np.zeros((24, 40, 3), np.uint8), image)
    saved(np.zeros((24, 40), np.uint8), labels)
    assert_data_error(read_all, "train/2.png", "24x40", "24x32")
    image.write_bytes(good_image)
    saved(np.zeros((12, 16), np.uint8), labels)
    assert_data_error(read_all, "trainannot/2.png", "12x16", "24x32")
    saved(np.full((24, 32), 37, np.uint8), labels)
    assert_data_error(read_all, "trainannot/2.png", "class id 37 in 768 pixels", "0 to 11, or 255")
    saved(np.repeat(np.array([[37], [254]], np.uint8), (23, 1), 0).repeat(32, 1), labels)
    assert_data_error(read_all, "trainannot/2.png", "class id 254 in 32 pixels")
    saved(np.zeros((24, 32, 3), np.uint8), labels)
    assert_data_error(read_all, "trainannot/2.png", "one channel", "RGB")
    saved(np.full((24, 32), 2.7, np.float32), labels.with_suffix(".tiff")).rename(labels)
    assert_data_error(read_all, "trainannot/2.png", "integer ids", "got F")
    labels.write_bytes(good_labels)
    saved(np.full((24, 32), 40_000, np.uint16), image)
    assert_data_error(read_all, "train/2.png", "8 bits per channel")
    image.write_bytes(good_image)
    labels.unlink()
    assert_data_error(read_all, "train/2.png", "has no label", "trainannot/2.png")
    labels.write_bytes(good_labels)
    read_all()


def test_missing_folders_raise_with_their_name(tmp_path: Path, cityscapes_root: Path) -> None:
    assert_data_error(
        lambda: open_source("camvid", "train", tmp_path / "no"), "no/train", "no such folder"
    )
    assert_data_error(lambda: open_cityscapes(tmp_path, "val"), "leftImg8bit/val", "no such folder")
    (tmp_path / "empty" / "train").mkdir(parents=True)
    assert_data_error(lambda: open_source("camvid", "train", tmp_path / "empty"), "no images")
    lost = next((cityscapes_root / "gtFine").rglob("*ulm*instanceIds.png"))
    lost.unlink()
    assert_data_error(lambda: open_cityscapes(cityscapes_root, "train"), "ulm", lost.name)
