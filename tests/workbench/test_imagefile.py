"""Image files that others made: formats, devices, orientation, damage."""

import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepcontrol.workbench import imagefile
from deepcontrol.workbench.data import DataError, open_source
from deepcontrol.workbench.data.files import list_images
from deepcontrol.workbench.data.pixels import read_image
from deepcontrol.workbench.imagefile import ImageError, open_header, open_image, upright_size
from deepcontrol.workbench.predict.images import ImageFile, find_jobs

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\nshowpage\n"
PLENTY = 2**40


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


def test_postscript_in_a_png_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail("a process was started")

    for name in ("run", "call", "check_call", "Popen"):
        monkeypatch.setattr(subprocess, name, refuse)
    path = tmp_path / "x.png"
    path.write_bytes(POSTSCRIPT)
    for read in (open_image, lambda p: ImageFile(p, PLENTY), lambda p: read_image(p, (8, 8))):
        with pytest.raises(ValueError, match=r"not a readable image \(PNG, JPEG"):
            read(path)


@pytest.mark.parametrize("kind", ["ico", "tga", "pcx", "dds"])
def test_other_formats_are_refused(tmp_path: Path, kind: str) -> None:
    Image.fromarray(noise(8, 8)).save(tmp_path / f"x.{kind}")
    (tmp_path / f"x.{kind}").rename(tmp_path / "x.png")
    with pytest.raises(ImageError, match="not a readable image"):
        open_image(tmp_path / "x.png")


@pytest.mark.parametrize("kind", ["png", "jpg", "bmp", "ppm", "tif", "webp"])
def test_damaged_images_raise_only_image_errors(tmp_path: Path, kind: str) -> None:
    """Flip bytes and cut files: decoders raise anything, and callers see ImageErrors."""
    path, draws, failures = tmp_path / f"x.{kind}", random.Random(kind), 0
    Image.fromarray(noise(24, 32)).save(path)
    whole = path.read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(draws.randint(1, 8)):
            damaged[draws.randrange(min(200, len(damaged)))] = draws.randrange(256)
        path.write_bytes(damaged[: draws.choice((len(damaged), draws.randrange(len(damaged))))])
        try:
            open_image(path)
        except ImageError:
            failures += 1
    assert failures > 10


def test_unforeseen_errors_of_a_decoder_name_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.fromarray(noise(8, 8)).save(tmp_path / "x.png")

    def fail(image: Image.Image) -> None:
        raise KeyError("chunk")

    monkeypatch.setattr(Image.Image, "load", fail)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", fail)
    with pytest.raises(DataError, match=r"x\.png: not a readable image \('chunk'\)"):
        read_image(tmp_path / "x.png", (8, 8))


def test_devices_and_fifos_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "folder.png").mkdir()
    Image.fromarray(noise(8, 8)).save(tmp_path / "good.png")
    for name in ("fifo.png", "zero.png", "folder.png"):
        with pytest.raises(ImageError, match="not a regular file"):
            open_image(tmp_path / name)
    assert [job.image.name for job in find_jobs([tmp_path], tmp_path / "out")] == ["good.png"]
    images, faults = list_images(tmp_path)
    assert [p.name for p in images] == ["folder.png", "good.png"]
    assert len(faults) == 2


def test_circles_of_links_do_not_hang(tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to(tmp_path / "b.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "up").symlink_to(tmp_path)
    Image.fromarray(noise(8, 8)).save(tmp_path / "folder" / "good.png")
    with pytest.raises(ImageError, match="symbolic links"):
        open_image(tmp_path / "a.png")
    found = [job.image for job in find_jobs([tmp_path], tmp_path / "out")]
    assert found == [tmp_path / "folder" / "good.png"]
    (job,) = find_jobs([tmp_path / "a.png"], tmp_path / "out")  # named: reported when it is read
    assert job.image == tmp_path / "a.png"


@pytest.mark.parametrize("kind", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_training_and_prediction_turn_images_alike(
    tmp_path: Path, kind: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[imagefile.ORIENTATION] = orientation
    Image.fromarray(noise(16, 24)).save(tmp_path / f"x.{kind}", exif=exif)
    path = tmp_path / f"x.{kind}"
    size = (16, 24) if orientation < 5 else (24, 16)
    with open_header(path) as opened:
        assert upright_size(opened) == size
    image = ImageFile(path, PLENTY)
    assert image.size == size
    trained = read_image(path, size)
    assert np.array_equal(image.read((0, size[0]), (0, size[1])), trained)
    if kind == "png" and orientation == 6:  # turned by 90 degrees clockwise
        assert np.array_equal(trained, np.rot90(noise(16, 24), -1))


def test_camvid_with_a_turned_photo(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[imagefile.ORIENTATION] = 6
    for split in ("train", "trainannot"):
        (tmp_path / split).mkdir()
    Image.fromarray(noise(24, 16)).save(tmp_path / "train" / "a.png")
    Image.fromarray(noise(16, 24)).save(tmp_path / "train" / "b.png", exif=exif)
    for name in "ab":
        labels = np.zeros((24, 16), np.uint8)
        Image.fromarray(labels).save(tmp_path / "trainannot" / f"{name}.png")
    source = open_source("camvid", "train", tmp_path)
    assert np.array_equal(source.read(1, (24, 16)).image, np.rot90(noise(16, 24), -1))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16", "F"])
def test_alpha_and_deep_images_are_treated_alike(tmp_path: Path, mode: str) -> None:
    """Alpha is ignored; more than 8 bits are refused, in training and in prediction."""
    path = tmp_path / "x.tif"
    if mode in ("RGBA", "LA"):
        values = noise(8, 8, 4 if mode == "RGBA" else 2)
        Image.fromarray(values).save(path)
        pixels = ImageFile(path, PLENTY).read((0, 8), (0, 8))
        assert np.array_equal(pixels, read_image(path, (8, 8)))
        assert np.array_equal(pixels[..., 0], values[..., 0])
        return
    values = np.full((8, 8), 300, np.uint16 if mode == "I;16" else np.float32)
    Image.fromarray(values).save(path)
    for read in (lambda p: ImageFile(p, PLENTY), lambda p: read_image(p, (8, 8))):
        with pytest.raises(DataError, match="8 bits per channel"):
            read(path)


def test_deep_colors_are_read_in_8_bits(tmp_path: Path) -> None:
    path = tmp_path / "x.ppm"
    path.write_bytes(b"P6 8 8 65535\n" + noise(8, 8, 6).tobytes())
    pixels = ImageFile(path, PLENTY).read((0, 8), (0, 8))
    assert np.array_equal(pixels, read_image(path, (8, 8)))
    high = noise(8, 8, 6)[..., ::2]  # big-endian
    assert np.abs(pixels.astype(int) - high).max() <= 1


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    for name in (b"caf\xe9", b"plain"):
        for label in ("x", "y"):
            folder = tmp_path / label
            folder.mkdir(exist_ok=True)
            for i in range(8):
                path = folder / os.fsdecode(name + b"%d.png" % i)
                Image.fromarray(noise(8, 8)).save(path, "png")
    sources = [open_source("imagefolder", split, tmp_path) for split in ("train", "val")]
    assert sum(map(len, sources)) == 32
    assert sources[0].fingerprint() != sources[1].fingerprint()
    assert sources[0].read(0, (8, 8)).image.shape == (8, 8, 3)
