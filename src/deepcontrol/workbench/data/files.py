"""Read image and label files, split them by name, and tell when they change."""

import contextlib
import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .. import imagefile
from .classfile import ClassFile, Range, hex_color
from .sample import VOID, DataError, Size, covering

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
_SYSTEM_FILES = ("thumbs.db", "desktop.ini")  # of file managers
# Pillow modes with at most 8 bits per channel. Others lose values in the conversion to RGB.
EIGHT_BIT_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
CONTENT_BYTES = 64 * 2**20  # of a split's files that a fingerprint reads, about
CONTENT_BLOCK = 4096
T = TypeVar("T", bound=Hashable)
UNKNOWN = 254  # marks values without a class; there are at most 254 classes, 0 to 253


def open_image(path: Path) -> Image.Image:
    """Decode a whole image, upright by EXIF orientation; raise DataError if damaged."""
    with _naming(path):
        return imagefile.open_image(path)


def check_eight_bit(image: Image.Image, path: Path) -> None:
    """Raise DataError unless the image has one page of at most 8 bits per channel."""
    expected = "expected a gray, RGB or CMYK image of 8 bits per channel"
    if image.mode not in EIGHT_BIT_MODES or _is_deep(image):
        found = f"{_bits(image)} bits" if _is_deep(image) else image.mode
        raise DataError(path, f"{expected}, got {found}")
    if path.suffix.lower() in TIFF_SUFFIXES:
        with _naming(path), imagefile.open_header(path) as header:
            pages = len(_full_pages(header))
        if pages != 1:
            raise DataError(path, f"{expected}, got {pages} pages")


def read_image(path: Path, size: Size) -> NDArray[np.uint8]:
    """Read an RGB image (H, W, 3), resized with antialiasing; ignore alpha."""
    image = open_image(path)
    check_eight_bit(image, path)
    image = image.convert("RGB")
    if image.size != size[::-1]:
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(image)


def cover_and_crop(image: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """Resize an image (H, W, C) to cover `size`, and crop its center."""
    own = (image.shape[0], image.shape[1])
    if own == size:
        return image
    height, width = covering(own, size)
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    resized = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    crop = resized[top : top + size[0], left : left + size[1]]
    return crop.reshape(*size, image.shape[2])


def read_ids(path: Path, size: Size | None = None) -> NDArray[np.int32]:
    """Read ids (H, W) from a single-channel image, resized by nearest neighbor."""
    image = open_image(path)
    if image.mode not in ("L", "P", "I", "I;16"):
        raise DataError(path, f"expected one channel of integer ids, got {image.mode}")
    if size is not None and image.size != size[::-1]:
        image = image.resize(size[::-1], Image.Resampling.NEAREST)
    return np.asarray(image).astype(np.int32)


def native_size(image: Path, *maps: Path) -> Size:
    """Return the size of an image; raise DataError if a label map differs."""
    size = _size(image)
    for path in maps:
        if _size(path) != size:
            (h, w), (own_h, own_w) = size, _size(path)
            raise DataError(path, f"{own_h}x{own_w} for an image of {h}x{w} ({image.name})")
    return size


def _size(path: Path) -> Size:
    with _naming(path), imagefile.open_header(path) as opened:
        return imagefile.upright_size(opened)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an ImageError into a DataError that names the file."""
    try:
        yield
    except imagefile.ImageError as error:
        raise DataError(path, str(error)) from error


def list_entries(folder: Path) -> list[Path]:
    """List a folder by name, without hidden files and those of file managers."""
    return sorted(
        path
        for path in folder.iterdir()
        if not path.name.startswith(".") and path.name.lower() not in _SYSTEM_FILES
    )


def list_images(folder: Path) -> tuple[list[Path], list[DataError]]:
    """List the images of a folder by name, and an error for each other file."""
    if not folder.is_dir():
        return [], [DataError(folder, "no such folder")]
    entries = list_entries(folder)
    images = [p for p in entries if p.suffix.lower() in IMAGE_SUFFIXES and not _is_special(p)]
    known = ", ".join(IMAGE_SUFFIXES)
    faults = [DataError(p, f"not an image ({known})") for p in entries if p not in set(images)]
    return images, faults if entries else [DataError(folder, f"no images ({known}) in this folder")]


def _is_special(path: Path) -> bool:
    """Return whether a path is a device, FIFO or socket: reading may wait forever."""
    return path.exists() and not path.is_file() and not path.is_dir()


def split_by_name(
    samples: Sequence[T], name: Callable[[T], str], fraction: float
) -> dict[str, list[T]]:
    """Split samples by a hash of their names, so that new samples do not move others.

    Of two or more samples, each split has at least one.
    """
    by_hash = sorted(samples, key=lambda own: name_hash(name(own)))
    count = sum(name_hash(name(own)) < fraction for own in samples)
    if len(samples) > 1:
        count = min(max(count, 1), len(samples) - 1)
    val = set(by_hash[:count])
    return {"train": [s for s in samples if s not in val], "val": [s for s in samples if s in val]}


def name_hash(name: str) -> float:
    """Return a number from 0 to 1 that depends only on a name."""
    digest = hashlib.sha256(os.fsencode(name)).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def fingerprint(paths: Iterable[Path], salt: str) -> str:
    """Hash the names, sizes, modification times and parts of the content of files.

    The parts are blocks at equal distances, about 64 MiB over all files and at least one block of
    each, so that a file that was replaced by one of equal size and time is noticed too.
    """
    files = list(paths)
    blocks = max(1, CONTENT_BYTES // CONTENT_BLOCK // max(1, len(files)))
    digest = hashlib.sha256(os.fsencode(salt))
    for path in files:
        try:
            with path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                digest.update(f" {status.st_size} {status.st_mtime_ns}\n".encode())
                digest.update(os.fsencode(path.name))
                for start in _block_starts(status.st_size, blocks):
                    digest.update(os.pread(file.fileno(), CONTENT_BLOCK, start))
        except FileNotFoundError:
            raise DataError(path, "no such file") from None
        except OSError as error:
            raise DataError(path, f"cannot be read ({error.strerror})") from None
    return digest.hexdigest()[:16]


def _block_starts(size: int, blocks: int) -> Iterable[int]:
    """Return where `blocks` blocks start in a file, at equal distances; all if fewer.

    >>> list(_block_starts(size=10_000, blocks=2)), list(_block_starts(size=10_000, blocks=9))
    ([0, 5904], [0, 4096, 8192])
    """
    if size <= blocks * CONTENT_BLOCK:
        return range(0, size, CONTENT_BLOCK)
    last = size - CONTENT_BLOCK
    if blocks == 1:
        return (last // 2,)
    return (i * last // (blocks - 1) for i in range(blocks))


TIFF_SUFFIXES = (".tif", ".tiff")
PICTURE_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".webp", *TIFF_SUFFIXES, ".npy",
)  # fmt: skip
LOSSY_SUFFIXES = (".jpg", ".jpeg")
MOST_CHANNELS = 64
MOST_VALUES = 2**30  # of an image; a damaged or hostile header may claim any size
_GRAY = np.array((0.299, 0.587, 0.114))
_MOST_PAGES = 4096  # of a TIFF that are looked at one by one
_PAGE_KIND, _BITS_PER_SAMPLE, _IMAGE_DESCRIPTION = 254, 258, 270  # TIFF tags
_NOT_AN_IMAGE = 1 | 4  # bits of _PAGE_KIND: reduced resolution, mask
_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I", "F")


class Pixels:
    """The decoded pixels of an image file.

    Attributes:
        array: (H, W, C), of the type in the file.
        has_alpha: Whether the last channel is opacity.
    """

    def __init__(self, array: NDArray, has_alpha: bool = False) -> None:
        self.array, self.has_alpha = array, has_alpha

    @property
    def size(self) -> Size:
        return self.array.shape[0], self.array.shape[1]

    @property
    def channels(self) -> int:
        """Channels without opacity."""
        return self.array.shape[2] - self.has_alpha

    @property
    def is_eight_bit(self) -> bool:
        return self.array.dtype == np.uint8


def decode(path: Path) -> Pixels:
    """Decode an image file with all its channels.

    TIFF files may have any number of channels, as samples or as pages. NumPy files hold (H, W) or
    (H, W, C). The orientation of a camera (EXIF) is applied.

    Raises:
        DataError: The file is missing or damaged, or its array is no image.
    """
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return _checked(path, _load_npy(path))
    if suffix in TIFF_SUFFIXES:
        pixels = _decode_tiff(path)
        if pixels is not None:
            return pixels
    return _from_pillow(open_image(path))


def size_of(path: Path) -> Size:
    """Return the height and width of an image, from its header where possible."""
    suffix = path.suffix.lower()
    if suffix != ".npy" and suffix not in TIFF_SUFFIXES:
        try:
            with imagefile.open_header(path) as image:
                return imagefile.upright_size(image)
        except imagefile.ImageError:
            pass  # decode reports it
    return decode(path).size


def to_eight_bit(
    path: Path, pixels: Pixels, channels: int, value_range: Range | None
) -> NDArray[np.uint8]:
    """Return pixels as (H, W, channels) of 8 bits.

    Gray images are repeated for 3 channels, and RGB images become gray for 1. Opacity is dropped,
    unless `channels` counts it. Values of more than 8 bits are mapped linearly from `value_range`
    (by default that of 16 bits).

    Args:
        path: The file, for error messages.
        pixels: Result of `decode`.
        channels: Channels of the result.
        value_range: Values that become 0 and 255.
    """
    array = pixels.array
    if pixels.has_alpha and array.shape[2] != channels:
        array = array[..., :-1]
    if not pixels.is_eight_bit:
        if value_range is None and array.dtype != np.uint16:
            raise DataError(
                path,
                f"values of type {array.dtype} need `range: [lowest, highest]` in the class file: "
                "run `deepcontrol data init`, or add it by hand",
            )
        low, high = value_range or (0.0, 65535.0)
        scaled = (array.astype(np.float32) - low) * (255 / (high - low))
        array = np.nan_to_num(scaled).round().clip(0, 255).astype(np.uint8)
    if array.shape[2] == channels:
        return np.ascontiguousarray(array)
    if array.shape[2] == 1 and channels == 3:
        return array.repeat(3, 2)
    if array.shape[2] == 3 and channels == 1:
        return (array @ _GRAY).round().astype(np.uint8)[..., None]
    found = array.shape[2]
    raise DataError(
        path,
        f"{found} channel{'s' * (found > 1)}, expected {channels}: convert this image, or train "
        f"with --channels {found} if all images have as many",
    )


def read_mask(path: Path, classes: ClassFile) -> NDArray[np.uint8]:
    """Read a mask (H, W) as class numbers, VOID for pixels to ignore.

    Raises:
        DataError: The mask has a value or color that is not in the class file.
    """
    if classes.has_ids:
        return _map_ids(path, decode_ids(path), classes)
    return _map_colors(path, decode_colors(path), classes)


def decode_ids(path: Path) -> NDArray[np.int32]:
    """Read the ids (H, W) of a mask: index, palette or gray image, or equal RGB."""
    if path.suffix.lower() == ".npy":
        array = _load_npy(path)
    else:
        image = open_mask(path)
        if image.mode in ("RGB", "RGBA"):
            array = np.asarray(image.convert("RGB"))
            if (array != array[..., :1]).any():
                raise DataError(
                    path,
                    "a mask of colors, expected one channel of ids: list the colors of the classes "
                    "in place of their ids in the class file (`deepcontrol data init` does)",
                )
            array = array[..., 0]
        else:
            array = np.asarray(image if image.mode != "LA" else image.getchannel(0))
    if array.ndim != 2 or array.dtype.kind not in "bui":
        raise DataError(
            path, f"{array.dtype} of shape {array.shape}, expected integers of shape (H, W)"
        )
    return array.astype(np.int32)


def decode_colors(path: Path) -> NDArray[np.uint8]:
    """Read the colors (H, W, 3) of a mask."""
    if path.suffix.lower() == ".npy":
        array = _load_npy(path)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
            raise DataError(
                path, f"{array.dtype} of shape {array.shape}, expected uint8 of shape (H, W, 3)"
            )
        return array
    image = open_mask(path)
    if image.mode in _SIXTEEN_BIT:
        raise DataError(path, f"a mask of ids ({image.mode}), expected the colors of the classes")
    return np.asarray(image.convert("RGB"))


def open_mask(path: Path) -> Image.Image:
    """Open a mask; raise DataError for a lossy format, which changes its values."""
    if path.suffix.lower() in LOSSY_SUFFIXES:
        raise DataError(
            path, "a JPEG mask: its compression changes the values at edges. Save masks as PNG"
        )
    return open_image(path)


def resize(array: NDArray, size: Size, nearest: bool = False) -> NDArray:
    """Resize (H, W) or (H, W, C), by nearest neighbor or bilinear with antialiasing."""
    if array.shape[:2] == size:
        return array
    if nearest:
        rows = (np.arange(size[0]) + 0.5) * array.shape[0] / size[0]
        columns = (np.arange(size[1]) + 0.5) * array.shape[1] / size[1]
        return array[rows.astype(int)[:, None], columns.astype(int)]
    if array.shape[2] == 3:
        return np.asarray(Image.fromarray(array).resize(size[::-1], Image.Resampling.BILINEAR))
    channels = [Image.fromarray(np.ascontiguousarray(array[..., i])) for i in range(array.shape[2])]
    resized = [channel.resize(size[::-1], Image.Resampling.BILINEAR) for channel in channels]
    return np.stack([np.asarray(channel) for channel in resized], 2)


def _from_pillow(image: Image.Image) -> Pixels:
    mode = image.mode
    if mode in _SIXTEEN_BIT:
        array = np.asarray(image)
        if array.dtype == np.int32 and array.min() >= 0 and array.max() <= 65535:
            array = array.astype(np.uint16)  # Pillow opens 16-bit PNGs as 32-bit integers
        return Pixels(array[..., None])
    if mode in ("LA", "RGBA", "La", "RGBa") or (mode == "P" and "transparency" in image.info):
        with_alpha = image.convert("LA" if mode in ("LA", "La") else "RGBA")
        return Pixels(np.asarray(with_alpha), has_alpha=True)
    array = np.asarray(image.convert("L" if mode in ("1", "L") else "RGB"))
    return Pixels(np.atleast_3d(array))


def _decode_tiff(path: Path) -> Pixels | None:
    """Decode a TIFF that Pillow does not show as a single image; None if it does."""
    frames: list[NDArray] = []
    try:
        with imagefile.open_header(path) as image:
            size, pages = image.size, _full_pages(image)
            colors = len(image.getbands()) if _has_deep_colors(image) else 0
            use_tifffile = _has_rows_as_pages(image) or (colors > 0 and len(pages) == 1)
            if len(pages) == 1 and not use_tifffile:
                return None
            few = len(pages) <= MOST_CHANNELS and len(pages) * math.prod(size) <= MOST_VALUES
            for page in pages if few and not use_tifffile else ():
                image.seek(page)
                if image.size != size:
                    break
                frames.append(np.asarray(image))
    except imagefile.ImageError:
        if not path.is_file():
            return None  # open_image reports it
        colors, use_tifffile = 0, True
    if use_tifffile:
        array = _read_tifffile(path)
        if colors and array.ndim == 3:
            array = array[..., :colors]  # Pillow's channels: without those that have no meaning
        return _checked(path, array, has_alpha=colors == 4)
    if len(frames) != len(pages) or any(frame.ndim != 2 for frame in frames):
        raise DataError(
            path,
            f"{len(pages)} pages, the first of {size[1]}x{size[0]}; expected at most "
            f"{MOST_CHANNELS} gray pages of one size, as channels of the image, with "
            f"{MOST_VALUES:,} values",
        )
    return _checked(path, np.stack(frames, 2))


def _full_pages(image: Image.Image) -> Sequence[int]:
    """Return the pages of a TIFF that are images: no overviews of another page, and no masks."""
    count = getattr(image, "n_frames", 1)
    if not 1 < count <= _MOST_PAGES:
        return range(count)
    found = []
    for page in range(count):
        image.seek(page)
        if not image.tag_v2.get(_PAGE_KIND, 0) & _NOT_AN_IMAGE:  # type: ignore[attr-defined]
            found.append(page)
    image.seek(0)
    return found


def _bits(image: Image.Image) -> int:
    """Return the bits per channel that a TIFF declares; 8 for other images."""
    return int(max(getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (8,))))


def _is_deep(image: Image.Image) -> bool:
    """Return whether an image has colors of more than 8 bits, of which Pillow drops the lower."""
    return image.mode in ("RGB", "RGBA") and _bits(image) > 8


def _has_deep_colors(image: Image.Image) -> bool:
    """Return whether a TIFF has deep colors that tifffile reads.

    Files with an orientation are left to Pillow, which turns them.
    """
    tags = getattr(image, "tag_v2", {})
    upright = tags.get(imagefile.ORIENTATION, imagefile.UPRIGHT) == imagefile.UPRIGHT
    return _is_deep(image) and upright


def _has_rows_as_pages(image: Image.Image) -> bool:
    """Return whether tifffile wrote (H, W, channels) as H pages of (W, channels).

    That is its default for other than 1, 3 and 4 channels. It notes the shape in the description.
    """
    text = str(getattr(image, "tag_v2", {}).get(_IMAGE_DESCRIPTION, ""))
    found = re.match(r'\{"shape": \[(\d{1,9}), (\d{1,9}), (\d{1,9})\]', text)
    if found is None:
        return False
    height, width, channels = map(int, found.groups())
    return image.size == (channels, width) and channels < min(height, width, MOST_CHANNELS + 1)


def _read_tifffile(path: Path) -> NDArray:
    """Read a TIFF with more samples per pixel than Pillow supports."""
    try:
        import tifffile
    except ModuleNotFoundError:
        raise DataError(
            path, 'a TIFF file that needs tifffile: pip install ".[workbench]"'
        ) from None
    try:
        with _no_log("tifffile"), tifffile.TiffFile(path, _multifile=False) as file:
            shape, axes = file.series[0].shape, file.series[0].axes
            if math.prod(shape) > MOST_VALUES:
                raise ValueError(f"shape {shape}, expected at most {MOST_VALUES:,} values")
            array = file.asarray()
    except Exception as error:  # tifffile raises errors of its own and of its codecs
        advice = ": pip install imagecodecs" if "imagecodecs" in str(error) else ""
        raise DataError(path, f"not a readable image ({error}){advice}") from error
    first_is_small = array.ndim == 3 and array.shape[0] < min(array.shape[1:])
    if axes in ("SYX", "CYX") or (first_is_small and array.shape[2] > MOST_CHANNELS):
        array = np.moveaxis(array, 0, 2)  # stored channel by channel
    return array


@contextlib.contextmanager
def _no_log(name: str) -> Iterator[None]:
    """Silence a library's log, which prints a file's names and tags to the terminal."""
    log = logging.getLogger(name)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _load_npy(path: Path) -> NDArray:
    if path.exists() and not path.is_file():  # reading a FIFO may never end
        raise DataError(path, "not a regular file")
    try:
        # Mapped first: a header may claim a shape that is larger than the file and the memory.
        return np.array(np.lib.format.open_memmap(path, mode="r"))
    except FileNotFoundError:
        raise DataError(path, "no such file") from None
    except Exception as error:  # a damaged header may raise anything
        raise DataError(path, f"not a readable NumPy file ({error})") from error


def _checked(path: Path, array: NDArray, has_alpha: bool = False) -> Pixels:
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or not 1 <= array.shape[2] <= MOST_CHANNELS or not array.size:
        raise DataError(
            path,
            f"an array of shape {array.shape}, expected (H, W) or (H, W, channels) with at most "
            f"{MOST_CHANNELS} channels",
        )
    if array.dtype.kind not in "buif":
        raise DataError(path, f"values of type {array.dtype}, expected numbers")
    return Pixels(array.astype(np.uint8) * 255 if array.dtype == bool else array, has_alpha)


def _map_ids(path: Path, ids: NDArray[np.int32], classes: ClassFile) -> NDArray[np.uint8]:
    table = np.full(65536, UNKNOWN, np.uint8)
    table[list(classes.ignored_ids)] = VOID
    table[list(classes.ids)] = np.arange(len(classes.ids))
    labels = table[ids.clip(0, 65535)]
    bad = (labels == UNKNOWN) | (ids < 0) | (ids > 65535)
    if bad.any():
        values, counts = np.unique(ids[bad], return_counts=True)
        worst = counts.argmax()
        raise DataError(
            path,
            f"value {values[worst]} in {_share(counts[worst], bad.size)}"
            f"{_others(len(values), 'value')}, expected {classes.expected}",
        )
    return labels


def _map_colors(path: Path, colors: NDArray[np.uint8], classes: ClassFile) -> NDArray[np.uint8]:
    packed = pack_colors(colors)
    found, inverse, counts = np.unique(packed, return_inverse=True, return_counts=True)
    known = {int(pack_colors(np.array(c, np.uint8))): i for i, c in enumerate(classes.colors)}
    known |= {int(pack_colors(np.array(c, np.uint8))): VOID for c in classes.ignored_colors}
    numbers = np.array([known.get(int(value), UNKNOWN) for value in found], np.uint8)
    bad = numbers == UNKNOWN
    if bad.any():
        worst = int(np.where(bad, counts, 0).argmax())
        raise DataError(
            path,
            f"color {hex_color(unpack_color(int(found[worst])))} in "
            f"{_share(counts[worst], packed.size)}{_others(int(bad.sum()), 'color')}, "
            f"expected {classes.expected}",
        )
    return numbers[inverse].reshape(packed.shape)


def pack_colors(colors: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return colors (*, 3) as integers (*)."""
    parts = colors.astype(np.int32)
    return (parts[..., 0] << 16) | (parts[..., 1] << 8) | parts[..., 2]


def unpack_color(value: int) -> tuple[int, int, int]:
    """Return the color of an integer of `pack_colors`."""
    return value >> 16, value >> 8 & 255, value & 255


def _share(count: int, total: int) -> str:
    return f"{count:,} {'pixel' if count == 1 else 'pixels'} ({count / total:.2%})"


def _others(count: int, what: str) -> str:
    if count == 1:
        return ""
    return f" and {count - 1} other unknown {what}{'s' * (count > 2)}"
