"""Decode image files with any number of channels and bits, and resize them."""

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .. import imagefile
from .classfile import Range
from .sample import DataError, Size, covering

# Pillow modes with at most 8 bits per channel. Others lose values in the conversion to RGB.
EIGHT_BIT_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
TIFF_SUFFIXES = (".tif", ".tiff")
PICTURE_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".webp", *TIFF_SUFFIXES, ".npy",
)  # fmt: skip
MOST_CHANNELS = 64
MOST_VALUES = 2**30  # largest image; a damaged or hostile header may claim any size
_GRAY = np.array((0.299, 0.587, 0.114))
_MOST_PAGES = 4096  # pages of a TIFF that are read one by one
_PAGE_KIND, _BITS_PER_SAMPLE, _IMAGE_DESCRIPTION = 254, 258, 270  # TIFF tags
_NOT_AN_IMAGE = 1 | 4  # bits of _PAGE_KIND: reduced resolution, mask
SIXTEEN_BIT_MODES = ("I;16", "I;16B", "I;16L", "I", "F")


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
        return _checked(path, load_npy(path))
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
    if mode in SIXTEEN_BIT_MODES:
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
    """Return a TIFF's pages that are images, without overviews and masks."""
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
    """Return whether colors have more than 8 bits, of which Pillow drops the lower."""
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


def load_npy(path: Path) -> NDArray:
    """Read a NumPy file; raise DataError if it is missing or damaged."""
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
