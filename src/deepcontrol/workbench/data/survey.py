"""Look at a folder's images and masks; propose classes (`deepcontrol data init`)."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .classfile import LARGEST_ID, MOST_CLASSES, ClassFile, Color, Range, find_class_file, hex_color
from .drawing import colored, draw_legend
from .folder import Files, FolderOptions, check_same_size, find_files, fitting, make_source
from .masks import decode_colors, decode_ids, open_mask, pack_colors, unpack_color
from .pixels import Pixels, decode, resize
from .sample import DataError, Palette, Progress, Sample, Size, starter_colors

CONTACT_SHEET = "contact-sheet.png"  # `data init` writes it into the dataset folder
LEAST_DISTANCE = 40  # between two palette colors, summed over red, green and blue
RARE = 1e-3  # colors with a smaller share of all pixels may come from smooth edges
MANY_COLORS = 32  # more are the colors of a photograph or of smooth edges
RANGE_PERCENTILES = (0.1, 99.9)
SAMPLED_VALUES = 4096  # per image, for the range
SHEET_TILE: Size = (160, 160)
SHEET_COLUMNS, SHEET_ROWS = 4, 4
SIDE_STEP = 32  # pixels: SegNet halves images five times
LARGEST_SIDE, SMALLEST_SIDE = 512, 64


@dataclass
class Survey:
    """The contents of a folder of images and masks."""

    files: dict[str, list[Files]]  # by split
    faults: list[DataError] = field(default_factory=list)
    has_colors: bool = False  # masks hold colors, not ids
    pixels: Counter[int] = field(default_factory=Counter)  # by id, or by packed color
    masks: Counter[int] = field(default_factory=Counter)  # masks that have the value
    sizes: Counter[Size] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)
    value_range: Range | None = None  # for images with more than 8 bits

    @property
    def all_files(self) -> list[Files]:
        return [files for part in self.files.values() for files in part]

    @property
    def most_channels(self) -> int:
        """Channels of most images; 3 if some are gray and some are RGB."""
        common = self.channels.most_common(1)[0][0] if self.channels else 3
        return 3 if set(self.channels) <= {1, 3} and 3 in self.channels else common


@dataclass
class _Seen:
    """The statistics of one image and its mask."""

    files: Files
    fault: DataError | None = None
    has_colors: bool = False
    values: tuple[NDArray, NDArray] | None = None  # mask values and their pixels
    size: Size = (0, 0)
    channels: int = 0
    deep_values: NDArray | None = None  # some values of an image with more than 8 bits


def survey(root: Path, val_fraction: float, progress: Progress | None = None) -> Survey:
    """Read all files of a folder and collect sizes, mask values and faults.

    Args:
        root: Folder with images/ and masks/, or train/ and val/.
        val_fraction: Share of the images for validation, if there is no val/.
        progress: Called after each file.
    """
    parts, faults = find_files(root, val_fraction)
    found = Survey(parts, faults)
    everything = found.all_files
    has_colors = _masks_have_colors([files.mask for files in everything])
    found.has_colors = has_colors
    deep: list[NDArray] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        seen = pool.map(lambda files: _look(files, has_colors), everything)
        for done, one in enumerate(seen, start=1):
            if one.fault is not None:
                found.faults.append(one.fault)
            if one.channels:
                found.sizes[one.size] += 1
                found.channels[one.channels] += 1
            if one.values is not None:
                for value, count in zip(*(a.tolist() for a in one.values), strict=True):
                    found.pixels[value] += count
                    found.masks[value] += 1
            if one.deep_values is not None:
                deep.append(one.deep_values)
            if progress:
                progress(done, len(everything))
    if deep:
        low, high = np.percentile(np.concatenate(deep), RANGE_PERCENTILES)
        found.value_range = (float(low), float(max(high, low + 1)))
    found.faults += _channel_faults(found)
    return found


def propose_classes(found: Survey) -> tuple[ClassFile, list[DataError]]:
    """Return the masks' classes, and errors for values that cannot be classes.

    Value 255 is ignored if the other values are 0, 1, ..., n. Rare colors are left out if there are
    many: they come from smooth edges.

    Raises:
        DataError: The masks have fewer than two values, or too many for classes.
    """
    faults: list[DataError] = []
    values = sorted(found.pixels)
    where = found.all_files[0].mask.parent if found.all_files else Path()
    if found.has_colors and len(values) > MANY_COLORS:
        total = sum(found.pixels.values())
        kept = [v for v in values if found.pixels[v] >= RARE * total]
        faults.append(
            DataError(
                where,
                f"the masks have {len(values):,} colors, of which {len(kept)} cover at least "
                f"{RARE:.1%} of the pixels each. The others may come from smooth (antialiased) "
                "edges or from JPEG: draw masks without smoothing and save them as PNG",
            )
        )
        values = kept
    if not found.has_colors and values and values[-1] > LARGEST_ID:
        raise DataError(where, f"mask values up to {values[-1]}, expected at most {LARGEST_ID}")
    ids: tuple[int, ...] = ()
    ignored: tuple[int, ...] = ()
    if not found.has_colors and 255 in values:
        others = [v for v in values if v != 255]
        if len(others) >= 2 and others == list(range(len(others))):
            values, ignored = others, (255,)
    if not 2 <= len(values) <= MOST_CLASSES:
        kind = "color" if found.has_colors else "value"
        shown = [hex_color(unpack_color(v)) if found.has_colors else str(v) for v in values[:4]]
        raise DataError(
            where,
            f"the masks have {len(values)} {kind}{'s' * (len(values) != 1)} "
            f"({', '.join(shown) or 'none'}{', ...' * (len(values) > 4)}), expected 2 to "
            f"{MOST_CLASSES}: one for each class",
        )
    if found.has_colors:
        colors: Palette = tuple(unpack_color(value) for value in values)
        names = _names(values, list(colors))
    else:
        ids = tuple(values)
        colors = _palette_of(found.all_files[0].mask, values) or starter_colors(values)
        names = _names(values, None)
    return ClassFile(names, ids, colors, ignored, (), found.value_range), faults


def _palette_of(mask: Path, ids: Sequence[int]) -> Palette | None:
    """Return the colors of a palette image, if they differ enough to be shown."""
    if mask.suffix.lower() == ".npy" or (image := open_mask(mask)).mode != "P":
        return None
    entries = np.array(image.getpalette("RGB") or [], np.int32).reshape(-1, 3)
    if ids[-1] >= len(entries):
        return None
    colors = entries[list(ids)]
    distances = np.abs(colors[:, None] - colors).sum(2) + 999 * np.eye(len(ids), dtype=int)
    if distances.min() < LEAST_DISTANCE:
        return None
    return tuple((int(r), int(g), int(b)) for r, g, b in colors)


def describe_values(found: Survey, classes: ClassFile) -> dict[str, str]:
    """Return a comment per class: its share of pixels and its number of masks."""
    notes = {}
    for number, name in enumerate(classes.names):
        color = np.array(classes.colors[number], np.uint8)
        value = classes.ids[number] if classes.has_ids else int(pack_colors(color))
        notes[name] = describe_value(found, value)
    return notes


def describe_value(found: Survey, value: int) -> str:
    """Return the share of pixels and the number of masks of an id or a packed color."""
    share = found.pixels[value] / max(1, sum(found.pixels.values()))
    return f"{share:.2%} of the pixels, in {found.masks[value]} of {len(found.all_files)} masks"


def smooth_ids_note(found: Survey) -> str:
    """Return a note if many ids are rare, as after interpolation."""
    total = sum(found.pixels.values())
    rare = sum(count < RARE * total for count in found.pixels.values())
    if found.has_colors or len(found.pixels) <= MANY_COLORS or 2 * rare < len(found.pixels):
        return ""
    return (
        f"the masks have {len(found.pixels)} values, of which {rare} cover less than {RARE:.1%} of "
        "the pixels each. If you have fewer classes, the others come from smooth edges: draw masks "
        "without smoothing, and resize them with nearest-neighbor interpolation"
    )


def suggest_size(sizes: Counter[Size]) -> Size:
    """Return a training size with the usual aspect ratio, in multiples of 32.

    >>> suggest_size(Counter({(480, 640): 5, (100, 100): 1}))
    (384, 512)
    """
    heights, widths = (np.repeat([s[i] for s in sizes], list(sizes.values())) for i in (0, 1))
    height, width = float(np.median(heights)), float(np.median(widths))
    scale = min(1.0, LARGEST_SIDE / max(height, width))

    def side(length: float) -> int:
        return max(SMALLEST_SIDE, SIDE_STEP * round(length * scale / SIDE_STEP))

    return side(height), side(width)


def folder_samples(root: Path, found: Survey, classes: ClassFile) -> Iterator[Sample]:
    """Read some images and masks, spread over the folder, without faulty ones."""
    options = FolderOptions(channels=found.most_channels)
    source = make_source(root, "all", classes, found.all_files, options)
    return some_samples(len(source), source.read_file)


def some_samples(count: int, read: Callable[[int], Sample]) -> Iterator[Sample]:
    """Read up to 16 of `count` samples, evenly spread, without those that are faults."""
    shown = min(SHEET_COLUMNS * SHEET_ROWS, count)
    for i in range(shown):
        with contextlib.suppress(DataError):  # listed as a fault
            yield read(i * count // shown)


def draw_sheet(
    samples: Iterable[Sample], names: Sequence[str], colors: Palette
) -> Image.Image | None:
    """Draw images beside their masks, with a legend; None if there are none."""
    tiles = [_sheet_tile(sample, colors) for sample in samples]
    if not tiles:
        return None
    columns = min(SHEET_COLUMNS, len(tiles))
    height, width, _ = tiles[0].shape
    gap = 6
    rows = -(-len(tiles) // columns)
    entries = list(zip(names, colors, strict=True))
    legend = Image.fromarray(draw_legend(entries, columns * (width + gap) - gap))
    top = legend.height + gap
    sheet = Image.new("RGB", (legend.width, top + rows * (height + gap) - gap), "white")
    sheet.paste(legend, (0, 0))
    for i, tile in enumerate(tiles):
        place = ((i % columns) * (width + gap), top + (i // columns) * (height + gap))
        sheet.paste(Image.fromarray(tile), place)
    return sheet


def _sheet_tile(sample: Sample, colors: Palette) -> NDArray[np.uint8]:
    """Draw an image beside its mask, each on white of the size SHEET_TILE."""
    size = fitting((sample.labels.shape[0], sample.labels.shape[1]), SHEET_TILE)
    tile = np.full((SHEET_TILE[0], 2 * SHEET_TILE[1], 3), 255, np.uint8)
    labels = resize(sample.labels, size, nearest=True).astype(np.uint8)
    tile[: size[0], : size[1]] = as_rgb(resize(sample.image, size))
    tile[: size[0], SHEET_TILE[1] : SHEET_TILE[1] + size[1]] = colored(labels, colors)
    return tile


def as_rgb(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Show an image (H, W, C) in RGB: the first three channels, or gray.

    >>> as_rgb(np.zeros((2, 2, 5), np.uint8)).shape, as_rgb(np.zeros((2, 2, 2), np.uint8)).shape
    ((2, 2, 3), (2, 2, 3))
    """
    return image[..., :3] if image.shape[2] >= 3 else image[..., :1].repeat(3, 2)


def has_class_file(root: Path) -> bool:
    """Return whether a folder has a class file already."""
    return find_class_file(root) is not None


def _masks_have_colors(masks: Sequence[Path]) -> bool:
    """Return whether most masks are RGB images with colors."""
    votes = []
    for path in masks[:: max(1, len(masks) // 16)]:
        if path.suffix.lower() == ".npy":
            votes.append(False)
            continue
        try:
            image = open_mask(path)
        except DataError:
            continue
        if image.mode not in ("RGB", "RGBA"):
            votes.append(False)
            continue
        array = np.asarray(image.convert("RGB"))
        votes.append(bool((array != array[..., :1]).any()))
    return 2 * sum(votes) > len(votes)


def _look(files: Files, has_colors: bool) -> _Seen:
    seen = _Seen(files)
    try:
        image = decode(files.image)
        seen.size, seen.channels = image.size, image.channels
        seen.deep_values = _some_values(image)
        if has_colors:
            mask: NDArray = pack_colors(decode_colors(files.mask))
        else:
            mask = decode_ids(files.mask)
        check_same_size(files.mask, mask, files.image, image.array)
        seen.values = np.unique(mask, return_counts=True)
    except DataError as fault:
        seen.fault = fault
    return seen


def _some_values(image: Pixels) -> NDArray | None:
    if image.is_eight_bit:
        return None
    values = image.array.ravel()
    values = values[:: max(1, values.size // SAMPLED_VALUES)].astype(np.float64)
    return values[np.isfinite(values)]


def _channel_faults(found: Survey) -> list[DataError]:
    """List images with another number of channels than most.

    Gray and RGB may be mixed.
    """
    expected = found.most_channels
    if len(found.channels) < 2 or (set(found.channels) <= {1, 3} and expected == 3):
        return []
    faults = []
    for files in found.all_files:
        try:
            own = decode(files.image).channels
        except DataError:
            continue  # listed already
        if own != expected:
            faults.append(DataError(files.image, f"{own} channels, but most have {expected}"))
    return faults


def _names(values: Sequence[int], colors: Sequence[Color] | None) -> tuple[str, ...]:
    """Return names to start from: background, foreground, or class and its number."""
    is_dark = colors[0] == (0, 0, 0) if colors else values[0] == 0
    if len(values) == 2 and is_dark:
        return "background", "foreground"
    numbers = range(len(values)) if colors else values
    names = [f"class {number}" for number in numbers]
    return ("background", *names[1:]) if is_dark else tuple(names)
