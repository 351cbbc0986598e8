"""`deepcontrol predict`: its outputs and its error messages."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data.batches import normalized
from deepcontrol.workbench.predict import load_network, tiling
from deepcontrol.workbench.predict.images import ImageFile
from deepcontrol.workbench.train.checkpoint import Checkpoint, load, save_best
from deepcontrol.workbench.train.evaluate import predict
from tests.workbench.predict.conftest import COLORS, make_run, pixels


def predicted(run: Path, path: Path) -> np.ndarray:
    """Label an image with the best network of the run directly."""
    network = load_network(run, "best", torch.device("cpu"))
    image = torch.from_numpy(np.array(Image.open(path).convert("RGB")))
    with torch.no_grad():
        return predict(network.model, normalized(image.unsqueeze(0)))[0].numpy()


def test_labels_and_overlays(run: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["predict", str(run), str(images), "--out", str(out)]) == 0
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*.png")) == [
        "b-labels.png",
        "b-overlay.png",
        "legend.png",
        "more/a-labels.png",
        "more/a-overlay.png",
    ]
    ids = pixels(out / "b-labels.png")
    assert ids.dtype == np.uint8
    assert np.array_equal(ids, predicted(run, images / "b.png"))
    assert len(np.unique(ids)) > 1
    blended = (pixels(images / "b.png") + np.array(COLORS)[ids]) / 2
    assert np.abs(pixels(out / "b-overlay.png") - blended).max() <= 1


def test_default_output_folder(run: Path, images: Path) -> None:
    assert main(["predict", str(run), str(images / "b.png")]) == 0
    assert (run / "predictions" / "b-overlay.png").exists()


def test_symbolic_link_is_not_followed(
    run: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "predictions").symlink_to(elsewhere)
    assert main(["predict", str(run), str(images / "b.png")]) == 1
    assert "predictions is a symbolic link" in capsys.readouterr().err
    assert not list(elsewhere.iterdir())
    (run / "predictions").unlink()  # the run is shared


@pytest.mark.parametrize("link", ["b-labels.png", "b-overlay.png", "more"])
def test_links_in_the_output_folder_are_not_followed(
    link: str, run: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A downloaded run folder must not choose a file of this machine to overwrite."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    (run / "predictions").mkdir()
    target = elsewhere if link == "more" else elsewhere / "precious"
    (run / "predictions" / link).symlink_to(target)
    assert main(["predict", str(run), str(images)]) == 1
    assert f"{link} is a symbolic link" in capsys.readouterr().err
    assert [(p.name, p.read_text()) for p in elsewhere.iterdir()] == [("precious", "mine")]


def test_last_checkpoint(run: Path, images: Path) -> None:
    assert main(["predict", str(run), str(images / "b.png"), "--checkpoint", "last"]) == 0
    assert not pixels(run / "predictions" / "b-labels.png").any()


def test_bad_images_are_reported_and_the_others_labeled(
    run: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (images / "a-text.png").write_text("not an image")
    (images / "b-torn.png").write_bytes((images / "b.png").read_bytes()[:2000])
    Image.new("RGB", (96, 20)).save(images / "c-low.png")
    Image.new("I;16", (64, 64)).save(images / "d-deep.png")
    assert main(["predict", str(run), str(images), str(images.parent / "gone.png")]) == 1
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    for line, words in zip(
        lines,
        [
            "a-text.png: not a readable image",
            "b-torn.png: not a readable image",
            "c-low.png: size 20x96 is too small for the network: expected at least 32x32",
            "d-deep.png: expected a gray, RGB or CMYK image of 8 bits per channel, got I;16",
            "gone.png: no such file",
        ],
        strict=True,
    ):
        assert line.startswith("error: ")
        assert words in line
    assert "5 of 7 images failed" in captured.out
    assert len(list((run / "predictions").rglob("*-labels.png"))) == 2


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGBA", "CMYK"])
def test_image_modes(run: Path, images: Path, mode: str) -> None:
    kind = "tiff" if mode == "CMYK" else "png"
    Image.open(images / "b.png").convert(mode).save(images / f"b-mode.{kind}")
    assert main(["predict", str(run), str(images / f"b-mode.{kind}")]) == 0
    assert pixels(run / "predictions" / "b-mode-labels.png").shape == (64, 96)


def test_tiles(run: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(run), str(images / "b.png"), "--tile", "32x64"]) == 0
    assert "4 tiles)" in capsys.readouterr().out
    ids = pixels(run / "predictions" / "b-labels.png")
    assert (ids != predicted(run, images / "b.png")).mean() < 1e-3


@pytest.mark.parametrize("norm", ["agc", "bn"])
def test_networks_trained_on_crops_use_windows(
    norm: str, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only norms with statistics of the input use windows, and `--tile` disables them."""
    run = make_run(tmp_path / norm, norm=norm, size=(32, 64), image_size=[64, 64])
    assert main(["predict", str(run), str(images / "b.png")]) == 0
    out, ids = capsys.readouterr().out, pixels(run / "predictions" / "b-labels.png")
    whole = predicted(run, images / "b.png")
    if norm == "bn":
        assert "windows" not in out
        assert np.array_equal(ids, whole)
        return
    assert "6 windows)" in out  # of 64x96
    network = load_network(run, "best", torch.device("cpu"))
    image = ImageFile(images / "b.png", 2**30)
    assert np.array_equal(ids, tiling.label_blended(network.model, image, (32, 64)))
    assert not np.array_equal(ids, whole)
    assert main(["predict", str(run), str(images / "b.png"), "--tile", "64x96"]) == 0
    assert np.array_equal(pixels(run / "predictions" / "b-labels.png"), whole)


def test_low_memory_selects_tiles(
    run: Path, images: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "_available_memory", lambda: 2**18)
    Image.open(images / "b.png").resize((400, 48)).save(images / "wide.png")
    assert main(["predict", str(run), str(images / "wide.png")]) == 0
    assert "3 tiles)" in capsys.readouterr().out


def test_image_larger_than_memory(
    run: Path, images: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "_available_memory", lambda: 2**12)
    assert main(["predict", str(run), str(images / "b.png")]) == 1
    assert "64x96 pixels with labels and overlay need" in capsys.readouterr().err


def test_out_of_memory(
    run: Path, images: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("deepcontrol.workbench.predict.label_tiled", refuse)
    assert main(["predict", str(run), str(images)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2  # each image is tried
    assert lines[0].endswith("b.png: not enough memory: set a smaller --tile")
    monkeypatch.setattr("deepcontrol.workbench.predict.label_blended", refuse)
    run = make_run(run.with_name("crops"), size=(32, 64), image_size=[64, 64])
    assert main(["predict", str(run), str(images)]) == 1
    assert "not enough memory for a window of the crop size 32x64" in capsys.readouterr().err


def test_seams_are_reported(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "gn", norm="gn")
    assert main(["predict", str(run), str(images / "b.png"), "--tile", "32x32"]) == 0
    assert "with seams: gn uses separate statistics" in capsys.readouterr().out


def test_invalid_run_folders(
    run: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(folder: Path, *more: str) -> str:
        assert main(["predict", str(folder), str(images), *more]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "is not a run folder" in error_of(tmp_path)
    weights = run / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert "model.safetensors" in error_of(run)
    (run / "last").rename(run / "elsewhere")
    assert "has no checkpoint 'last'" in error_of(run, "--checkpoint", "last")
    content = json.loads((run / "config.json").read_text())
    content.pop("crc", None)
    for colors in ([[0, 0, 0]], [[0, 0, 256]] * 3, [[0, 0]] * 3, None):
        content["derived"]["colors"] = colors
        (run / "config.json").write_text(json.dumps(content))
        assert "invalid classes and colors" in error_of(run)


def test_an_error_of_the_network_is_not_one_of_its_classes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("own_network() got an unexpected keyword argument")

    monkeypatch.setattr("deepcontrol.workbench.train.build.build_network", fail)
    with pytest.raises(TypeError, match="own_network"):
        load_network(run, "best", torch.device("cpu"))


def test_no_images(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(run)]) == 1
    assert "name an image or a folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["predict", str(run), str(tmp_path / "empty")]) == 1
    assert "no images (.bmp" in capsys.readouterr().err


def test_runs_with_the_old_key_for_colors(run: Path) -> None:
    path = run / "config.json"
    content = json.loads(path.read_text())
    content.pop("crc", None)
    content["derived"]["colours"] = content["derived"].pop("colors")
    path.write_text(json.dumps(content))
    network = load_network(run, "best", torch.device("cpu"))
    assert network.palette == tuple(tuple(color) for color in COLORS)


def test_weights_that_are_not_finite_are_refused(
    run: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load(run / "best").model
    save_best(run, Checkpoint({k: torch.full_like(v, torch.nan) for k, v in weights.items()}, {}))
    assert main(["predict", str(run), str(images)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{run / 'best'}: encoder.0.convolutions.0.weight has values that are not finite" in line
    assert not (run / "predictions").exists()


def test_outputs_that_are_not_finite_are_reported(
    run: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load(run / "best").model
    save_best(run, Checkpoint({k: torch.full_like(v, 1e30) for k, v in weights.items()}, {}))
    assert main(["predict", str(run), str(images / "b.png")]) == 1
    assert "b.png: the network's outputs for this image are not finite" in capsys.readouterr().err


def test_any_exception_of_an_image_leaves_the_others(
    run: Path, images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = ImageFile.read

    def fail(self: ImageFile, *args: Any) -> Any:
        if self.size == (48, 64):
            raise KeyError("palette")
        return read(self, *args)

    Image.new("RGB", (64, 48)).save(images / "a.png")
    monkeypatch.setattr(ImageFile, "read", fail)
    assert main(["predict", str(run), str(images)]) == 1
    captured = capsys.readouterr()
    assert "a.png: KeyError: 'palette'" in captured.err
    assert "1 of 3 images failed" in captured.out


def test_names_of_any_bytes(run: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"caf\xe9\x1b[2J.png")
    shutil.copy(images / "b.png", images / name)
    assert main(["predict", str(run), str(images / name)]) == 0
    printed = capsys.readouterr().out
    assert "caf\\xe9\\x1b[2J.png" in printed
    assert "\x1b[2J" not in printed
    labels = run / "predictions" / os.fsdecode(b"caf\xe9\x1b[2J-labels.png")
    assert pixels(labels).shape == (64, 96)
