"""`deepcontrol data init`: the classes that it finds, and the mistakes that it names."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data.classfile import read_class_file
from deepcontrol.workbench.data.folder import open_folder
from tests.workbench.own_data import COLORS, make_folder


def masks_of(root: Path, table: dict[int, int]) -> None:
    """Replace the ids of all masks."""
    for path in (root / "masks").iterdir():
        ids = np.asarray(Image.open(path))
        changed = ids.copy()
        for old, new in table.items():
            changed[ids == old] = new
        Image.fromarray(changed).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = make_folder(tmp_path / "own")
    (root / "classes.yaml").unlink()
    return root


def test_ids(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "init", str(root)]) == 0
    classes = read_class_file(root)
    assert classes.names == ("background", "class 1", "class 2")
    assert classes.ids == (0, 1, 2)
    assert "in 12 of 12 masks" in (root / "classes.yaml").read_text()
    with Image.open(root / "contact-sheet.png") as sheet:
        assert sheet.width > 1000
    printed = capsys.readouterr().out
    assert f"deepcontrol train --data folder --data-root {root} --model unet" in printed
    assert "and 0 other" not in printed
    assert len(open_folder(root, "train")) > 5


@pytest.mark.parametrize(
    ("table", "ids", "ignored"),
    [
        ({2: 1, 1: 255}, (0, 1), (255,)),
        ({2: 255, 1: 255}, (0, 255), ()),
        ({1: 128, 2: 255}, (0, 128, 255), ()),
        ({0: 255, 1: 0, 2: 1}, (0, 1), (255,)),
    ],
)
def test_255_is_ignored_after_consecutive_ids(
    root: Path,
    table: dict[int, int],
    ids: tuple[int, ...],
    ignored: tuple[int, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    masks_of(root, table)
    assert main(["data", "init", str(root)]) == 0
    assert ("(no label) │ 255 " in capsys.readouterr().out) == bool(ignored)
    classes = read_class_file(root)
    assert (classes.ids, classes.ignored_ids) == (ids, ignored)


def test_colors(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "own", colors=True)
    assert main(["data", "init", str(root)]) == 0
    classes = read_class_file(root)
    assert not classes.has_ids
    assert set(classes.colors) == {tuple(color) for color in COLORS.tolist()}


def test_palette_images_keep_their_colors(root: Path) -> None:
    for path in (root / "masks").iterdir():
        image = Image.open(path).convert("P")
        image.putdata(np.asarray(Image.open(path)).ravel().tolist())
        image.putpalette([0, 0, 0, 200, 0, 0, 0, 0, 200])
        image.save(path)
    assert main(["data", "init", str(root)]) == 0
    classes = read_class_file(root)
    assert classes.ids == (0, 1, 2)
    assert classes.colors == ((0, 0, 0), (200, 0, 0), (0, 0, 200))


def test_smooth_edges_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_folder(tmp_path / "own", colors=True)
    for path in (root / "masks").iterdir():
        image = Image.open(path)
        smooth = image.resize((200, 200), Image.Resampling.BILINEAR)
        smooth.resize(image.size, Image.Resampling.BICUBIC).save(path)
    assert main(["data", "init", str(root)]) == 1
    assert "may come from smooth (antialiased) edges" in " ".join(capsys.readouterr().out.split())


def test_many_rare_ids_may_come_from_smooth_edges(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masks_of(root, {1: 100, 2: 200})
    assert main(["data", "init", str(root)]) == 0
    assert "note:" not in capsys.readouterr().out
    (root / "classes.yaml").unlink()
    for path in (root / "masks").iterdir():
        image = Image.open(path)
        half = image.resize((20, 20), Image.Resampling.BILINEAR)
        half.resize(image.size, Image.Resampling.BICUBIC).save(path)
    assert main(["data", "init", str(root)]) == 0
    assert "the others come from smooth edges" in " ".join(capsys.readouterr().out.split())


def test_deep_images_get_a_range(root: Path) -> None:
    for path in list((root / "images").iterdir()):
        gray = np.asarray(Image.open(path).convert("L")).astype(np.uint16) * 16
        path.unlink()
        Image.fromarray(gray).save(path)
    assert main(["data", "init", str(root)]) == 0
    low, high = read_class_file(root).value_range or (0, 0)
    assert 0 < low < 16 * 100 < high < 4096


def test_faults(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "images" / "01.png").write_bytes(b"no image")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(root / "masks" / "02.png")
    (root / "masks" / "03.png").unlink()
    assert main(["data", "init", str(root)]) == 1
    printed = capsys.readouterr().out
    assert f"fault: {root}/images/01.png: not a readable image" in printed
    assert f"fault: {root}/masks/02.png: 8x8 for an image of 48x40 (02.png)" in printed
    assert f"fault: {root}/images/03.png: has no mask masks/03.png" in printed
    assert "3 faults." in printed
    assert (root / "classes.yaml").exists()


def test_one_value_is_no_mask(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masks_of(root, {1: 0, 2: 0})
    assert main(["data", "init", str(root)]) == 1
    assert "the masks have 1 value (0), expected 2 to 254" in capsys.readouterr().out
    assert not (root / "classes.yaml").exists()


def test_existing_file_is_kept(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "classes.yaml").write_text("classes: [table, apple]")
    assert main(["data", "init", str(root)]) == 1
    printed = capsys.readouterr().out
    assert "which is kept" in printed
    assert "value 2 is in 12 masks but not in the class file" in printed
    assert main(["data", "init", str(root), "--overwrite"]) == 0
    assert len(read_class_file(root).names) == 3
