"""Road scenes with a class per pixel: CamVid, Cityscapes, and generated streets.

CamVid has the folder layout of SegNet: train/, trainannot/, val/, valannot/, ... Labels are ids 0
to 10 of 11 classes; 11 and 255 are void. There are no instances, so contours are the boundaries
between labels. Images are PNG or JPEG; labels are PNG files of the same name.

Cityscapes has its official layout: leftImg8bit/<split>/<city>/, gtFine/<split>/<city>/ with
*_gtFine_labelIds.png and *_gtFine_instanceIds.png. There are two sets of classes: the official 19
training classes, and 14 for ClassNet. The paper does not list its 14 classes. Here they are the 19
with similar classes merged: wall and fence; traffic light and traffic sign; truck, bus and train;
motorcycle and bicycle.

Streets are procedural scenes in the classes of Cityscapes, with separate seeds for training and
validation.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streets import render

from .files import fingerprint, list_images
from .masks import UNKNOWN
from .pixels import native_size, read_ids, read_image
from .sample import VOID, DataError, Palette, Sample, Size, Task, check_split, covering

SPLITS = ("train", "val", "test")

CAMVID_CLASSES = (
    "sky", "building", "pole", "road", "sidewalk", "tree",
    "sign", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
CAMVID_PALETTE: Palette = (
    (128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0),
    (192, 128, 128), (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192),
)  # fmt: skip
CAMVID_IDS = (
    *((i, i) for i in range(len(CAMVID_CLASSES))),
    (len(CAMVID_CLASSES), VOID),
    (255, VOID),
)

# (name, color, id in the labelIds files), in the order of the official training ids
_OFFICIAL = (
    ("road", (128, 64, 128), 7),
    ("sidewalk", (244, 35, 232), 8),
    ("building", (70, 70, 70), 11),
    ("wall", (102, 102, 156), 12),
    ("fence", (190, 153, 153), 13),
    ("pole", (153, 153, 153), 17),
    ("traffic light", (250, 170, 30), 19),
    ("traffic sign", (220, 220, 0), 20),
    ("vegetation", (107, 142, 35), 21),
    ("terrain", (152, 251, 152), 22),
    ("sky", (70, 130, 180), 23),
    ("person", (220, 20, 60), 24),
    ("rider", (255, 0, 0), 25),
    ("car", (0, 0, 142), 26),
    ("truck", (0, 0, 70), 27),
    ("bus", (0, 60, 100), 28),
    ("train", (0, 80, 100), 31),
    ("motorcycle", (0, 0, 230), 32),
    ("bicycle", (119, 11, 32), 33),
)
CLASSES = tuple(name for name, _, _ in _OFFICIAL)
PALETTE: Palette = tuple(color for _, color, _ in _OFFICIAL)
LABEL_IDS = 34  # 0 to 33; ids without a training class are void

_MERGED = {
    "fence": "wall",
    "traffic sign": "traffic light",
    "bus": "truck",
    "train": "truck",
    "bicycle": "motorcycle",
}
_NEW_NAMES = {
    "wall": "barrier",
    "traffic light": "signal or sign",
    "truck": "large vehicle",
    "motorcycle": "two-wheeler",
}
_KEPT = tuple(name for name in CLASSES if name not in _MERGED)
CLASSES_14 = tuple(_NEW_NAMES.get(name, name) for name in _KEPT)
PALETTE_14: Palette = tuple(PALETTE[CLASSES.index(name)] for name in _KEPT)

STREETS_VERSION = 1  # increase it when the golden digests of tests/streets change
STREETS_COUNTS = {"train": 1000, "val": 200}
STREETS_SEEDS = {"train": 1, "val": 2}
_FIRST_INSTANCE = 1000  # segment ids below are class ids, segment ids above are instances


@dataclass(frozen=True)
class Pair:
    """The files of one sample."""

    image: Path
    labels: Path
    instances: Path | None = None

    @property
    def maps(self) -> tuple[Path, ...]:
        return (self.labels,) if self.instances is None else (self.labels, self.instances)


@dataclass(frozen=True)
class PairedFiles:
    """A `Source` of image and label files. A table maps their ids to classes."""

    name: str
    classes: tuple[str, ...]
    palette: Palette
    pairs: tuple[Pair, ...]
    class_of: tuple[tuple[int, int], ...]  # (id in the file, class id or VOID)
    native: Size  # size of every image

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def task(self) -> Task:
        return "segmentation"

    @property
    def origin(self) -> str:
        return str(self.pairs[0].image.parent.resolve()) if self.pairs else ""

    def fingerprint(self) -> str:
        files = [path for pair in self.pairs for path in (pair.image, *pair.maps)]
        return fingerprint(files, salt=repr(self.class_of))

    def read(self, index: int, size: Size) -> Sample:
        pair = self.pairs[index]
        own = native_size(pair.image, *pair.maps)
        if own != self.native:
            (h, w), (own_h, own_w) = self.native, own
            raise DataError(pair.image, f"size {own_h}x{own_w}, but other images have {h}x{w}")
        size = covering(own, size)
        image = read_image(pair.image, size)
        labels = self._to_classes(pair.labels, read_ids(pair.labels, size))
        if pair.instances is None:
            return Sample(image, labels, labels.astype(np.uint16))
        ids = read_ids(pair.instances, size)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > np.iinfo(np.uint16).max:
            raise DataError(
                pair.instances, f"instance ids from {low} to {high}, expected 0 to 65535"
            )
        return Sample(image, labels, ids.astype(np.uint16))

    def _to_classes(self, path: Path, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        table = np.full(256, UNKNOWN, np.uint8)
        for file_id, class_id in self.class_of:
            table[file_id] = class_id
        labels = table[ids.clip(0, 255)]
        bad = (labels == UNKNOWN) | (ids < 0) | (ids > 255)
        if bad.any():
            known = sorted(i for i, _ in self.class_of if i != VOID)
            worst = ids[bad].max()
            raise DataError(
                path,
                f"class id {worst} in {(ids == worst).sum()} pixels, "
                f"expected {known[0]} to {known[-1]}, or {VOID} for void",
            )
        return labels


class Layout(NamedTuple):
    """The functions and classes of a dataset of paired files."""

    classes: tuple[str, ...]
    splits_in: Callable[[Path], list[str]]
    find_pairs: Callable[[Path, str], tuple[list[Pair], list[DataError]]]
    from_pairs: Callable[[str, Sequence[Pair], Size], PairedFiles]


# CamVid


def open_camvid(root: Path, split: str) -> PairedFiles:
    """Open one split of the CamVid folder `root`."""
    pairs, faults = camvid_pairs(root, split)
    if faults:
        raise faults[0]
    return camvid_source(split, pairs, native_size(pairs[0].image))


def camvid_source(split: str, pairs: Sequence[Pair], native: Size) -> PairedFiles:
    return PairedFiles(
        f"camvid-{split}", CAMVID_CLASSES, CAMVID_PALETTE, tuple(pairs), CAMVID_IDS, native
    )


def camvid_pairs(root: Path, split: str) -> tuple[list[Pair], list[DataError]]:
    """Pair images with labels, and list an error for each unpaired file."""
    check_split(split, SPLITS)
    annotations = root / f"{split}annot"
    images, faults = list_images(root / split)
    labels, label_faults = list_images(annotations)
    faults += label_faults
    of_stem = {path.stem: path for path in labels}
    pairs, used = [], set()
    for image in images:
        if image.stem in used:
            faults.append(DataError(image, "another image has the same name"))
        elif image.stem in of_stem:
            pairs.append(Pair(image, of_stem[image.stem]))
        else:
            expected = f"{annotations.name}/{image.stem}.png"
            faults.append(DataError(image, f"has no label, expected {expected}"))
        used.add(image.stem)
    faults += [
        DataError(path, f"label without an image in {split}/")
        for stem, path in of_stem.items()
        if stem not in used
    ]
    return pairs, faults


def camvid_splits(root: Path) -> list[str]:
    """List the splits that have a folder; empty if this is not CamVid."""
    return [s for s in SPLITS if (root / s).is_dir() or (root / f"{s}annot").is_dir()]


# Cityscapes


def open_cityscapes(root: Path, split: str, classes: int = 19) -> PairedFiles:
    """Open one split of the Cityscapes folder `root`, with 19 or 14 classes."""
    pairs, faults = cityscapes_pairs(root, split)
    if faults:
        raise faults[0]
    return cityscapes_source(split, pairs, native_size(pairs[0].image), classes)


def cityscapes_source(
    split: str, pairs: Sequence[Pair], native: Size, classes: int = 19
) -> PairedFiles:
    names, palette = (CLASSES, PALETTE) if classes == 19 else (CLASSES_14, PALETTE_14)
    table = class_of_label_id(classes)
    return PairedFiles(f"cityscapes{classes}-{split}", names, palette, tuple(pairs), table, native)


def cityscapes_pairs(root: Path, split: str) -> tuple[list[Pair], list[DataError]]:
    """Pair images with labels, and list an error for each unpaired file."""
    check_split(split, SPLITS)
    cities, faults = _cities(root / "leftImg8bit" / split)
    pairs: list[Pair] = []
    for city in cities:
        images, city_faults = list_images(city)
        faults += city_faults
        truth = root / "gtFine" / split / city.name
        for image in images:
            stem = image.stem.removesuffix("_leftImg8bit")
            labels = truth / f"{stem}_gtFine_labelIds.png"
            instances = truth / f"{stem}_gtFine_instanceIds.png"
            missing = [path for path in (labels, instances) if not path.is_file()]
            faults += [
                DataError(image, f"has no label, expected {path.relative_to(root)}")
                for path in missing
            ]
            if not missing:
                pairs.append(Pair(image, labels, instances))
    found = {pair.labels for pair in pairs}
    faults += [
        DataError(labels, f"label without a complete image in leftImg8bit/{split}/")
        for labels in sorted((root / "gtFine" / split).glob("*/*_gtFine_labelIds.png"))
        if labels not in found
    ]
    return pairs, faults


def _cities(folder: Path) -> tuple[list[Path], list[DataError]]:
    if not folder.is_dir():
        return [], [DataError(folder, "no such folder")]
    entries = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    cities = [p for p in entries if p.is_dir()]
    faults = [DataError(p, "not in the folder of a city") for p in entries if not p.is_dir()]
    return cities, faults if entries else [DataError(folder, "no city folders in this folder")]


def class_of_label_id(classes: int) -> tuple[tuple[int, int], ...]:
    """Return (label id, class id or VOID) for every label id; -1 is stored as 255."""
    if classes not in (19, 14):
        raise ValueError(f"classes must be 19 or 14, got {classes}")
    table = dict.fromkeys([*range(LABEL_IDS), 255], VOID)
    for train_id, (name, _, label_id) in enumerate(_OFFICIAL):
        table[label_id] = train_id if classes == 19 else _KEPT.index(_MERGED.get(name, name))
    return tuple(table.items())


def cityscapes_splits(root: Path) -> list[str]:
    """List the splits that have a folder; empty if this is not Cityscapes."""
    trees = (root / "leftImg8bit", root / "gtFine")
    return [s for s in SPLITS if any((tree / s).is_dir() for tree in trees)]


# Streets


@dataclass(frozen=True)
class Streets:
    """The first `count` scenes of a seed, in the 19 classes of Cityscapes."""

    split: str
    count: int
    seed: int

    classes: tuple[str, ...] = CLASSES
    palette: Palette = PALETTE

    @property
    def task(self) -> Task:
        return "segmentation"

    @property
    def name(self) -> str:
        return f"streets-{self.split}"

    @property
    def origin(self) -> str:
        return f"seed {self.seed}"

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> str:
        """Hash seed, version and two scenes (in case the version was not increased)."""
        digest = hashlib.sha256(f"{STREETS_VERSION} {self.seed}".encode())
        for index in range(2):
            for part in self.read(index, (64, 128)):
                digest.update(part.tobytes())
        return digest.hexdigest()[:16]

    def read(self, index: int, size: Size) -> Sample:
        """Render scene `index`."""
        scene = render(self.seed, index, *size)
        segments = np.where(scene.instances > 0, scene.instances + _FIRST_INSTANCE, scene.labels)
        return Sample(scene.image, scene.labels, segments.astype(np.uint16))


def open_streets(split: str, count: int | None = None) -> Streets:
    """Open the training or validation scenes.

    Args:
        split: "train" or "val".
        count: Number of scenes. Default: 1000 for training, 200 for validation.
    """
    check_split(split, STREETS_SEEDS)
    return Streets(split, STREETS_COUNTS[split] if count is None else count, STREETS_SEEDS[split])


LAYOUTS = {
    "cityscapes": Layout(CLASSES, cityscapes_splits, cityscapes_pairs, cityscapes_source),
    "camvid": Layout(CAMVID_CLASSES, camvid_splits, camvid_pairs, camvid_source),
}
