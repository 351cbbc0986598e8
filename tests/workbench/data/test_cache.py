"""The cache is complete or absent, matches its source, and is built once."""

import errno
import json
import multiprocessing
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepcontrol.workbench.data import DataError, Sample, open_source, prepare
from deepcontrol.workbench.data.road_scenes import PairedFiles
from tests.processes import DEADLOCK


class Counting(PairedFiles):
    """Log each read to a file, so that reads of other processes are counted too."""

    def read(self, index: int, size: tuple[int, int]) -> Sample:
        with (self.pairs[0].image.parents[1] / "reads.txt").open("a") as file:
            file.write(f"{index}\n")
        time.sleep(0.05)
        return super().read(index, size)


def counting(root: Path) -> Counting:
    source = open_source("camvid", "train", root)
    assert isinstance(source, PairedFiles)
    return Counting(**{f: getattr(source, f) for f in source.__dataclass_fields__})


def reads(root: Path) -> int:
    path = root / "reads.txt"
    return len(path.read_text().split()) if path.exists() else 0


def test_cache_matches_the_source(camvid_root: Path, tmp_path: Path) -> None:
    source = counting(camvid_root)
    seen = []
    cache = prepare(source, (24, 32), tmp_path / "cache", lambda *done: seen.append(done))
    assert seen == [(i + 1, 6) for i in range(6)]
    histogram = np.zeros(256, np.int64)
    for i in range(6):
        sample = source.read(i, (24, 32))
        assert np.array_equal(cache.images[i], sample.image)
        assert np.array_equal(cache.labels[i], sample.labels)
        assert np.array_equal(cache.segments[i], sample.segments)
        histogram += np.bincount(sample.labels.ravel(), minlength=256)
    assert np.array_equal(cache.histogram, histogram[:11])
    assert (len(cache), cache.size) == (6, (24, 32))
    before = reads(camvid_root)
    prepare(source, (24, 32), tmp_path / "cache")
    assert reads(camvid_root) == before


def test_interrupt_cancels_the_remaining_reads(camvid_root: Path, tmp_path: Path) -> None:
    source = counting(camvid_root)
    many = replace(source, pairs=source.pairs * 50)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(many, (24, 32), tmp_path / "cache", interrupt)
    assert reads(camvid_root) < 100  # of 300
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_cache_is_rebuilt_when_the_source_changes(camvid_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = prepare(counting(camvid_root), (24, 32), folder)
    image = camvid_root / "train" / "0.png"
    image.write_bytes((camvid_root / "train" / "2.png").read_bytes())
    second = prepare(counting(camvid_root), (24, 32), folder)
    assert not np.array_equal(first.images[0], second.images[0])
    assert np.array_equal(second.images[0], second.images[2])
    assert len([p for p in folder.iterdir() if p.is_dir()]) == 1  # the old cache is removed
    prepare(counting(camvid_root), (12, 16), folder)
    assert len([p for p in folder.iterdir() if p.is_dir()]) == 2  # another size is another cache


def test_replaced_image_of_equal_size_and_time_is_noticed(
    camvid_root: Path, tmp_path: Path
) -> None:
    folder, image = tmp_path / "cache", camvid_root / "train" / "0.png"
    image.write_bytes(image.read_bytes() + bytes(100_000))  # more than a block
    before = prepare(open_source("camvid", "train", camvid_root), (24, 32), folder)
    content, status = image.read_bytes(), image.stat()
    other = (camvid_root / "train" / "2.png").read_bytes()
    image.write_bytes(other.ljust(len(content), b"\0"))
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (image.stat().st_size, image.stat().st_mtime_ns) == (len(content), status.st_mtime_ns)
    after = prepare(open_source("camvid", "train", camvid_root), (24, 32), folder)
    assert not np.array_equal(before.images[0], after.images[0])
    assert np.array_equal(after.images[0], after.images[2])


@pytest.mark.parametrize("histogram", ["[1e400]", "[1e999999]", "[" * 5000, '["x"]', "[null]"])
def test_hostile_index_is_rebuilt(histogram: str, camvid_root: Path, tmp_path: Path) -> None:
    source = open_source("camvid", "val", camvid_root)
    prepare(source, (24, 32), tmp_path)
    (index,) = tmp_path.glob("*/index.json")
    index.write_text(f'{{"histogram": {histogram}, "crc32": {{}}}}')
    prepare(source, (24, 32), tmp_path)
    assert json.loads(next(tmp_path.glob("*/index.json")).read_text())["crc32"]


def test_copies_of_a_dataset_do_not_evict_each_other(camvid_root: Path, tmp_path: Path) -> None:
    other = tmp_path / "copy"
    shutil.copytree(camvid_root, other)
    for _ in range(2):
        for root in (camvid_root, other):
            prepare(counting(root), (24, 32), tmp_path / "cache")
    assert (reads(camvid_root), reads(other)) == (7, 7)


def test_next_build_removes_the_files_of_a_killed_one(camvid_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    context = multiprocessing.get_context("spawn")
    results = context.Queue()  # keep a reference until the worker has started
    worker = context.Process(target=build, args=(camvid_root, folder, results))
    worker.start()
    deadline = time.monotonic() + DEADLOCK
    while reads(camvid_root) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    worker.kill()
    worker.join()
    assert list(folder.glob(".building-*"))
    assert len(prepare(counting(camvid_root), (24, 32), folder)) == 6
    assert not list(folder.glob(".building-*"))


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove", "index", "histogram"])
def test_damaged_cache_is_rebuilt(camvid_root: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "cache"
    cache = prepare(counting(camvid_root), (24, 32), folder)
    expected = np.array(cache.images)
    place = next(p for p in folder.iterdir() if p.is_dir())
    file = place / ("index.json" if damage in ("index", "histogram") else "images.npy")
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-100] ^= 1
        file.write_bytes(content)
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "histogram":
        index = json.loads(content)
        del index["crc"]
        index["histogram"][0] += 1
        file.write_text(json.dumps(index))
    elif damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2])
    assert np.array_equal(prepare(counting(camvid_root), (24, 32), folder).images, expected)
    assert reads(camvid_root) == 2 * 7  # the first image is read twice, once for its shape


def test_failed_build_leaves_nothing(camvid_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    bad = camvid_root / "train" / "4.png"
    content = bad.read_bytes()
    bad.write_bytes(content[:80])
    with pytest.raises(DataError, match=r"4\.png"):
        prepare(counting(camvid_root), (24, 32), folder)
    assert [p.suffix for p in folder.iterdir()] == [".lock"]
    with pytest.raises(ValueError, match="no samples"):
        prepare(replace(counting(camvid_root), pairs=()), (24, 32), folder)


def test_full_disk_is_detected_before_mapping(
    camvid_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    folder = tmp_path / "cache"
    with pytest.raises(OSError, match=r"cache has no room for camvid-train \(No space.*\d bytes"):
        prepare(counting(camvid_root), (24, 32), folder)
    assert [p.suffix for p in folder.iterdir()] == [".lock"]


def test_full_disk_is_reported_when_creating_the_files(
    camvid_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np.lib.format, "open_memmap", full)
    with pytest.raises(OSError, match=r"cache has no room for camvid-train \(No space.*\d bytes"):
        prepare(counting(camvid_root), (24, 32), tmp_path / "cache")


def build(root: Path, folder: Path, results: multiprocessing.Queue) -> None:
    cache = prepare(counting(root), (24, 32), folder)
    results.put((os.getpid(), int(cache.images.astype(np.int64).sum())))


def test_two_processes_build_it_once(camvid_root: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=build, args=(camvid_root, tmp_path / "cache", results))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    sums = [results.get(timeout=DEADLOCK) for _ in workers]
    for worker in workers:
        worker.join()
    assert sums[0][1] == sums[1][1]
    assert reads(camvid_root) == 7
