"""The path of a new user: a folder of images, a trained network, predictions, an exported file."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data.folder import fit_image
from deepcontrol.workbench.models import segmentation
from deepcontrol.workbench.predict import load_network
from deepcontrol.workbench.predict.tiling import enlarge_labels
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.config_file import load_config, save_config
from deepcontrol.workbench.train.diagnosis import step_bytes
from tests.workbench.own_data import draw, make_folder
from tests.workbench.train.runs import differences, metrics

pytestmark = pytest.mark.usefixtures("_cache", "_shallow")


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def _shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two levels: exporting five takes half a minute."""
    monkeypatch.setattr(segmentation, "UNET_WIDTHS", segmentation.UNET_WIDTHS[:2])


def train(run: Path, root: Path, *flags: str, model: str = "unet", epochs: int = 5) -> int:
    shared = [
        "--data",
        "folder",
        "--device",
        "cpu",
        "--size",
        "32x48",
        "--batch-size",
        "2",
        "--sample-epochs",
        "1",
    ]
    places = ["--data-root", str(root), "--out", str(run), "--model", model]
    return main(["train", *shared, *places, "--epochs", str(epochs), *flags])


def test_renamed_classes_do_not_lock_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, run = make_folder(tmp_path / "own", count=16), tmp_path / "run"
    assert train(run, root, epochs=1) == 0
    before = load_config(run)[1]["classes"]
    file = root / "classes.yaml"
    file.write_text(file.read_text().replace(before[1], "renamed"))
    capsys.readouterr()
    assert train(run, root, epochs=2) == 0
    assert "this run keeps its own" in capsys.readouterr().out
    assert load_config(run)[1]["classes"] == before
    assert train(run, root, epochs=2) == 0
    assert main(["eval", str(run)]) == 0


def test_from_a_folder_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, run = make_folder(tmp_path / "own", count=16), tmp_path / "run"
    (root / "classes.yaml").unlink()
    assert main(["data", "init", str(root)]) == 0
    assert train(run, root) == 0
    assert metrics(run)[-1]["val_error"] < 0.05
    with Image.open(run / "samples" / "epoch-0001.png") as sheet:
        assert sheet.width == 4 * (4 * 48)  # four columns, enlarged
    assert "Only 3 validation images" in capsys.readouterr().out
    assert main(["eval", str(run)]) == 0
    assert "class 2" in capsys.readouterr().out

    image, ids = draw(99, (75, 61))  # neither the size nor the aspect ratio of the training
    Image.fromarray(image).save(tmp_path / "new.png")
    assert main(["predict", str(run), str(tmp_path / "new.png"), "--probabilities"]) == 0
    with Image.open(run / "predictions" / "new-labels.png") as labels:
        assert (np.asarray(labels) == ids).mean() > 0.9
        bands = tifffile.imread(run / "predictions" / "new-probabilities.tif")
        assert np.array_equal(bands.argmax(0), np.asarray(labels))
        assert np.allclose(bands.sum(0), 1, atol=1e-5)
    assert main(["predict", str(run), str(tmp_path / "new.png"), "--tile", "64x64"]) == 1
    assert "this run resized its images (--fit resize)" in capsys.readouterr().err

    assert main(["export", str(run), "--to", "exported"]) == 0
    described = json.loads((run / "export" / "unet.pt2.json").read_text())
    assert described["input"]["resizing"].startswith("to fit into 32x48")
    assert described["classes"] == ["background", "class 1", "class 2"]
    found = run_card(run / "export", image)["labels"]
    assert found.shape == (32, 26)  # at the size that the network sees
    own = Image.fromarray(ids).resize((26, 32), Image.Resampling.NEAREST)
    assert (found == np.asarray(own)).mean() > 0.9


def run_card(folder: Path, image: np.ndarray) -> dict[str, Any]:
    """Run the example of a model card on an image; return its variables."""
    card = (folder / "model-card.md").read_text()
    assert "\n## Limits\n" in card
    code = card.split("```python\n")[1].split("```")[0]
    Image.fromarray(image).save(folder / "photo.jpg", quality=95)
    names: dict[str, Any] = {}
    with contextlib.chdir(folder):
        exec(code, names)  # noqa: S102
    return names


def test_tiles_of_deep_images_with_five_channels(tmp_path: Path) -> None:
    root, run = tmp_path / "own", tmp_path / "run"
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for i in range(8):
        image, ids = draw(i, (40, 56))
        five = np.concatenate([image, image[..., :2]], 2).astype(np.uint16) * 15
        tifffile.imwrite(
            root / "images" / f"{i}.tif", five, photometric="minisblack", planarconfig="contig"
        )
        Image.fromarray(ids).save(root / "masks" / f"{i}.png")
    assert main(["data", "init", str(root)]) == 0
    assert train(run, root, epochs=1) == 1  # without --channels
    flags = ("--channels", "5", "--fit", "tile", "--augment", "strong", "--ema", "0.9")
    assert train(run, root, *flags, epochs=2) == 0
    network = load_network(run, "best", torch.device("cpu"))
    assert network.window == (32, 48)
    assert network.pixels is not None
    assert network.pixels.value_range is not None
    assert main(["predict", str(run), str(root / "images")]) == 0
    with Image.open(run / "predictions" / "3-labels.png") as labels:
        assert labels.size == (56, 40)
    assert main(["export", str(run), "--to", "exported", "--fixed-means"]) == 0
    described = json.loads((run / "export" / "unet-fixed-means.pt2.json").read_text())
    assert described["input"]["shape"] == ["batch", 5, "height", "width"]


def test_network_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_network.py").write_text(
        "from torch import nn\n"
        "def small(classes, in_channels):\n"
        "    return nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1, bias=False),\n"
        "        nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, classes, 3, padding=1))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    root = make_folder(tmp_path / "own")
    name = "my_network:small"
    assert train(tmp_path / "whole", root, model=name, epochs=3) == 0
    assert train(tmp_path / "run", root, model=name, epochs=1) == 0
    assert train(tmp_path / "run", root, model=name, epochs=3) == 0
    assert differences(tmp_path / "run", tmp_path / "whole") == []
    assert train(tmp_path / "bn", root, "--norm", "bn", model=name, epochs=1) == 0
    assert train(tmp_path / "dry", root, "--dry-run", model=name) == 0
    run, allowed = str(tmp_path / "run"), ["--model", name]
    assert main(["eval", run, *allowed]) == 0
    assert main(["predict", run, str(root / "images" / "01.png"), *allowed]) == 0
    assert main(["export", run, "--to", "exported", *allowed]) == 0
    config, _ = load_config(tmp_path / "run")
    assert step_bytes(config, 3, 8, torch.device("cpu")) > 8 * 8 * 32 * 48 * 4  # one map at least
    files = {path.name for path in (tmp_path / "run" / "export").iterdir()}
    assert files == {"my_network-small.pt2", "my_network-small.pt2.json", "model-card.md"}


@pytest.mark.parametrize("data", ["folder", "imagefolder"])
def test_a_run_folder_cannot_name_code_to_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: str,
) -> None:
    """A run folder may come from others, and its config.json names the network."""
    (tmp_path / "hostile.py").write_text("raise SystemExit('the code of a run folder has run')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    root, run = make_folder(tmp_path / "own"), tmp_path / "run"
    config = Train(out=run, data=data, data_root=root, model="hostile:build", size=(32, 48))
    derived = {"classes": ["a", "b", "c"], "colors": [[0, 0, 0]] * 3, "image_size": [32, 48]}
    run.mkdir()
    save_config(config, derived, {})
    for words in (
        ["eval", str(run)],
        ["predict", str(run), str(root / "images")],
        ["export", str(run)],
        ["train", "--out", str(run)],
    ):
        assert main(words) == 1, words
        said = " ".join(capsys.readouterr().err.split())
        assert "Pass --model hostile:build if you trust it" in said, words


def test_from_a_folder_of_classes_to_a_file(tmp_path: Path) -> None:
    rng, run = np.random.default_rng(0), tmp_path / "run"
    for split, count in (("train", 6), ("val", 3)):
        for label, color in enumerate(("red", "green")):
            folder = tmp_path / "own" / split / color
            folder.mkdir(parents=True)
            for i in range(count):
                image = rng.integers(0, 100, (40, 40, 3)).astype(np.uint8)
                image[..., label] += 120
                Image.fromarray(image).save(folder / f"{i}.png")
    flags = [
        "--model",
        "mlp",
        "--data",
        "imagefolder",
        "--size",
        "16x16",
        "--width",
        "0.05",
        "--batch-size",
        "2",
    ]
    places = ["--data-root", str(tmp_path / "own"), "--out", str(run), "--device", "cpu"]
    assert main(["train", *flags, *places, "--epochs", "1", "--optimizer", "adamw"]) == 0
    assert main(["export", str(run), "--to", "exported"]) == 0
    described = json.loads((run / "export" / "mlp.pt2.json").read_text())
    assert described["input"]["shape"] == ["batch", 3, 16, 16]
    assert described["outputs"][0]["shape"] == ["batch", 2]
    assert described["check"]["shapes"] == [[1, 3, 16, 16], [3, 3, 16, 16]]
    image = rng.integers(0, 255, (30, 50, 3)).astype(np.uint8)
    logits = torch.from_numpy(run_card(run / "export", image)["logits"])
    assert main(["predict", str(run), str(run / "export" / "photo.jpg")]) == 0
    row = (run / "predictions" / "predictions.csv").read_text().splitlines()[1].split(",")
    torch.testing.assert_close(
        logits.softmax(1)[0], torch.tensor([float(p) for p in row[3:]]), atol=1e-4, rtol=0
    )


def test_labels_are_enlarged_bilinearly(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(1, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.interpolate(logits, (41, 30), mode="bilinear").argmax(1)[0]
    for band in (10**9, 100):
        monkeypatch.setattr("deepcontrol.workbench.predict.tiling._BAND_VALUES", band)
        assert (enlarge_labels(logits, (41, 30)) == expected.numpy()).all()
    assert fit_image(np.zeros((3, 9, 1), np.uint8), (6, 6)).shape == (6, 6, 1)
