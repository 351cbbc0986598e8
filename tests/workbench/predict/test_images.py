"""Finding images, the paths of their outputs, and reading regions."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from deepcontrol.workbench.data import DataError
from deepcontrol.workbench.predict.images import (
    ImageFile,
    Job,
    find_jobs,
    geo_tags,
    write_legend,
    write_outputs,
)

PLENTY = 2**40


def test_folders_are_searched_in_order(tmp_path: Path) -> None:
    for name in ("b/2.PNG", "b/1.tiff", "a.webp", "notes.txt", "b/c/3.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    out = tmp_path / "b" / "out"  # outputs of an earlier call are skipped
    out.mkdir()
    (out / "1-overlay.png").touch()
    jobs = find_jobs([tmp_path, tmp_path / "notes.txt"], out)
    assert [str(job.image.relative_to(tmp_path)) for job in jobs] == [
        "a.webp",
        "b/1.tiff",
        "b/2.PNG",
        "b/c/3.jpg",
        "notes.txt",  # named explicitly
    ]
    assert [str(job.overlay.relative_to(out)) for job in jobs[:3]] == [
        "a-overlay.png",
        "b/1-overlay.png",
        "b/2-overlay.png",
    ]


def test_contact_sheets_are_not_labeled(tmp_path: Path) -> None:
    for name in ("contact-sheet.png", "x.png"):
        (tmp_path / name).touch()
    assert [job.image.name for job in find_jobs([tmp_path], tmp_path / "out")] == ["x.png"]
    named = find_jobs([tmp_path / "contact-sheet.png"], tmp_path / "out")
    assert len(named) == 1  # an image named on the command line is labeled


def test_outputs_do_not_overwrite_images(tmp_path: Path) -> None:
    for name in ("x.png", "x-labels.png"):
        (tmp_path / name).touch()
    images = [tmp_path / "x.png", tmp_path / "x-labels.png"]
    assert len(find_jobs(images, tmp_path / "out")) == 2
    with pytest.raises(ValueError, match=r"x-labels\.png is an input image"):
        find_jobs(images, tmp_path / ".." / tmp_path.name)


@pytest.mark.parametrize("out", ["photos", "."])
def test_output_folder_must_not_contain_the_images(tmp_path: Path, out: str) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "x.png").touch()
    with pytest.raises(ValueError, match="choose another folder with --out"):
        find_jobs([photos], tmp_path / out)


def test_images_with_the_same_output_raise(tmp_path: Path) -> None:
    for name in ("x.png", "x.jpg"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"x\.jpg and .*x\.png would both be written to"):
        find_jobs([tmp_path], tmp_path / "out")
    with pytest.raises(ValueError, match="would both"):
        find_jobs([tmp_path / "x.png", tmp_path / "x.png"], tmp_path / "out")


def test_dots_in_names_are_kept(tmp_path: Path) -> None:
    assert Job(Path("v1.2.png"), tmp_path / "v1.2", tmp_path).labels == tmp_path / "v1.2-labels.png"


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_read_regions(tmp_path: Path, mode: str) -> None:
    values = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    image = Image.fromarray(values).convert(mode)
    image.save(tmp_path / "x.png")
    opened = ImageFile(tmp_path / "x.png", PLENTY)
    assert opened.size == (40, 50)
    region = opened.read((8, 24), (16, 50))
    assert np.array_equal(region, np.asarray(image.convert("RGB"))[8:24, 16:50])


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.new("RGB", (50, 40)).save(tmp_path / "x.jpg", exif=exif)
    assert ImageFile(tmp_path / "x.jpg", PLENTY).size == (50, 40)


def test_memory_is_the_only_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert ImageFile(tmp_path / "x.png", PLENTY).size == (64, 64)
    assert Image.MAX_IMAGE_PIXELS == 1000
    with pytest.raises(ValueError, match=r"64x64 pixels .* GiB are free"):
        ImageFile(tmp_path / "x.png", 8 * 64 * 64 - 1)


def test_turned_tiff_is_measured_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size after the orientation is known only once it is decoded."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (900, 800)).save(tmp_path / "x.tif", exif=exif, compression="tiff_deflate")
    monkeypatch.setattr(TiffImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(DataError, match="GiB are free"):
        ImageFile(tmp_path / "x.tif", free=1000)


PALETTE = ((10, 20, 30), (200, 0, 0), (0, 200, 0))
GEO = [
    (33550, 12, 3, (0.5, 0.5, 0.0), True),  # pixel scale
    (33922, 12, 6, (0.0, 0.0, 0.0, 5e5, 4e6, 0.0), True),  # tie point
    (34735, 3, 8, (1, 1, 0, 1, 1024, 0, 1, 1), True),  # keys
    (34737, 2, 8, "WGS 84|", True),
    (42113, 2, 2, "0", True),  # no data: of the image, not of the labels
]


def write_all(image: Path, out: Path, probabilities: np.ndarray | None = None) -> list[str]:
    ids = (np.arange(6 * 8).reshape(6, 8) % 3).astype(np.uint8)
    job = Job(image, out / image.stem, out)
    return [
        p.name for p in write_outputs(job, ImageFile(image, PLENTY), ids, PALETTE, probabilities)
    ]


def test_labels_have_the_colors_of_their_classes(tmp_path: Path) -> None:
    Image.new("RGB", (8, 6)).save(tmp_path / "x.png")
    assert write_all(tmp_path / "x.png", tmp_path / "out") == ["x-overlay.png", "x-labels.png"]
    with Image.open(tmp_path / "out" / "x-labels.png") as labels:
        assert labels.mode == "P"
        assert np.array_equal(np.asarray(labels).ravel()[:4], [0, 1, 2, 0])
        assert np.array_equal(np.asarray(labels.convert("RGB"))[0, :3], PALETTE)


def test_labels_of_a_geotiff_keep_its_georeference(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "x.tif", np.zeros((6, 8, 3), np.uint8), extratags=GEO)
    probabilities = np.random.default_rng(0).random((3, 6, 8), np.float32)
    names = write_all(tmp_path / "x.tif", tmp_path / "out", probabilities)
    assert names[2:] == ["x-labels.tif", "x-probabilities.tif"]
    for name in names[2:]:
        with tifffile.TiffFile(tmp_path / "out" / name) as file:
            found = {tag.code: tag.value for tag in file.pages[0].tags}
            assert {code: found.get(code) for code, *_ in GEO[:4]} == {
                code: value for code, _, _, value, _ in GEO[:4]
            }
            assert 42113 not in found
    assert np.array_equal(tifffile.imread(tmp_path / "out" / names[3]), probabilities)
    with Image.open(tmp_path / "out" / names[2]) as labels:
        assert np.array_equal(np.asarray(labels.convert("RGB"))[0, :3], PALETTE)


def test_only_geotiffs_get_labels_as_tiff(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "x.tif", np.zeros((6, 8, 3), np.uint8))
    assert write_all(tmp_path / "x.tif", tmp_path / "out") == ["x-overlay.png", "x-labels.png"]
    turned = [(274, 3, 1, 6, True), *GEO]  # the rows of the file are columns of the labels
    tifffile.imwrite(tmp_path / "y.tif", np.zeros((6, 8, 3), np.uint8), extratags=turned)
    assert geo_tags(tmp_path / "y.tif") == []
    (tmp_path / "z.tif").write_bytes(b"II*\0damaged")
    assert geo_tags(tmp_path / "z.tif") == []


def test_a_legend_must_not_overwrite_an_image(tmp_path: Path) -> None:
    (tmp_path / "legend.png").touch()
    with pytest.raises(ValueError, match=r"legend\.png is an input image"):
        find_jobs([tmp_path / "legend.png"], tmp_path)
    write_legend(tmp_path / "out", ("a", "b", "c"), PALETTE)
    with Image.open(tmp_path / "out" / "legend.png") as legend:
        colors = {color for _, color in legend.getcolors(2**16) or []}
    assert set(PALETTE) <= colors
