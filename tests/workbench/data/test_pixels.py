"""Images of any bit depth and number of channels; masks of ids and colors."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from deepcontrol.workbench.data import VOID, DataError
from deepcontrol.workbench.data.classfile import ClassFile
from deepcontrol.workbench.data.masks import read_mask
from deepcontrol.workbench.data.pixels import decode, read_image, resize, size_of, to_eight_bit

IDS = ClassFile(("a", "b", "c"), (0, 1, 7), ((0, 0, 0),) * 3, (255,))
BY_COLOR = ClassFile(("a", "b"), (), ((0, 0, 0), (255, 0, 0)), (), ((255, 255, 255),))


@pytest.fixture
def rgb() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (6, 9, 3)).astype(np.uint8)


def read(path: Path, channels: int = 3, value_range: tuple[float, float] | None = None):
    return to_eight_bit(path, decode(path), channels, value_range)


def test_rgb_gray_and_opacity(rgb: np.ndarray, tmp_path: Path) -> None:
    alpha = np.full((6, 9, 1), 100, np.uint8)
    Image.fromarray(np.concatenate([rgb, alpha], 2)).save(tmp_path / "a.png")
    assert (read(tmp_path / "a.png") == rgb).all()
    assert read(tmp_path / "a.png", 4).shape == (6, 9, 4)
    Image.fromarray(rgb[..., 0]).save(tmp_path / "g.png")
    assert (read(tmp_path / "g.png") == rgb[..., :1]).all()
    assert read(tmp_path / "g.png", 1).shape == (6, 9, 1)
    gray = read(tmp_path / "a.png", 1)[..., 0]
    assert np.abs(gray - rgb @ (0.299, 0.587, 0.114)).max() <= 0.5


def test_sixteen_bits(tmp_path: Path) -> None:
    values = np.array([[0, 1000, 4095, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    assert read(tmp_path / "a.png", 1)[0, :, 0].tolist() == [0, 4, 16, 255]
    assert read(tmp_path / "a.png", 1, (0, 4095))[0, :, 0].tolist() == [0, 62, 255, 255]
    np.save(tmp_path / "f.npy", values.astype(np.float32))
    with pytest.raises(DataError, match=r"float32 need `range: \[lowest, highest\]`"):
        read(tmp_path / "f.npy", 1)
    assert read(tmp_path / "f.npy", 1, (0, 4095))[0, 1, 0] == 62


@pytest.mark.parametrize("planar", [False, True])
def test_multichannel_tiff(planar: bool, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (80, 90, 5)).astype(np.uint8)
    stored = np.moveaxis(array, 2, 0) if planar else array
    tifffile.imwrite(
        tmp_path / "a.tif",
        stored,
        photometric="minisblack",
        planarconfig="separate" if planar else "contig",
    )
    assert (read(tmp_path / "a.tif", 5) == array).all()
    assert size_of(tmp_path / "a.tif") == (80, 90)
    with pytest.raises(DataError, match=r"5 channels, expected 3: .*train with --channels 5"):
        read(tmp_path / "a.tif")


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("planar", [False, True])
def test_sixteen_bit_colors(channels: int, planar: bool, tmp_path: Path) -> None:
    """Pillow would keep the upper 8 bits: 16 of 4096 levels of a 12-bit camera."""
    array = np.random.default_rng(0).integers(0, 4096, (7, 9, channels)).astype(np.uint16)
    tifffile.imwrite(
        tmp_path / "a.tif",
        np.moveaxis(array, 2, 0) if planar else array,
        photometric="rgb",
        planarconfig="separate" if planar else "contig",
        extrasamples=["unassalpha"] * (channels - 3),
    )
    pixels = decode(tmp_path / "a.tif")
    assert (pixels.array == array).all()
    assert (pixels.channels, pixels.has_alpha) == (3, channels == 4)
    expected = (array[..., :3] * (255 / 4095)).round()
    assert np.abs(read(tmp_path / "a.tif", 3, (0, 4095)) - expected).max() <= 1


def test_colors_with_a_channel_without_meaning(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 65536, (20, 30, 4)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="rgb", extrasamples=["unspecified"])
    pixels = decode(tmp_path / "a.tif")
    assert not pixels.has_alpha
    assert np.array_equal(pixels.array, array[..., :3])


def test_narrow_channels_of_a_tiff(tmp_path: Path) -> None:
    """The file says that its channels come first; their sizes alone would not."""
    array = np.random.default_rng(0).integers(0, 256, (5, 72, 48)).astype(np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="rgb", planarconfig="separate")
    assert np.array_equal(decode(tmp_path / "a.tif").array, np.moveaxis(array, 0, 2))


@pytest.mark.parametrize("compression", ["lzw", "packbits", "zlib"])
def test_compressed_sixteen_bit_colors(compression: str, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 4096, (7, 9, 3)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="rgb", compression=compression)
    assert np.array_equal(decode(tmp_path / "a.tif").array, array)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_overviews_of_a_tiff_are_ignored(dtype: type, tmp_path: Path) -> None:
    """Cloud-optimized GeoTIFFs have smaller copies of the image as further pages."""
    array = np.random.default_rng(0).integers(0, 256, (40, 60, 3)).astype(dtype)
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(array, photometric="rgb", subifds=0)
        file.write(array[::2, ::2], photometric="rgb", subfiletype=1)
    assert np.array_equal(decode(tmp_path / "a.tif").array, array)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_color_pages_of_a_tiff_are_refused(dtype: type, tmp_path: Path) -> None:
    array = np.zeros((40, 60, 3), dtype)
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(array, photometric="rgb")
        file.write(array[::2, ::2], photometric="rgb")
    with pytest.raises(DataError, match=r"2 pages, the first of 40x60"):
        decode(tmp_path / "a.tif")


def test_images_that_must_have_eight_bits(tmp_path: Path) -> None:
    array = np.zeros((40, 60, 3), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="rgb")
    assert read_image(tmp_path / "a.tif", (40, 60)).shape == (40, 60, 3)
    tifffile.imwrite(tmp_path / "b.tif", array.astype(np.uint16), photometric="rgb")
    with pytest.raises(DataError, match="8 bits per channel, got 16 bits"):
        read_image(tmp_path / "b.tif", (40, 60))
    with tifffile.TiffWriter(tmp_path / "c.tif") as file:
        file.write(array, photometric="rgb")
        file.write(array[::2], photometric="rgb")
    with pytest.raises(DataError, match="got 2 pages"):
        read_image(tmp_path / "c.tif", (40, 60))


def test_compression_that_needs_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asarray(self: tifffile.TiffFile) -> None:
        raise ValueError("<COMPRESSION.LZW: 5> requires the 'imagecodecs' package")

    array = np.zeros((20, 30, 3), np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="rgb")
    monkeypatch.setattr(tifffile.TiffFile, "asarray", asarray)
    with pytest.raises(DataError, match=r"LZW.*: pip install imagecodecs"):
        decode(tmp_path / "a.tif")


@pytest.mark.parametrize("shape", [(40, 56, 6), (80, 90, 2), (5, 40, 56)])
def test_tiff_of_an_array(shape: tuple[int, ...], tmp_path: Path) -> None:
    """tifffile writes (H, W, 6) as H pages of (W, 6), and notes the shape."""
    array = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="minisblack")
    expected = np.moveaxis(array, 0, 2) if shape[0] == 5 else array
    assert np.array_equal(decode(tmp_path / "a.tif").array, expected)


def test_pages_of_a_tiff_are_channels(rgb: np.ndarray, tmp_path: Path) -> None:
    first, *others = (Image.fromarray(rgb[..., i]) for i in (0, 1, 2, 0))
    first.save(tmp_path / "a.tif", save_all=True, append_images=others)
    assert (read(tmp_path / "a.tif", 4) == rgb[..., [0, 1, 2, 0]]).all()


def test_camera_orientation(rgb: np.ndarray, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6  # turned by 90 degrees
    Image.fromarray(rgb).save(tmp_path / "a.png", exif=exif)
    assert decode(tmp_path / "a.png").size == size_of(tmp_path / "a.png") == (9, 6)


def test_unreadable_files(tmp_path: Path) -> None:
    for name in ("a.npy", "a.tif", "a.png"):
        (tmp_path / name).write_bytes(b"no image")
        with pytest.raises(DataError, match=f"{name}: not a readable"):
            decode(tmp_path / name)
        with pytest.raises(DataError, match="no such file"):
            decode(tmp_path / f"missing-{name}")
    np.save(tmp_path / "a.npy", np.zeros((2, 2, 2, 2)))
    with pytest.raises(DataError, match=r"shape \(2, 2, 2, 2\), expected \(H, W\)"):
        decode(tmp_path / "a.npy")


def palette_image(ids: np.ndarray) -> Image.Image:
    image = Image.fromarray(ids, "L").convert("P")
    image.putpalette([200, 10, 10] * 256)
    image.putdata(ids.ravel().tolist())
    return image


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: Image.fromarray(ids),
        lambda ids: Image.fromarray(ids.astype(np.uint16)),
        lambda ids: Image.fromarray(ids[..., None].repeat(3, 2)),
        palette_image,
    ],
    ids=["gray", "16 bit", "equal RGB", "palette"],
)
def test_masks_of_ids(make: Callable[[np.ndarray], Image.Image], tmp_path: Path) -> None:
    make(np.array([[0, 1], [7, 255]], np.uint8)).save(tmp_path / "a.png")
    assert read_mask(tmp_path / "a.png", IDS).tolist() == [[0, 1], [2, VOID]]


def test_masks_of_colors(tmp_path: Path) -> None:
    colors = np.array([[[0, 0, 0], [255, 0, 0]], [[255, 255, 255], [255, 0, 0]]], np.uint8)
    Image.fromarray(colors).save(tmp_path / "a.png")
    assert read_mask(tmp_path / "a.png", BY_COLOR).tolist() == [[0, 1], [VOID, 1]]


def test_wrong_masks_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "a.png"

    def message(image: Image.Image, classes: ClassFile) -> str:
        image.save(path)
        with pytest.raises(DataError) as caught:
            read_mask(path, classes)
        return str(caught.value).removeprefix(f"{path}: ")

    ids = np.zeros((10, 10), np.uint8)
    ids[0, :3], ids[1, 0] = 5, 6
    assert message(Image.fromarray(ids), IDS) == (
        "value 5 in 3 pixels (3.00%) and 1 other unknown value, expected 0, 1, 7, or 255 to "
        "ignore. Correct the mask, or list it in the class file, under classes or ignore"
    )
    assert "color #050505 in 3 pixels (3.00%)" in message(Image.fromarray(ids), BY_COLOR)
    colors = np.zeros((4, 4, 3), np.uint8)
    colors[0, 0] = (255, 1, 0)
    assert "expected #000000, #ff0000, or #ffffff" in message(Image.fromarray(colors), BY_COLOR)
    assert "a mask of colors, expected one channel of ids" in message(Image.fromarray(colors), IDS)
    Image.fromarray(ids).save(tmp_path / "a.jpg")
    with pytest.raises(DataError, match=r"a JPEG mask.*Save masks as PNG"):
        read_mask(tmp_path / "a.jpg", IDS)


def test_resize() -> None:
    ids = np.arange(16, dtype=np.uint8).reshape(4, 4)
    assert resize(ids, (2, 2), nearest=True).tolist() == [[5, 7], [13, 15]]
    assert resize(ids, (8, 8), nearest=True)[::2, ::2].tolist() == ids.tolist()
    assert resize(np.full((4, 4, 5), 7, np.uint8), (3, 6)).shape == (3, 6, 5)


def test_headers_that_claim_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is allocated for what a file holds, not for what its header says."""
    np.save(tmp_path / "a.npy", np.zeros((4, 5), np.uint8))
    assert decode(tmp_path / "a.npy").size == (4, 5)
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content.replace(b"(4, 5), }     ", b"(400000, 5000)}"))
    with pytest.raises(DataError, match="not a readable NumPy file"):
        decode(tmp_path / "a.npy")
    (tmp_path / "a.npy").write_bytes(content.replace(b"(4, 5), }     ", b"(2**62, 2**62)}"))
    with pytest.raises(DataError, match="not a readable NumPy file"):
        decode(tmp_path / "a.npy")
    os.mkfifo(tmp_path / "b.npy")
    with pytest.raises(DataError, match="not a regular file"):
        decode(tmp_path / "b.npy")
    tifffile.imwrite(tmp_path / "c.tif", np.zeros((6, 9, 7), np.uint8), photometric="minisblack")
    tifffile.imwrite(tmp_path / "d.tif", np.zeros((2, 6, 9), np.uint8), photometric="minisblack")
    assert decode(tmp_path / "d.tif").channels == 2
    monkeypatch.setattr("deepcontrol.workbench.data.pixels.MOST_VALUES", 50)
    for name in ("c.tif", "d.tif"):
        with pytest.raises(DataError, match="expected at most"):
            decode(tmp_path / name)


def test_pages_of_another_size_are_not_decoded(tmp_path: Path) -> None:
    pages = [Image.new("L", (4, 4)), Image.new("L", (9, 9))]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(DataError, match="2 pages, the first of 4x4; expected"):
        decode(tmp_path / "a.tif")


def test_damaged_tiff_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log of tifffile would send a name's control characters to the terminal."""
    path = tmp_path / "a\x1b[2J.tif"
    tifffile.imwrite(path, np.zeros((6, 9, 7), np.uint8), photometric="minisblack")
    content = bytearray(path.read_bytes())
    content[content.index((273).to_bytes(2, "little")) + 2] = 99  # the type of StripOffsets
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a readable image"):
        decode(path)
    assert caplog.records == []
