"""Cityscapes in its official layout: leftImg8bit/<split>/<city>/, gtFine/<split>/<city>/.

Reads *_gtFine_labelIds.png and *_gtFine_instanceIds.png. There are two sets of classes: the
official 19 training classes, and 14 for ClassNet. The paper does not list its 14 classes. Here they
are the 19 with similar classes merged: wall and fence; traffic light and traffic sign; truck, bus
and train; motorcycle and bicycle.
"""

from collections.abc import Sequence
from pathlib import Path

from .files import Pair, PairedFiles, list_images, native_size
from .sample import VOID, DataError, Palette, Size

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

SPLITS = ("train", "val", "test")


def open_cityscapes(root: Path, split: str, classes: int = 19) -> PairedFiles:
    """Open one split of the Cityscapes folder `root`, with 19 or 14 classes."""
    pairs, faults = find_pairs(root, split)
    if faults:
        raise faults[0]
    return from_pairs(split, pairs, native_size(pairs[0].image), classes)


def from_pairs(split: str, pairs: Sequence[Pair], native: Size, classes: int = 19) -> PairedFiles:
    names, palette = (CLASSES, PALETTE) if classes == 19 else (CLASSES_14, PALETTE_14)
    table = class_of_label_id(classes)
    return PairedFiles(f"cityscapes{classes}-{split}", names, palette, tuple(pairs), table, native)


def find_pairs(root: Path, split: str) -> tuple[list[Pair], list[DataError]]:
    """Pair images with labels, and list an error for each unpaired file."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
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


def splits_in(root: Path) -> list[str]:
    """List the splits that have a folder; empty if this is not Cityscapes."""
    trees = (root / "leftImg8bit", root / "gtFine")
    return [s for s in SPLITS if any((tree / s).is_dir() for tree in trees)]
