"""CamVid in the folder layout of SegNet: train/, trainannot/, val/, valannot/, ...

Labels are ids 0 to 10 of 11 classes; 11 and 255 are void. There are no instances, so contours are
the boundaries between labels. Images are PNG or JPEG; labels are PNG files of the same name.
"""

from collections.abc import Sequence
from pathlib import Path

from .files import Pair, PairedFiles, list_images, native_size
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
    """Open one split of the CamVid folder `root`."""
    pairs, faults = find_pairs(root, split)
    if faults:
        raise faults[0]
    return from_pairs(split, pairs, native_size(pairs[0].image))


def from_pairs(split: str, pairs: Sequence[Pair], native: Size) -> PairedFiles:
    return PairedFiles(f"camvid-{split}", CLASSES, PALETTE, tuple(pairs), CLASS_OF, native)


def find_pairs(root: Path, split: str) -> tuple[list[Pair], list[DataError]]:
    """Pair images with labels, and list an error for each unpaired file."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
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


def splits_in(root: Path) -> list[str]:
    """List the splits that have a folder; empty if this is not CamVid."""
    return [s for s in SPLITS if (root / s).is_dir() or (root / f"{s}annot").is_dir()]
