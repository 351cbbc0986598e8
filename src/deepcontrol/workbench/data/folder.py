"""A user's own segmentation images and masks, in a plain folder.

    root/classes.yaml
    root/train/images/*, root/train/masks/*, root/val/images/*, root/val/masks/*
or  root/images/*, root/masks/*        a hash of the file name selects the validation images

A mask has the name of its image (a suffix as in NAME_mask.png is accepted). Images may have any
size. By default an image is resized to fit into the training size, with its aspect ratio; the rest
is padded with its border pixels, which have no label. With tiles, images keep their resolution and
are cut into overlapping tiles of the training size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .classfile import ClassFile, read_class_file
from .files import fingerprint, list_entries, split_by_name
from .imagefolder import is_imagefolder
from .masks import decode_ids, read_mask
from .pixels import PICTURE_SUFFIXES, decode, resize, size_of, to_eight_bit
from .sample import SPLITS, VOID, DataError, Palette, Sample, Size, Task, check_split, window_starts

IMAGES, INSTANCES = "images", "instances"
MASKS = ("masks", "labels")
MASK_ENDINGS = ("", "_mask", "-mask", "_masks", "_label", "_labels", "_seg", "_gt")

Fit = Literal["resize", "tile"]


@dataclass(frozen=True)
class FolderOptions:
    """How to read a folder of images and masks."""

    val_fraction: float = 0.2
    """Share of the images for validation, if there is no val/."""
    channels: int = 3
    """Channels of the images."""
    tile: Size | None = None
    """Cut images into tiles of this size, at their own resolution; None to resize them."""


class Files(NamedTuple):
    """The files of one sample."""

    image: Path
    mask: Path
    instances: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in self if path is not None)


class Place(NamedTuple):
    """One sample of a source: a file, and with tiles the first row and column."""

    file: int
    top: int = 0
    left: int = 0


@dataclass(frozen=True)
class FolderSource:
    """A segmentation `Source` of images and masks of any size."""

    name: str
    root: Path
    class_file: ClassFile
    files: tuple[Files, ...]
    places: tuple[Place, ...]
    options: FolderOptions = FolderOptions()

    @property
    def task(self) -> Task:
        return "segmentation"

    @property
    def classes(self) -> tuple[str, ...]:
        return self.class_file.names

    @property
    def palette(self) -> Palette:
        return self.class_file.colors

    @property
    def origin(self) -> str:
        return str(self.root.resolve())

    def __len__(self) -> int:
        return len(self.places)

    def fingerprint(self) -> str:
        paths = [path for files in self.files for path in files.paths]
        names = [str(path.relative_to(self.root)) for path in paths]
        return fingerprint(paths, salt=repr((self.class_file, self.options, names)))

    def read(self, index: int, size: Size) -> Sample:
        """Read a sample of exactly `size`, padded with pixels that have no label."""
        place = self.places[index]
        if self.options.tile is None:
            return fit_sample(self.read_file(place.file), size)
        sample = self._cached_file(place.file)
        rows, columns = (slice(a, a + b) for a, b in zip(place[1:], size, strict=True))
        image, labels, segments = sample
        crop = Sample(image[rows, columns], labels[rows, columns], segments[rows, columns])
        return pad_sample(crop, size)

    def read_file(self, index: int) -> Sample:
        """Read the image and mask of a file at their own size."""
        return read_files(self.files[index], self.class_file, self.options.channels)

    def _cached_file(self, index: int) -> Sample:
        return _read_cached(self.files[index], self.class_file, self.options.channels)


@lru_cache(maxsize=8)
def _read_cached(files: Files, class_file: ClassFile, channels: int) -> Sample:
    """Read a file whose tiles are read one after the other."""
    return read_files(files, class_file, channels)


def read_files(files: Files, class_file: ClassFile, channels: int) -> Sample:
    """Read an image with its mask and instances, at their own size.

    Raises:
        DataError: A file is unreadable, a mask has another size or an unknown value, or the image
            has another number of channels.
    """
    image = to_eight_bit(files.image, decode(files.image), channels, class_file.value_range)
    labels = read_mask(files.mask, class_file)
    check_same_size(files.mask, labels, files.image, image)
    if files.instances is None:
        return Sample(image, labels, labels.astype(np.uint16))
    ids = decode_ids(files.instances)
    check_same_size(files.instances, ids, files.image, image)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > 65535:
        raise DataError(files.instances, f"instance ids from {low} to {high}, expected 0 to 65535")
    return Sample(image, labels, ids.astype(np.uint16))


def check_same_size(path: Path, mask: NDArray, image_path: Path, image: NDArray) -> None:
    """Raise DataError if a mask has another size than its image."""
    if mask.shape[:2] == image.shape[:2]:
        return
    (h, w), (own_h, own_w) = image.shape[:2], mask.shape[:2]
    why = ""
    if (own_h, own_w) == (w, h):
        why = (
            ". Is one of them turned by 90 degrees? Images are turned upright as their EXIF "
            "orientation says, and masks must match that"
        )
    raise DataError(path, f"{own_h}x{own_w} for an image of {h}x{w} ({image_path.name}){why}")


def fitting(native: Size, size: Size) -> Size:
    """Return the largest size of `native`'s aspect ratio that fits into `size`.

    >>> fitting((480, 640), (256, 256)), fitting((100, 50), (256, 256))
    ((192, 256), (256, 128))
    """
    scale = min(size[0] / native[0], size[1] / native[1])
    height, width = (max(1, round(side * scale)) for side in native)
    return min(height, size[0]), min(width, size[1])


def fit_image(image: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """Resize an image (H, W, C) to fit into `size`; pad it at the bottom and right."""
    own = fitting((image.shape[0], image.shape[1]), size)
    return _pad(resize(image, own), size)


def fit_sample(sample: Sample, size: Size) -> Sample:
    """Resize a sample to fit into `size`, and pad it at the bottom and right."""
    own = fitting((sample.image.shape[0], sample.image.shape[1]), size)
    image = resize(sample.image, own)
    labels, segments = (resize(part, own, nearest=True) for part in sample[1:])
    return pad_sample(Sample(image, labels, segments), size)


def pad_sample(sample: Sample, size: Size) -> Sample:
    """Pad a sample at bottom and right: the image with its border, labels with VOID."""
    height, width = sample.labels.shape
    labels = np.full(size, VOID, np.uint8)
    labels[:height, :width] = sample.labels
    segments = np.zeros(size, np.uint16)
    segments[:height, :width] = sample.segments
    return Sample(_pad(sample.image, size), labels, segments)


def _pad(image: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    height, width = image.shape[:2]
    return np.pad(image, ((0, size[0] - height), (0, size[1] - width), (0, 0)), mode="edge")


# Layout


def open_folder(
    root: Path, split: str, options: FolderOptions | None = None, limit: int | None = None
) -> FolderSource:
    """Open one split of a folder of images and masks.

    Args:
        root: Folder with classes.yaml (or classes.txt) and images.
        split: "train" or "val".
        options: How to read the files.
        limit: Use only the first `limit` images.

    Raises:
        DataError: The folder has another layout, a file has no counterpart, or a split is empty.
        ValueError: The split is unknown, or it has fewer images than `limit`.
    """
    options = options or FolderOptions()
    check_split(split)
    found, faults = find_files(root, options.val_fraction)
    if faults:
        raise more_faults(faults)
    class_file = read_class_file(root)
    files = found[split]
    if limit is not None:
        if limit > len(files):
            raise ValueError(f"{root} has {len(files)} images in {split}, fewer than {limit}")
        files = files[:limit]
    return make_source(root, split, class_file, files, options)


def make_source(
    root: Path, split: str, class_file: ClassFile, files: Sequence[Files], options: FolderOptions
) -> FolderSource:
    """Return the source of these files, cut into tiles if the options say so."""
    places = find_places(files, options)
    return FolderSource(f"folder-{split}", root, class_file, tuple(files), places, options)


def find_places(files: Sequence[Files], options: FolderOptions) -> tuple[Place, ...]:
    """Return the samples of these files: one per image, or its tiles."""
    if options.tile is None:
        return tuple(Place(i) for i in range(len(files)))
    return tuple(
        Place(i, top, left)
        for i, own in enumerate(files)
        for top, left in tile_corners(size_of(own.image), options.tile)
    )


def tile_corners(image: tuple[int, int], tile: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the first row and column of evenly spaced tiles that cover an image.

    >>> tile_corners((256, 600), (256, 256))
    [(0, 0), (0, 172), (0, 344)]
    """
    rows, columns = (window_starts(a, b, stride=b) for a, b in zip(image, tile, strict=True))
    return [(y, x) for y in rows for x in columns]


def common_channels(images: Sequence[Path]) -> int:
    """Return the channels of the first readable image; 3 if gray, and others are RGB."""
    found = []
    for path in images:
        try:
            found.append(decode(path).channels)
        except DataError:
            continue  # reported when the image is read
        if found[-1] != 1:
            break
    return found[-1] if found else FolderOptions().channels


def is_folder(root: Path) -> bool:
    """Return whether a folder has images and masks, at its top or in train/ or val/."""
    return any(
        (folder / IMAGES).is_dir() and _mask_folder(folder) is not None
        for folder in (root, *(root / split for split in SPLITS))
    )


def find_files(
    root: Path, val_fraction: float = 0.2
) -> tuple[dict[str, list[Files]], list[DataError]]:
    """Pair images and masks of both splits; list an error for each unpaired file."""
    if not root.is_dir():
        reason = "is a file, expected a folder" if root.exists() else "no such folder"
        return {split: [] for split in SPLITS}, [DataError(root, reason)]
    if not is_folder(root):
        entries = sorted(p.name + "/" * p.is_dir() for p in root.iterdir())
        has = ", ".join(entries[:8]) + (", ..." if len(entries) > 8 else "") or "no files"
        hint = ". For a folder per class use --data imagefolder" if is_imagefolder(root) else ""
        return {split: [] for split in SPLITS}, [
            DataError(
                root,
                f"has {has}, expected images/ and masks/, or train/images/, train/masks/, "
                f"val/images/ and val/masks/{hint}",
            )
        ]
    if (root / IMAGES).is_dir():
        files, faults = pair_files(root)
        parts = split_by_hash(files, val_fraction)
    elif (root / "val" / IMAGES).is_dir():
        train, faults = pair_files(root / "train")
        val, val_faults = pair_files(root / "val")
        parts, faults = {"train": train, "val": val}, faults + val_faults
    else:
        files, faults = pair_files(root / "train")
        parts = split_by_hash(files, val_fraction)
    if not faults:
        faults = [_empty_split(root, split, parts) for split in SPLITS
                  if not parts[split]]  # fmt: skip
    return parts, faults


def pair_files(folder: Path) -> tuple[list[Files], list[DataError]]:
    """Pair images/ with masks/ and instances/ of one folder, by name."""
    masks_folder = _mask_folder(folder)
    if masks_folder is None:
        return [], [DataError(folder, f"has no {MASKS[0]}/ with a mask for each image")]
    images, faults = _list_pictures(folder / IMAGES)
    masks, mask_faults = _list_pictures(masks_folder)
    faults += mask_faults
    by_stem = {path.stem: path for path in masks}
    instances = {}
    if (folder / INSTANCES).is_dir():
        found, own = _list_pictures(folder / INSTANCES)
        instances, faults = {path.stem: path for path in found}, faults + own
    files: list[Files] = []
    seen: dict[str, Path] = {}
    for image in images:
        other = seen.setdefault(image.stem, image)
        stem = next((image.stem + e for e in MASK_ENDINGS if image.stem + e in by_stem), None)
        if other is not image:
            reason = f"has the same name as {other.name}, so one mask would be for both"
            faults.append(DataError(image, reason))
        elif stem is None:
            faults.append(DataError(image, f"has no mask {masks_folder.name}/{image.stem}.png"))
        elif instances and image.stem not in instances:
            faults.append(DataError(image, f"has no file {INSTANCES}/{image.stem}.png"))
        else:
            files.append(Files(image, by_stem.pop(stem), instances.get(image.stem)))
    unused = [path for path in by_stem.values() if path.stem not in seen]
    faults += [DataError(path, f"mask without an image in {folder / IMAGES}") for path in unused]
    return files, faults


def split_by_hash(files: Sequence[Files], fraction: float) -> dict[str, list[Files]]:
    """Split files by a hash of the image's name."""
    return split_by_name(files, lambda own: own.image.stem, fraction)


def more_faults(faults: Sequence[DataError]) -> DataError:
    """Return the first of several errors, with their number and how to list them."""
    first = faults[0]
    if len(faults) == 1:
        return first
    advice = "`deepcontrol data check` lists them all"
    return DataError(first.path, f"{first.reason} (the first of {len(faults)} faults; {advice})")


def _empty_split(root: Path, split: str, parts: dict[str, list[Files]]) -> DataError:
    if (root / "val" / IMAGES).is_dir():
        return DataError(root / split / IMAGES, "no images in this folder")
    count = sum(map(len, parts.values()))
    return DataError(root, f"{count} image, expected at least one for train and one for val")


def _mask_folder(folder: Path) -> Path | None:
    return next((folder / name for name in MASKS if (folder / name).is_dir()), None)


def _list_pictures(folder: Path) -> tuple[list[Path], list[DataError]]:
    """List the pictures of a folder by name, and an error for each other file."""
    if not folder.is_dir():
        return [], [DataError(folder, "no such folder")]
    entries = list_entries(folder)
    pictures = [p for p in entries if p.is_file() and p.suffix.lower() in PICTURE_SUFFIXES]
    known = ", ".join(PICTURE_SUFFIXES)
    faults = [
        DataError(p, "a folder: images must not be in subfolders" if p.is_dir() else
                  f"not an image ({known})")
        for p in entries if p not in set(pictures)
    ]  # fmt: skip
    return pictures, faults if entries else [DataError(folder, "this folder is empty")]
