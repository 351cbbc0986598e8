"""The layout of nnU-Net's raw datasets: dataset.json and the files of each case.

    root/dataset.json                 channel_names, labels, file_ending
    root/imagesTr/CASE_0000.nii.gz    one file per channel: CASE_0001.nii.gz, ...
    root/labelsTr/CASE.nii.gz

Regions of several labels, and the layout of nnU-Net 1, are not supported.
"""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..folders.storage import read_json
from .nifti import read_nifti
from .sample import VOID, DataError, Progress

DATASET_FILE, IMAGES, LABELS = "dataset.json", "imagesTr", "labelsTr"
ENDINGS = (".nii.gz", ".nii")


class Layout(NamedTuple):
    """The content of dataset.json."""

    channels: tuple[str, ...]
    classes: tuple[str, ...]
    ignored: int | None  # label of voxels without a class
    ending: str


@dataclass(frozen=True)
class Case:
    """The files of one volume."""

    name: str
    images: tuple[Path, ...]  # one per channel
    labels: Path


def is_nnunet(root: Path) -> bool:
    """Return whether a folder has images and labels in nnU-Net's raw layout."""
    return (root / LABELS).is_dir() and (
        (root / DATASET_FILE).is_file() or (root / IMAGES).is_dir()
    )


def propose_layout(root: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Return a dataset.json for imagesTr/ and labelsTr/, with names to replace.

    Raises:
        DataError: There are no files, a file is damaged, or the labels are not 0, 1, ..., n.
    """
    files = sorted(p for p in (root / LABELS).iterdir() if p.name.endswith(ENDINGS))
    if not files:
        raise DataError(root / LABELS, f"has no NIfTI files ({', '.join(ENDINGS)})")
    ending = next(ending for ending in ENDINGS if files[0].name.endswith(ending))
    case = files[0].name.removesuffix(ending)
    channels = len(list((root / IMAGES).glob(f"{glob.escape(case)}_[0-9][0-9][0-9][0-9]{ending}")))
    if not channels:
        raise DataError(
            root / IMAGES, f"has no file {case}_0000{ending}, but {files[0]} has labels"
        )
    values: set[float] = set()
    for done, path in enumerate(files, 1):
        values.update(np.unique(read_nifti(path)).tolist())
        if progress is not None:
            progress(done, len(files))
    if sorted(values) != list(range(len(values))) or not 1 < len(values) <= VOID:
        shown = ", ".join(f"{value:g}" for value in sorted(values)[:8])
        raise DataError(
            root / LABELS,
            f"the labels have the values {shown}{', ...' * (len(values) > 8)}, expected 0 "
            "(background), 1, 2, ... without gaps: renumber them",
        )
    names = ["background", *(f"class {number}" for number in range(1, len(values)))]
    return {
        "channel_names": {str(i): f"channel {i}" for i in range(channels)},
        "labels": {name: number for number, name in enumerate(names)},
        "numTraining": len(files),
        "file_ending": ending,
    }


def read_layout(root: Path) -> Layout:
    """Read dataset.json; raise DataError if it is missing or not nnU-Net's version 2."""
    path = root / DATASET_FILE
    if not path.is_file():
        raise DataError(
            root, f"has no {DATASET_FILE}: expected nnU-Net's raw layout ({IMAGES}/, {LABELS}/)"
        )
    try:
        content = read_json(path)
    except ValueError as error:
        raise DataError(path, f"is not a JSON object ({error})") from None
    channels, labels = content.get("channel_names"), content.get("labels")
    if not isinstance(channels, dict) or not channels:
        raise DataError(
            path,
            f"channel_names is {channels!r}, expected an object such as {{'0': 'CT'}}"
            + (" (`modality` is of nnU-Net 1: rename it)" if "modality" in content else ""),
        )
    if not isinstance(labels, dict) or not all(type(v) is int for v in labels.values()):
        raise DataError(
            path,
            f"labels are {labels!r}, expected one id per name, such as {{'background': 0, "
            "'liver': 1}} (regions of several ids are not supported)",
        )
    ignored = labels.get("ignore")
    names = {value: str(name) for name, value in labels.items() if name != "ignore"}
    if sorted(names) != list(range(len(names))) or not 1 < len(names) <= VOID:
        raise DataError(path, f"label ids {sorted(names)}, expected 0, 1, ... without gaps")
    return Layout(
        tuple(str(channels[key]) for key in sorted(channels, key=int)),
        tuple(names[i] for i in range(len(names))),
        ignored,
        str(content.get("file_ending", ".nii.gz")),
    )


def find_cases(root: Path, layout: Layout) -> list[Case]:
    """List the cases of labelsTr/; raise DataError if one lacks a channel."""
    folder = root / LABELS
    if not folder.is_dir():
        raise DataError(folder, "no such folder, expected one file of labels per case")
    cases = []
    for labels in sorted(folder.glob(f"*{layout.ending}")):
        name = labels.name.removesuffix(layout.ending)
        images = tuple(
            root / IMAGES / f"{name}_{channel:04}{layout.ending}"
            for channel in range(len(layout.channels))
        )
        for image in images:
            if not image.is_file():
                raise DataError(image, f"no such file, but {labels} has labels for it")
        cases.append(Case(name, images, labels))
    if not cases:
        raise DataError(folder, f"has no files *{layout.ending}")
    return cases
