"""CamVid in the layout that SegNet made common: train/, trainannot/, val/, valannot/, ...

Labels are 11 classes as ids 0 to 10; 11 and 255 are void. There are no instances: contours are
the boundaries between labels. Images may be PNG or JPEG; labels are PNG of the same name.
"""

from collections.abc import Sequence
from pathlib import Path

from .files import images_in, native_size
from .pairs import Pair, PairedFiles
from .sample import VOID, DataError, Palette, Size

CLASSES = (
    "sky", "building", "pole", "road", "sidewalk", "tree",
    "sign", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
PALETTE: Palette = (
    (128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0),
    (192, 128, 128), (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192),
)  # fmt: skip
SPLITS = ("train", "val", "test")
CLASS_OF = (*((i, i) for i in range(len(CLASSES))), (len(CLASSES), VOID), (255, VOID))


def open_camvid(root: Path, split: str) -> PairedFiles:
    """One split of the CamVid folder `root`."""
    pairs, faults = find_pairs(root, split)
    if faults:
        raise faults[0]
    return from_pairs(split, pairs, native_size(pairs[0].image))


def from_pairs(split: str, pairs: Sequence[Pair], native: Size) -> PairedFiles:
    return PairedFiles(f"camvid-{split}", CLASSES, PALETTE, tuple(pairs), CLASS_OF, native)


def find_pairs(root: Path, split: str) -> tuple[list[Pair], list[DataError]]:
    """The images of a split that have labels, and a fault for each that stands alone."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    annotations = root / f"{split}annot"
    pairs = [Pair(image, annotations / f"{image.stem}.png") for image in images_in(root / split)]
    faults = [
        DataError(pair.image, f"has no label: expected {pair.labels.relative_to(root)}")
        for pair in pairs
        if not pair.labels.is_file()
    ]
    expected = {pair.labels for pair in pairs}
    faults += [
        DataError(labels, f"labels without an image in {split}/")
        for labels in sorted(annotations.glob("*.png"))
        if labels not in expected
    ]
    return [pair for pair in pairs if pair.labels.is_file()], faults


def is_camvid(root: Path) -> bool:
    return any((root / f"{split}annot").is_dir() for split in SPLITS)
