"""Images with polygons or RLE masks in COCO's JSON, as semantic segmentation.

    root/annotations/*train*.json, root/annotations/*val*.json     images in root/train2017/, ...
or  root/train/_annotations.coco.json, root/valid/_annotations.coco.json     images beside them
or  one of: root/annotations.json, root/_annotations.coco.json, root/annotations/*.json

In the last layout a hash of the file name selects the validation images. The classes are the
categories, after a background class for pixels outside of all objects. Smaller objects lie above
larger ones. The objects are the instances.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .classfile import ClassFile
from .files import fingerprint, split_by_name
from .folder import Files, FolderOptions, FolderSource, find_places
from .pixels import decode, to_eight_bit
from .sample import DataError, Sample, check_split, distinct_colors

ALL, EXPORTED = "annotations.json", "_annotations.coco.json"
BACKGROUND = "background"
MAX_INSTANCES = 65535
RECENT = 8  # images whose tiles are read one after the other


@dataclass(frozen=True)
class CocoSource(FolderSource):
    """A segmentation `Source` of images with COCO annotations."""

    annotations: Any = field(default=None, compare=False, repr=False)  # pycocotools' COCO
    images: tuple[Mapping[str, Any], ...] = field(default=(), compare=False, repr=False)
    class_of: Mapping[int, int] = field(default_factory=dict, compare=False, repr=False)
    _recent: dict[int, Sample] = field(default_factory=dict, compare=False, repr=False)

    def fingerprint(self) -> str:
        names = [str(files.image.relative_to(self.root)) for files in self.files]
        paths = [*(files.image for files in self.files), self.files[0].mask]
        return fingerprint(paths, salt=repr((self.class_file, self.options, names)))

    def read_file(self, index: int) -> Sample:
        path, image = self.files[index].image, self.images[index]
        pixels = to_eight_bit(path, decode(path), self.options.channels, None)
        size: tuple[Any, Any] = (image.get("height"), image.get("width"))
        if pixels.shape[:2] != size:
            (h, w), (own_h, own_w) = size, pixels.shape[:2]
            turned = ". Is it turned by its EXIF orientation?" if (own_w, own_h) == size else ""
            raise DataError(
                path, f"{own_h}x{own_w}, but {self.files[index].mask.name} says {h}x{w}{turned}"
            )
        labels, segments = np.zeros(size, np.uint8), np.zeros(size, np.uint16)
        objects = self.annotations.imgToAnns.get(image["id"], [])
        if len(objects) > MAX_INSTANCES:
            raise DataError(path, f"{len(objects)} objects, expected at most {MAX_INSTANCES}")
        masks = [(self._mask(path, item), self._class(path, item)) for item in objects]
        masks.sort(key=lambda own: -int(own[0].sum()))  # smaller objects on top
        for number, (mask, label) in enumerate(masks, 1):
            labels[mask], segments[mask] = label, number
        return Sample(pixels, labels, segments)

    def _cached_file(self, index: int) -> Sample:
        found = self._recent.get(index)
        if found is None:
            found = self._recent[index] = self.read_file(index)
            for old in list(self._recent)[:-RECENT]:
                self._recent.pop(old, None)
        return found

    def _class(self, path: Path, item: Mapping[str, Any]) -> int:
        category: Any = item.get("category_id")
        if category not in self.class_of:
            known = ", ".join(map(str, self.class_of))
            raise DataError(
                path, f"annotation {item.get('id')} has category {category}, expected {known}"
            )
        return self.class_of[category]

    def _mask(self, path: Path, item: Mapping[str, Any]) -> np.ndarray:
        if not item.get("segmentation"):
            raise DataError(
                path,
                f"annotation {item.get('id')} has no segmentation, expected polygons or RLE: a box "
                "alone does not say which pixels belong to the object",
            )
        try:
            return self.annotations.annToMask(item).astype(bool)
        except Exception as error:  # pycocotools raises anything
            raise DataError(
                path, f"the segmentation of annotation {item.get('id')} is invalid ({error})"
            ) from error


def open_coco(
    root: Path, split: str, options: FolderOptions | None = None, limit: int | None = None
) -> CocoSource:
    """Open one split of a dataset with COCO annotations.

    Args:
        root: Folder of the dataset.
        split: "train" or "val".
        options: How to read the images.
        limit: Use only the first `limit` images.

    Raises:
        DataError: The folder has another layout, a JSON file is invalid, or an image is missing.
        ValueError: pycocotools is not installed, the split is unknown, or it has fewer images.
    """
    options = options or FolderOptions()
    check_split(split)
    found = find_annotations(root)
    path = found[split]
    annotations = load_annotations(path)
    names, class_of = read_categories(path, annotations)
    if "train" in found and found["train"] != path:
        others = read_categories(found["train"], load_annotations(found["train"]))
        if others != (names, class_of):
            raise DataError(path, f"has other categories than {found['train']}")
    by_id = annotations.imgs
    ids = sorted(by_id, key=lambda key: str(by_id[key].get("file_name")))
    if found["train"] == found["val"]:
        ids = split_by_name(
            ids, lambda key: Path(str(by_id[key].get("file_name"))).stem, options.val_fraction
        )[split]
    images = [by_id[key] for key in ids]
    if not images:
        raise DataError(path, f"has no images for {split}")
    if limit is not None:
        if limit > len(images):
            raise ValueError(f"{path} has {len(images)} images for {split}, fewer than {limit}")
        images = images[:limit]
    folder = find_image_folder(root, path, split, images[0])
    files = tuple(Files(folder / str(image["file_name"]), path) for image in images)
    missing = [own.image for own in files if not own.image.is_file()]
    if missing:
        more = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise DataError(missing[0], f"no such file, but {path.name} lists it{more}")
    colors = distinct_colors(len(names) - 1)
    class_file = ClassFile(names, tuple(range(len(names))), ((0, 0, 0), *colors))
    places = find_places(files, options)
    return CocoSource(
        f"coco-{split}", root, class_file, files, places, options, annotations, tuple(images),
        class_of,
    )  # fmt: skip


# Layout


def is_coco(root: Path) -> bool:
    """Return whether a folder has COCO annotations."""
    files = (ALL, EXPORTED, f"train/{EXPORTED}")
    return any((root / name).is_file() for name in files) or any(root.glob("annotations/*.json"))


def find_annotations(root: Path) -> dict[str, Path]:
    """Return the JSON file of each split, which may be one file for both.

    Raises:
        DataError: There is none, or several are possible.
    """
    if not root.is_dir():
        raise DataError(root, "is a file, expected a folder" if root.exists() else "no such folder")
    found: dict[str, Path] = {}
    for split, folders in (("train", ("train",)), ("val", ("val", "valid", "validation"))):
        beside = [root / name / EXPORTED for name in folders]
        listed = sorted((root / "annotations").glob(f"*{split}*.json"))
        instances = [path for path in listed if path.name.startswith("instances")]
        found |= _only(split, [p for p in beside if p.is_file()] or instances or listed)
    if len(found) == 2:
        return found
    single = [root / ALL, root / EXPORTED]
    single = [path for path in single if path.is_file()]
    single = single or list(found.values()) or sorted((root / "annotations").glob("*.json"))
    if not single:
        raise DataError(
            root,
            "has no COCO annotations: expected annotations/*train*.json and annotations/*val*.json,"
            f" train/{EXPORTED} and valid/{EXPORTED}, or {ALL}",
        )
    (path,) = _only("both", single).values()
    return {"train": path, "val": path}


def _only(split: str, paths: Sequence[Path]) -> dict[str, Path]:
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise DataError(paths[0].parent, f"has {names}, expected one JSON file per split")
    return {split: paths[0]} if paths else {}


def load_annotations(path: Path) -> Any:
    """Read a JSON file with pycocotools; raise DataError if it is invalid."""
    try:
        from pycocotools.coco import COCO
    except ModuleNotFoundError:
        raise ValueError(
            "COCO annotations need pycocotools, which is not installed: in a clone of the "
            'repository, run: pip install ".[coco]"'
        ) from None
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
            return COCO(str(path))
    except Exception as error:  # pycocotools raises anything on other content
        raise DataError(
            path, f"is not COCO JSON ({type(error).__name__}: {error}): expected images, "
            "annotations and categories"
        ) from error  # fmt: skip


def read_categories(path: Path, annotations: Any) -> tuple[tuple[str, ...], dict[int, int]]:
    """Return the names of the classes, and the class of each category id.

    A category named "background" is the class of pixels outside of all objects.
    """
    names, class_of = [BACKGROUND], {}
    for category in sorted(annotations.cats):
        name = str(annotations.cats[category].get("name", category))
        if name.lower() == BACKGROUND:
            class_of[category] = 0
            continue
        class_of[category] = len(names)
        names.append(name)
    if not 1 < len(names) <= 255:
        raise DataError(path, f"{len(names) - 1} categories, expected 1 to 254")
    return tuple(names), class_of


def find_image_folder(root: Path, path: Path, split: str, image: Mapping[str, Any]) -> Path:
    """Return the folder that holds the first image of a split.

    Raises:
        DataError: No folder has it.
    """
    name = str(image.get("file_name"))
    stem = path.stem.removeprefix("instances_")
    folders = [path.parent, root / stem, root / "images" / stem, root / split,
               root / "images" / split, root / "images", root]  # fmt: skip
    found = next((folder for folder in folders if (folder / name).is_file()), None)
    if found is None:
        tried = ", ".join(str(folder) for folder in dict.fromkeys(folders))
        raise DataError(path, f"lists the image {name}, which is in none of {tried}")
    return found
