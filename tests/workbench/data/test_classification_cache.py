"""Caches, checks, contact sheets and colors of classification datasets."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data import NO_CLASS, Sample, distinct_colors, open_source, prepare
from deepcontrol.workbench.data.classification import DecodedFiles
from deepcontrol.workbench.data.drawing import contact_sheet
from deepcontrol.workbench.data.inspect import check
from tests.workbench.data.classification import write_cifar, write_folders, write_idx, write_sheets

FLAT = ("bird", "cat")
DATASETS: dict[str, tuple[Callable[[Path], object], tuple[int, int]]] = {
    "cifar10": (write_cifar, (32, 32)),
    "cifar100": (lambda root: write_cifar(root, 100), (32, 32)),
    "fashion-mnist": (write_idx, (28, 28)),
    "imagefolder": (lambda root: write_folders(root, FLAT, 30), (16, 24)),
}


@pytest.fixture(params=DATASETS)
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, tuple[int, int]]:
    write, size = DATASETS[request.param]
    write(tmp_path / "data")
    return request.param, tmp_path / "data", size


@pytest.mark.parametrize("factor", [1, 2])
def test_cache_matches_the_source(
    dataset: tuple[str, Path, tuple[int, int]], tmp_path: Path, factor: int
) -> None:
    name, root, (height, width) = dataset
    size = (factor * height, factor * width)
    source = open_source(name, "train", root)
    seen: list[tuple[int, int]] = []
    cache = prepare(source, size, tmp_path / "cache", lambda *done: seen.append(done))
    assert seen[-1] == (len(source), len(source))
    assert (cache.task, cache.size, len(cache)) == ("classification", size, len(source))
    assert (cache.labels.dtype, cache.labels.shape) == (np.int16, (len(source),))
    assert (cache.segments.dtype, cache.segments.shape) == (np.uint16, (len(source),))
    assert not cache.segments.any()
    for i in range(len(source)):
        sample = source.read(i, size)
        assert np.array_equal(cache.images[i], sample.image)
        assert cache.labels[i] == sample.labels
    assert cache.histogram.tolist() == [
        int((cache.labels == i).sum()) for i in range(len(source.classes))
    ]
    assert cache.palette == source.palette
    place = next(p for p in (tmp_path / "cache").iterdir() if p.is_dir())
    assert {p.name for p in place.iterdir()} == {"images.npy", "labels.npy", "index.json"}


def test_valid_cache_is_opened_and_a_damaged_one_rebuilt(tmp_path: Path) -> None:
    images, labels = write_cifar(tmp_path)["train"]
    calls = []

    def decode() -> tuple[np.ndarray, np.ndarray]:
        calls.append(1)
        return images, labels.astype(np.int16)

    def source() -> DecodedFiles:
        opened = open_source("cifar10", "train", tmp_path)
        assert isinstance(opened, DecodedFiles)
        return DecodedFiles(opened.name, opened.classes, opened.files, decode, opened.count)

    folder = tmp_path / "cache"
    for _ in range(2):
        prepare(source(), (32, 32), folder)
    assert len(calls) == 1
    place = next(p for p in folder.iterdir() if p.is_dir())
    for damage in range(3):
        content = bytearray((place / "labels.npy").read_bytes())
        if damage == 0:
            content[-1] ^= 1
            (place / "labels.npy").write_bytes(content)
        elif damage == 1:
            (place / "labels.npy").unlink()
        else:
            index = json.loads((place / "index.json").read_text())
            del index["crc"]
            index["histogram"][0] += 1
            (place / "index.json").write_text(json.dumps(index))
        cache = prepare(source(), (32, 32), folder)
        assert len(calls) == 2 + damage
        assert np.array_equal(cache.labels, labels)


def test_many_samples_are_not_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path)
    reads = []
    read = DecodedFiles.read

    def counting(self: DecodedFiles, index: int, size: tuple[int, int]) -> Sample:
        reads.append(index)
        return read(self, index, size)

    monkeypatch.setattr(DecodedFiles, "read", counting)
    assert len(prepare(open_source("cifar10", "train", tmp_path), (32, 32), tmp_path / "c")) == 20
    assert reads == [0]  # for the shapes


def test_samples_without_a_class_are_not_counted(tmp_path: Path) -> None:
    images, labels = write_cifar(tmp_path)["train"]
    labels = labels.astype(np.int16)
    labels[:3] = NO_CLASS
    files = (tmp_path / "data_batch_1.bin",)
    source = DecodedFiles("x-train", ("a",) * 10, files, lambda: (images, labels), 20)
    cache = prepare(source, (32, 32), tmp_path / "cache")
    assert cache.histogram.sum() == 17
    assert (cache.labels[:3] == -1).all()


def test_check_recognizes_every_layout(dataset: tuple[str, Path, tuple[int, int]]) -> None:
    name, root, _ = dataset
    seen: list[tuple[int, int]] = []
    report = check(root, lambda *done: seen.append(done))
    assert (report.layout, report.task, report.faults) == (name, "classification", [])
    sizes = {split: len(open_source(name, split, root)) for split in ("train", "val")}
    assert report.splits == sizes
    assert report.classes == open_source(name, "train", root).classes
    assert report.histogram.sum() == sum(sizes.values())
    assert seen[-1][0] == seen[-1][1]


def test_check_of_sheets_and_split_folders(tmp_path: Path) -> None:
    write_sheets(tmp_path / "a" / "package")
    assert check(tmp_path / "a").layout == "cifar10"
    for split in ("train", "val"):
        write_folders(tmp_path / "b" / split, FLAT, 3)
    report = check(tmp_path / "b")  # not CamVid, which has images in train/
    assert (report.layout, report.splits) == ("imagefolder", {"train": 6, "val": 6})
    for split in ("train", "val"):
        (tmp_path / "c" / split / "cat").mkdir(parents=True)
        (tmp_path / "c" / split / "dog").mkdir()
    report = check(tmp_path / "c")
    assert (report.layout, len(report.faults)) == ("imagefolder", 4)
    assert all("no images" in fault.reason for fault in report.faults)
    (tmp_path / "c" / "trainannot").mkdir()
    assert check(tmp_path / "c").layout == "camvid"


def test_check_lists_all_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "val"):
        write_folders(tmp_path / "a" / split, FLAT, 3)
    for name in ("cat/000.png", "bird/002.png"):
        (tmp_path / "a" / "train" / name).write_bytes(b"broken")
    (tmp_path / "a" / "val" / "emu").mkdir()
    assert main(["data", "check", str(tmp_path / "a")]) == 1
    out = capsys.readouterr().out.replace("\n", " ")
    assert "train 4, val 6" in out
    assert "share of images" in out
    for text in ("cat/000.png: not a readable image", "bird/002.png: not a readable image",
                 "val/emu: class without a folder in train/", "3 faults"):  # fmt: skip
        assert text in out

    write_cifar(tmp_path / "c")
    (tmp_path / "c" / "data_batch_4.bin").write_bytes(b"broken")
    assert main(["data", "check", str(tmp_path / "c")]) == 1
    out = capsys.readouterr().out.replace("\n", " ")
    assert "cifar10; valid samples: train 0, val 4" in out
    assert "data_batch_4.bin: 6 bytes" in out
    (tmp_path / "d" / "cifar-10-batches-py").mkdir(parents=True)
    (tmp_path / "d" / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"")
    assert main(["data", "check", str(tmp_path / "d")]) == 1
    assert "use the binary version" in capsys.readouterr().out.replace("\n", " ")


def test_sheet_has_images_and_captions(dataset: tuple[str, Path, tuple[int, int]]) -> None:
    name, root, _ = dataset
    source = open_source(name, "train", root)
    sheet = np.asarray(contact_sheet(source, 10, (40, 80)))
    rows = 2 if len(source) > 8 else 1
    assert sheet.shape == (rows * (40 + 14 + 2) - 2, 8 * 42 - 2, 3)
    assert np.array_equal(
        sheet[:40, :40], np.broadcast_to(source.read(0, (40, 40)).image, (40, 40, 3))
    )
    caption = sheet[40:54, :40]
    assert (caption == 255).mean() > 0.5  # dark text on white
    assert (caption < 100).any()


def test_sheet_command(tmp_path: Path) -> None:
    write_cifar(tmp_path, 100)
    out = tmp_path / "sheet.png"
    args = ["--data", "cifar100", "--data-root", str(tmp_path), "--split", "val"]
    assert main(["data", "sheet", *args, "--size", "32x32", "--out", str(out)]) == 0
    with Image.open(out) as sheet:
        assert sheet.size == (8 * 34 - 2, 46)


@pytest.mark.parametrize("count", [0, 1, 10, 100, 5000])
def test_colors_differ_and_do_not_depend_on_the_count(count: int) -> None:
    colors = distinct_colors(count)
    assert len(set(colors)) == len(colors) == count
    assert distinct_colors(count + 50)[:count] == colors
    assert all(type(part) is int and 0 <= part <= 255 for color in colors for part in color)


def test_ten_colors_are_easy_to_tell_apart() -> None:
    colors = np.array(distinct_colors(10), float)
    distances = np.linalg.norm(colors[:, None] - colors[None], axis=2)
    assert distances[~np.eye(10, dtype=bool)].min() > 40


def test_segmentation_sources_name_their_task(camvid_root: Path, cityscapes_root: Path) -> None:
    assert open_source("streets", "train").task == "segmentation"
    assert open_source("camvid", "train", camvid_root).task == "segmentation"
    assert open_source("cityscapes", "train", cityscapes_root).task == "segmentation"
