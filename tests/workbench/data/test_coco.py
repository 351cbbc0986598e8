"""Images with COCO annotations: rasterized objects, layouts, and training on them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data import VOID, DataError, FolderOptions, open_source
from deepcontrol.workbench.data.coco import CocoSource, open_coco
from deepcontrol.workbench.train.config_file import load_config

mask = pytest.importorskip("pycocotools.mask")

CATEGORIES = [{"id": 7, "name": "ring"}, {"id": 3, "name": "box"}]
SIZE = (40, 48)


def rectangle(top: int, left: int, bottom: int, right: int) -> list[list[float]]:
    return [[left, top, right, top, right, bottom, left, bottom]]


def annotation(number: int, image: int, category: int, segmentation: Any) -> dict[str, Any]:
    return {"id": number, "image_id": image, "category_id": category, "iscrowd": 0,
            "segmentation": segmentation, "area": 1.0, "bbox": [0, 0, 1, 1]}  # fmt: skip


def make(folder: Path, path: Path, count: int = 3, categories: Any = CATEGORIES) -> dict[str, Any]:
    """Write gray images with a dark box, and a small ring of another category inside of it."""
    folder.mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for i in range(count):
        pixels = np.full((*SIZE, 3), 200, np.uint8)
        pixels[8:32, 8:40] = 60
        Image.fromarray(pixels).save(folder / f"image{i}.png")
        images.append({"id": i, "file_name": f"image{i}.png", "height": 40, "width": 48})
        ring = np.zeros(SIZE, np.uint8, order="F")
        ring[12:20, 12:20] = 1
        ring[14:18, 14:18] = 0
        code = mask.encode(ring)
        rle = {"size": list(SIZE), "counts": code["counts"].decode()}
        annotations.append(annotation(2 * i, i, 7, rle))
        annotations.append(annotation(2 * i + 1, i, 3, rectangle(8, 8, 32, 40)))
    content = {"images": images, "annotations": annotations, "categories": categories}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return content


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make(tmp_path / "train2017", tmp_path / "annotations" / "instances_train2017.json", 4)
    make(tmp_path / "val2017", tmp_path / "annotations" / "instances_val2017.json", 2)
    (tmp_path / "annotations" / "captions_train2017.json").write_text("{}")
    return tmp_path


def test_objects_become_classes_and_instances(root: Path) -> None:
    source = open_source("coco", "train", root)
    assert isinstance(source, CocoSource)
    assert source.classes == ("background", "box", "ring")  # by category id
    assert len(source.palette) == 3
    assert len(source) == 4
    sample = source.read_file(0)
    expected = np.zeros(SIZE, np.uint8)
    expected[8:32, 8:40] = 1
    expected[12:20, 12:20] = 2  # the smaller object is on top, whatever the order of the file
    expected[14:18, 14:18] = 1  # RLE has holes
    assert np.array_equal(sample.labels, expected)
    assert np.array_equal(sample.segments, expected)
    assert sample.image[0, 0].tolist() == [200] * 3
    fitted = source.read(0, (64, 64))
    assert fitted.labels.shape == (64, 64)
    assert (fitted.labels[54:] == VOID).all()  # 40x48 becomes 53x64
    tiles = open_coco(root, "train", FolderOptions(tile=(32, 32)))
    assert len(tiles) == 4 * 4
    assert np.array_equal(tiles.read(1, (32, 32)).labels, expected[:32, 16:])


@pytest.mark.parametrize("layout", ["beside", "one file"])
def test_other_layouts(layout: str, tmp_path: Path) -> None:
    if layout == "beside":
        for name in ("train", "valid"):
            make(tmp_path / name, tmp_path / name / "_annotations.coco.json")
        counts = [3, 3]
    else:
        make(tmp_path / "images", tmp_path / "annotations.json", 10)
        counts = [8, 2]
    assert main(["data", "init", str(tmp_path)]) == 0
    assert (tmp_path / "contact-sheet.png").is_file()
    sources = [open_coco(tmp_path, split) for split in ("train", "val")]
    if layout == "one file":
        names = {files.image for source in sources for files in source.files}
        assert len(names) == 10
        assert len(sources[0]) + len(sources[1]) == 10
        assert len(sources[1]) >= 1
    else:
        assert [len(source) for source in sources] == counts


def test_fingerprint_follows_the_annotations(root: Path) -> None:
    before = open_coco(root, "val").fingerprint()
    path = root / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    content["annotations"][1]["segmentation"] = rectangle(0, 0, 4, 4)
    path.write_text(json.dumps(content))
    assert open_coco(root, "val").fingerprint() != before


def read_all(root: Path) -> None:
    source = open_coco(root, "train")
    for index in range(len(source)):
        source.read_file(index)


def change(root: Path, **changes: Any) -> None:
    path = root / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    for name, value in changes.items():
        kind, _, key = name.partition("__")
        content[kind][0][key] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"annotations__segmentation": []}, "annotation 0 has no segmentation, expected polygons"),
        ({"annotations__segmentation": [[1, 2]]}, "segmentation of annotation 0 is invalid"),
        ({"annotations__category_id": 5}, "has category 5, expected 3, 7"),
        ({"images__width": 40, "images__height": 48}, "says 48x40.*turned by its EXIF"),
        ({"images__file_name": "other.png"}, "other.png"),
    ],
)
def test_faults(changes: dict[str, Any], message: str, root: Path) -> None:
    change(root, **changes)
    with pytest.raises(DataError, match=message):
        read_all(root)


def test_faults_of_the_layout(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(DataError, match="has no COCO annotations: expected annotations/"):
        open_coco(tmp_path_factory.mktemp("empty"), "train")
    make(root / "val2017", root / "annotations" / "instances_val2017.json", 2, CATEGORIES[:1])
    with pytest.raises(DataError, match="has other categories than"):
        open_coco(root, "val")
    (root / "annotations" / "instances_train2017.json").write_text("[1]")
    with pytest.raises(DataError, match="is not COCO JSON"):
        open_coco(root, "train")


def test_check(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(root)]) == 0
    assert "coco; valid samples: train 4, val 2" in " ".join(capsys.readouterr().out.split())
    change(root, annotations__segmentation=[])
    assert main(["data", "check", str(root)]) == 1
    assert "annotation 0 has no segmentation" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_train_and_predict(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = f"train --model unet --width 0.1 --data coco --data-root {root} --size 32x32"
    words += f" --out {run}"
    assert main([*words.split(), "--epochs", "1", "--device", "cpu"]) == 0, capsys.readouterr().err
    assert load_config(run)[1]["classes"] == ["background", "box", "ring"]
    assert main(["eval", str(run)]) == 0
    out = tmp_path / "labels"
    image = root / "val2017" / "image0.png"
    assert main(["predict", str(run), str(image), "--out", str(out)]) == 0
    assert any(out.iterdir())


def test_init(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "init", str(root)]) == 0
    printed = capsys.readouterr().out
    assert "ring" in printed
    assert f"deepcontrol train --data coco --data-root {root} --model unet --size 64x64" in printed
    with Image.open(root / "contact-sheet.png") as sheet:
        assert sheet.width > 600
    assert not (root / "classes.yaml").exists()
    for number in (1, 2):
        (root / "train2017" / f"image{number}.png").unlink()
    assert main(["data", "init", str(root)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "instances_train2017.json lists it, and 1 others" in printed
