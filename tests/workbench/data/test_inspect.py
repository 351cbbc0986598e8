"""`deepcontrol data check` and `deepcontrol data sheet`."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data.files import IMAGE_SUFFIXES
from deepcontrol.workbench.data.inspect import check


def test_valid_folders(camvid_root: Path, cityscapes_root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    report = check(camvid_root)
    assert (report.layout, report.splits, report.faults) == ("camvid", {"train": 6, "val": 2}, [])
    assert report.histogram.sum() == 8 * 24 * 32
    assert check(cityscapes_root).splits == {"train": 3, "val": 1}
    assert main(["data", "check", str(cityscapes_root)]) == 0
    out = capsys.readouterr().out
    assert "train 3, val 1" in out
    assert "motorcycle" in out
    assert "No faults." in out


def test_all_errors_are_listed(
    camvid_root: Path, saved: Callable[[np.ndarray, Path], Path], capsys
) -> None:  # type: ignore[no-untyped-def]
    first = camvid_root / "train" / "0.png"
    first.write_bytes(first.read_bytes()[:60])
    saved(np.full((24, 32), 99, np.uint8), camvid_root / "trainannot" / "1.png")
    saved(np.zeros((5, 5), np.uint8), camvid_root / "trainannot" / "2.png")
    (camvid_root / "trainannot" / "3.png").unlink()
    saved(np.zeros((24, 32), np.uint8), camvid_root / "trainannot" / "orphan.png")
    saved(np.zeros((30, 30, 3), np.uint8), camvid_root / "val" / "0.png")
    saved(np.zeros((30, 30), np.uint8), camvid_root / "valannot" / "0.png")
    saved(np.zeros((24, 32, 3), np.uint8), camvid_root / "val" / "2.png")
    saved(np.zeros((24, 32), np.uint8), camvid_root / "valannot" / "2.png")
    assert main(["data", "check", str(camvid_root)]) == 1
    out = capsys.readouterr().out.replace("\n", " ")
    for path, reason in {
        "train/0.png": "not a readable image",
        "trainannot/1.png": "class id 99",
        "trainannot/2.png": "5x5 for an image of 24x32",
        "train/3.png": "has no label",
        "trainannot/orphan.png": "without an image",
        "val/0.png": "size 30x30, but other images have 24x32",
    }.items():
        assert f"{path}: " in out
        assert reason in out
    assert "6 faults" in out
    assert "train 2, val 2" in out


def test_split_without_labels_is_an_error(
    camvid_root: Path, saved: Callable[[np.ndarray, Path], Path], capsys
) -> None:  # type: ignore[no-untyped-def]
    for label in (camvid_root / "valannot").iterdir():
        saved(np.full((24, 32), 11, np.uint8), label)
    assert main(["data", "check", str(camvid_root)]) == 1
    assert "split val has no labeled pixels" in capsys.readouterr().out
    # Labels of a test split may be withheld.
    (camvid_root / "val").rename(camvid_root / "test")
    (camvid_root / "valannot").rename(camvid_root / "testannot")
    assert main(["data", "check", str(camvid_root)]) == 0


def test_unknown_layouts(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["data", "check", str(tmp_path)]) == 1
    assert "not a known dataset: expected the folder of CamVid" in capsys.readouterr().err
    assert main(["data", "check", str(tmp_path / "no")]) == 1
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "leftImg8bit" / "train").mkdir(parents=True)
    assert main(["data", "check", str(tmp_path)]) == 1
    assert "no city folders" in capsys.readouterr().out


def test_contact_sheet(camvid_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "sheet.png"
    args = ["--data", "camvid", "--data-root", str(camvid_root), "--size", "24x32"]
    assert main(["data", "sheet", *args, "--count", "4", "--out", str(out)]) == 0
    assert out.is_file()


def test_sheet_needs_at_least_one_sample(capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["data", "sheet", "--count", "0"]) == 1
    assert "--count must be at least 1, got 0" in capsys.readouterr().err


def test_invalid_size_is_explained() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "deepcontrol", "data", "sheet", "--size", "24"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "expected HEIGHTxWIDTH" in result.stderr


def test_broken_cityscapes_trees(
    cityscapes_root: Path, saved: Callable[[np.ndarray, Path], Path]
) -> None:
    images = cityscapes_root / "leftImg8bit"
    next((images / "train" / "aachen").iterdir()).write_bytes(b"broken")
    for image in (images / "train" / "ulm").iterdir():
        image.unlink()  # an empty city must not hide the broken image of another city
    saved(np.zeros((16, 32, 3), np.uint8), images / "train" / "stray.png")
    shutil.rmtree(images / "val")
    faults = {
        str(Path(str(fault.path)).relative_to(cityscapes_root)): fault.reason
        for fault in check(cityscapes_root).faults
    }
    truth = "gtFine/{0}_000000_000019_gtFine_labelIds.png"
    broken = next(path for path in faults if path.startswith("leftImg8bit/train/aachen/"))
    assert "not a readable image" in faults.pop(broken)
    assert faults == {
        "leftImg8bit/train/ulm": f"no images ({', '.join(IMAGE_SUFFIXES)}) in this folder",
        "leftImg8bit/train/stray.png": "not in the folder of a city",
        "leftImg8bit/val": "no such folder",
        truth.format("train/ulm/ulm"): "label without a complete image in leftImg8bit/train/",
        truth.format("val/bonn/bonn"): "label without a complete image in leftImg8bit/val/",
    }


def test_broken_camvid_trees(
    camvid_root: Path, saved: Callable[[np.ndarray, Path], Path], capsys
) -> None:  # type: ignore[no-untyped-def]
    shutil.rmtree(camvid_root / "val")
    (camvid_root / "train" / "notes [1].txt").write_text("hello")
    saved(np.zeros((24, 32, 3), np.uint8), camvid_root / "train" / "0.jpg")
    (camvid_root / "trainannot" / "2.png").rename(camvid_root / "trainannot" / "2.PNG")
    assert main(["data", "check", str(camvid_root)]) == 1
    out = capsys.readouterr().out.replace("\n", " ")
    assert "camvid/val: no such folder" in out
    assert "train/notes [1].txt: not an image" in out
    assert "train/0.png: another image has the same name" in out
    assert "label without an image in val/" in out
    assert "train 6, val 0" in out
