"""Hostile and damaged images: other formats, bombs, odd shapes, links, FIFOs and devices."""

import contextlib
import io
import os
import random
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import numpy as np
from PIL import Image

from deepcontrol.workbench.data.pixels import decode, read_image
from deepcontrol.workbench.imagefile import MAX_HEIGHT, MAX_WIDTH, as_jpeg
from deepcontrol.workbench.predict.images import ImageFile, find_jobs

Result = Literal["detected", "harmless"]
FREE = 2**27  # bytes that predict may use
KNOWN = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
OTHERS = ("AVIF", "BLP", "DDS", "ICO", "PCX", "TGA", "SGI", "IM", "MSP", "XBM", "EPS", "PDF")
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) (w) file closefile\nshowpage\n"


def read_everywhere(path: Path) -> Result:
    """Read a file as predict, training, one's own data and the report do.

    Raises:
        AssertionError: A result is larger than its limit, or a program was started.
    """
    refused = 0
    readers: tuple[Callable[[Path], object], ...] = (_predict, _train, _own_data, _report)
    with patch.object(subprocess, "Popen", _no_program):
        for read in readers:
            try:
                read(path)
            except ValueError:  # a DataError is one
                refused += 1
    return "detected" if refused else "harmless"


def _no_program(*args: object, **kwargs: object) -> None:
    raise AssertionError("an image started a program")


def _predict(path: Path) -> None:
    image = ImageFile(path, FREE)
    height, width = image.size
    assert 8 * height * width <= FREE
    image.read((0, min(height, 64)), (0, min(width, 64)))


def _train(path: Path) -> None:
    assert read_image(path, (16, 16)).shape == (16, 16, 3)


def _own_data(path: Path) -> None:
    assert decode(path).array.nbytes <= 2**30


def _report(path: Path) -> None:
    width, height = Image.open(io.BytesIO(as_jpeg(path))).size
    assert width <= 2 * MAX_WIDTH
    assert height <= MAX_HEIGHT


def _encoded(rng: random.Random, kind: str) -> bytes:
    """Return a small picture in a format, or noise with its name if Pillow cannot write it."""
    size = (rng.randrange(1, 40), rng.randrange(1, 40))
    pixels = np.frombuffer(rng.randbytes(3 * size[0] * size[1]), np.uint8)
    image = Image.fromarray(pixels.reshape(size[1], size[0], 3))
    modes = ("RGB", "L", "P", "1", "RGBA", "I;16", "CMYK")
    file = io.BytesIO()
    try:
        image.convert(rng.choice(modes)).save(file, kind)
    except (OSError, ValueError, KeyError):
        return kind.encode() + rng.randbytes(200)
    return file.getvalue()


def _written(folder: Path, content: bytes, suffix: str = ".png") -> Path:
    path = folder / f"picture{suffix}"
    path.write_bytes(content)
    return path


def damaged_image(rng: random.Random, folder: Path) -> Result:
    """Change bytes of a known format, or cut it."""
    kind = rng.choice(KNOWN)
    content = bytearray(_encoded(rng, kind))
    for _ in range(rng.randrange(0, 9)):
        content[rng.randrange(min(400, len(content)))] = rng.randrange(256)
    if rng.random() < 0.5:
        content = content[: rng.randrange(len(content) + 1)]
    suffix = rng.choice([".png", ".jpg", ".tif", ".webp"])
    path = _written(folder, bytes(content), suffix)
    try:
        return read_everywhere(path)
    finally:
        path.unlink()


def other_format(rng: random.Random, folder: Path) -> Result:
    """PostScript, AVIF, BLP, DDS and other formats with the suffix of a known one."""
    content = bytearray(rng.choice([POSTSCRIPT, _encoded(rng, rng.choice(OTHERS))]))
    for _ in range(rng.choice([0, 0, 1, 5])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path = _written(folder, bytes(content), rng.choice([".png", ".jpg", ".bmp"]))
    assert read_everywhere(path) == "detected", "an image of another format was read"
    return "detected"


def bomb(rng: random.Random, folder: Path) -> Result:
    """A small file with many pixels, or a header that claims them."""
    side = rng.choice([14_000, 20_000, 50_000, 65_535, 2**31 - 1])
    kind = rng.choice(["png", "ppm", "bmp", "tif", "npy"])
    if kind == "png":
        rows = zlib.compress(bytes(10**5))
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
        content = b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in chunks
        )
    elif kind == "ppm":
        content = f"P6 {side} {side} 255\n".encode() + bytes(100)
    elif kind == "bmp":
        content = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 154, 0, 0, 54, 40, side, side, 1, 24,
                              0, 100, 1, 1, 0, 0) + bytes(100)  # fmt: skip
    elif kind == "tif":
        tags = ((256, side), (257, side), (258, 8), (259, 8), (262, 1), (273, 8), (274, 6),
                (277, 1), (278, side), (279, 20))  # fmt: skip
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        content = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(24)
    else:
        shape = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({side}, {side}), }}"
        content = b"\x93NUMPY\x01\x00v\x00" + shape.ljust(117).encode() + b"\n" + bytes(64)
    path = _written(folder, content, f".{kind}")
    try:
        assert read_everywhere(path) == "detected", f"a bomb was decoded: {kind} {side}"
    finally:
        path.unlink()
    return "detected"


def odd_shape(rng: random.Random, folder: Path) -> Result:
    """1x6400 and the like: pages stay small, and pixels are the same."""
    long, mode = rng.choice([1, 2, 640, 6400, 65_000]), rng.choice(["RGB", "L", "P", "1", "RGBA"])
    size = rng.choice([(1, long), (long, 1)])
    file = io.BytesIO()
    Image.new(mode, size).save(file, "PNG")
    return read_everywhere(_written(folder, file.getvalue()))


def special_file(rng: random.Random, folder: Path) -> Result:
    """A loop of links, a FIFO, a folder, a device or nothing in the place of an image."""
    place = folder / "special"
    place.mkdir(exist_ok=True)
    path = place / rng.choice(["x.png", "x.tif", "x.npy", "caf\udce9.png", "\x1b[2J.jpg"])
    kind = rng.choice(["loop", "fifo", "folder", "device", "missing", "long loop"])
    others: list[Path] = []
    if kind == "loop":
        path.symlink_to(path.name)
    elif kind == "long loop":
        others = [place / "inner"]
        others[0].mkdir()
        (others[0] / "back").symlink_to("..")
        path.symlink_to(Path("inner", *["back", "inner"] * 30, "none.png"))
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    try:
        assert read_everywhere(path) == "detected", f"a {kind} was read"
        with contextlib.suppress(ValueError):  # there is no image in the folder
            assert find_jobs([place], folder / "out") == [], "a search found it"
    finally:
        for link in others:
            (link / "back").unlink()
            link.rmdir()
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    return "detected"


CLASSES: dict[str, Callable[[random.Random, Path], Result]] = {
    "damaged or cut image": damaged_image,
    "PostScript, AVIF, BLP, DDS and others as .png": other_format,
    "decompression bomb": bomb,
    "image of 1x6400 and the like": odd_shape,
    "loop of links, FIFO, device as image": special_file,
}
