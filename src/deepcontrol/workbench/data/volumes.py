"""Medical volumes in nnU-Net's raw layout, as crops for 3-D networks.

    root/dataset.json                 channel_names, labels, file_ending
    root/imagesTr/CASE_0000.nii.gz    one file per channel: CASE_0001.nii.gz, ...
    root/labelsTr/CASE.nii.gz

A hash of the case's name selects the validation cases. Volumes are (D, H, W), the reverse of
NIfTI's (X, Y, Z). They keep their resolution, or all get the median voxel size of the training
cases: trilinear for images, the nearest voxel for labels. CT channels are clipped to the 0.5 and
99.5 percentiles of the labeled structures and scaled by their mean and deviation; other channels
have zero mean and unit variance in each volume. These are nnU-Net's rules.

Training reads random crops, a third of them around a voxel of a structure, as many per epoch as
tiles cover the volumes. Validation reads these tiles, and each voxel counts once.
"""

import glob
import importlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from ..folders.storage import read_json, replacing, write_json
from .cache import default_folder
from .dataset import DatasetSplit
from .files import fingerprint, split_by_name
from .sample import VOID, DataError, Sample, check_split, starter_colors, windows

Shape = tuple[int, ...]  # depth, height, width
Spacing = tuple[float, ...]  # size of a voxel along D, H and W, mostly in mm
MOST_VOXELS = 2**31  # of a resampled volume: 1290 along each side
ENDINGS = (".nii.gz", ".nii")
POINTS = 2000  # voxels of structures per case: for statistics of CT, and to place crops
FOREGROUND_SHARE = 1 / 3  # of the training crops
CT_PERCENTILES = (0.5, 99.5)

Progress = Callable[[int, int], None]


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


class Statistics(NamedTuple):
    """Of a case: the moments of each channel, and voxels of its structures."""

    mean: list[float]
    std: list[float]
    points: NDArray[np.int64]  # (K, 3)


class Volume(NamedTuple):
    """A decoded case. The arrays are mapped into memory."""

    image: NDArray[np.float32]  # (C, D, H, W), values of the files
    labels: NDArray[np.uint8]  # (D, H, W)
    statistics: Statistics


class Intensities(NamedTuple):
    """Statistics of a CT channel over the structures of all training cases."""

    low: float
    high: float
    mean: float
    std: float


class Place(NamedTuple):
    """One tile of a case: its first voxel, and the voxels that it predicts."""

    case: int
    start: Shape
    predicted: tuple[slice, ...]


class VolumeDataset(Dataset):
    """Crops of volumes: image (C, D, H, W) fp32 and labels (D, H, W).

    Args:
        layout: The content of dataset.json.
        cases: The cases of this split.
        training: All training cases, which set the intensities of CT.
        crop: Size of the crops.
        is_random: Random crops, mirrored along random axes if `flip`. Otherwise tiles in order.
        flip: See above.
        spacing: Voxel size to resample all volumes to. None keeps their resolution.
    """

    def __init__(
        self,
        layout: Layout,
        cases: tuple[Case, ...],
        training: tuple[Case, ...],
        crop: Shape,
        is_random: bool,
        flip: bool = True,
        spacing: Spacing | None = None,
    ) -> None:
        self.layout, self.cases, self.training = layout, cases, training
        self.crop, self.is_random, self.flip = crop, is_random, flip
        self.spacing = spacing
        self.classes = layout.classes

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def places(self) -> list[Place]:
        """The tiles of all cases, from the headers of their files."""
        found = []
        for number, case in enumerate(self.cases):
            sides = zip(shape_at(case.labels, self.spacing), self.crop, strict=True)
            for tile in itertools.product(*(windows(*side) for side in sides)):
                starts, predicted = zip(*tile, strict=True)
                found.append(Place(number, starts, predicted))
        return found

    @cached_property
    def intensities(self) -> Mapping[int, Intensities]:
        """Statistics of the CT channels, by channel."""
        channels = [i for i, name in enumerate(self.layout.channels) if name.lower() == "ct"]
        values: dict[int, list[NDArray]] = {channel: [] for channel in channels}
        for case in self.training if channels else ():
            volume = load_case(case, self.layout, self.spacing)
            points = tuple(volume.statistics.points.T)
            for channel in channels:
                values[channel].append(volume.image[channel][points])
        return {channel: _intensities(np.concatenate(found)) for channel, found in values.items()}

    def decode(self, progress: Progress | None = None) -> None:
        """Decode all cases into the cache."""
        for done, case in enumerate(self.cases, 1):
            load_case(case, self.layout, self.spacing)
            if progress is not None:
                progress(done, len(self.cases))

    def name_of(self, index: int) -> str:
        """Return the case of a tile and the tile's first voxel."""
        place = self.places[index]
        return f"{self.cases[place.case].name} ({', '.join(map(str, place.start))})"

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = self.places[index]
        volume = load_case(self.cases[place.case], self.layout, self.spacing)
        start = self._random_start(volume) if self.is_random else place.start
        inside = tuple(slice(a, a + b) for a, b in zip(start, self.crop, strict=True))
        image = normalize(volume.image[:, *inside], volume.statistics, self.intensities)
        labels = volume.labels[inside]
        if not self.is_random:
            own = np.full_like(labels, VOID)
            mine = tuple(
                slice(p.start - a, p.stop - a) for p, a in zip(place.predicted, start, strict=True)
            )
            own[mine] = labels[mine]
            labels = own
        missing = [(0, a - b) for a, b in zip(self.crop, labels.shape, strict=True)]
        crop = torch.from_numpy(np.pad(image, [(0, 0), *missing]))  # 0 is the mean
        ids = torch.from_numpy(np.pad(labels, missing, constant_values=VOID))
        if self.is_random and self.flip:
            axes = [i for i in range(3) if torch.rand(()) < 0.5]
            crop, ids = crop.flip([1 + i for i in axes]), ids.flip(axes)
        return crop, ids

    def _random_start(self, volume: Volume) -> Shape:
        """Draw the first voxel of a crop, around a voxel of a structure or anywhere."""
        points = volume.statistics.points
        rest = [max(0, a - b) for a, b in zip(volume.labels.shape, self.crop, strict=True)]
        if len(points) and torch.rand(()) < FOREGROUND_SHARE:
            center = points[int(torch.randint(len(points), ()))]
            sides = zip(center, self.crop, rest, strict=True)
            return tuple(min(max(0, int(c) - size // 2), slack) for c, size, slack in sides)
        return tuple(int(torch.randint(slack + 1, ())) for slack in rest)


class VolumeSplit(DatasetSplit):
    """One split of a dataset of volumes."""

    dataset: VolumeDataset

    def scan(self, workers: int = 0, progress: Progress | None = None) -> None:
        self.dataset.decode(progress)
        super().scan(workers, progress)


def open_nnunet(
    root: Path,
    split: str,
    crop: Shape,
    val_fraction: float = 0.2,
    limit: int | None = None,
    flip: bool = True,
    resample: bool = False,
) -> VolumeSplit:
    """Open one split of a dataset in nnU-Net's raw layout.

    Args:
        root: Folder with dataset.json, imagesTr/ and labelsTr/.
        split: "train" or "val".
        crop: Size of the crops.
        val_fraction: Share of the cases for validation.
        limit: Use only the first `limit` cases.
        flip: Mirror the training crops.
        resample: Resample all volumes to the median voxel size of the training cases.

    Raises:
        DataError: The folder has another layout, or a file is missing.
        ValueError: nibabel is not installed, the split is unknown, or it has fewer cases.
    """
    check_split(split)
    nibabel()
    layout = read_layout(root)
    parts = split_by_name(find_cases(root, layout), lambda case: case.name, val_fraction)
    cases = parts[split]
    if not cases:
        raise DataError(root, f"has no case for {split}: expected at least 2 in {LABELS}/")
    if limit is not None and limit > len(cases):
        raise ValueError(f"{root} has {len(cases)} cases in {split}, fewer than {limit}")
    dataset = VolumeDataset(
        layout,
        tuple(cases[:limit]),
        tuple(parts["train"]),
        crop,
        is_random=split == "train",
        flip=flip,
        spacing=median_voxel_size(parts["train"]) if resample else None,
    )
    return VolumeSplit(
        dataset, f"nnunet-{split}", palette=starter_colors(range(len(layout.classes)))
    )


def median_voxel_size(cases: Sequence[Case]) -> Spacing:
    """Return the median size of the cases' voxels along each axis."""
    sizes = np.array([voxel_size(case.labels) for case in cases])
    return tuple(np.median(sizes, 0).tolist())


# Layout


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


# Volumes


def suggest_crop(cases: Sequence[Case], spacing: Spacing | None) -> Shape:
    """Return a crop for these cases.

    It is their median size, in multiples of 16 from 32 to 96.
    """
    shapes = np.array([shape_at(case.labels, spacing) for case in cases])
    return tuple(min(96, max(32, int(side) // 16 * 16)) for side in np.median(shapes, 0))


def shown_slice(volume: Volume) -> Sample:
    """Return the slice with the most labeled voxels, its first channel in gray."""
    labeled = ((volume.labels > 0) & (volume.labels != VOID)).sum((1, 2))
    index = int(labeled.argmax())
    values = np.asarray(volume.image[0, index])
    low, high = np.percentile(values, (1, 99))
    gray = (255 * ((values - low) / max(high - low, 1e-8)).clip(0, 1)).astype(np.uint8)
    labels = np.asarray(volume.labels[index])
    return Sample(gray[..., None].repeat(3, 2), labels, labels.astype(np.uint16))


def load_case(case: Case, layout: Layout, spacing: Spacing | None = None) -> Volume:
    """Return a decoded case, resampled to a voxel size if one is given.

    The cache on disk is written when it is missing or damaged.
    """
    files = [path.stat() for path in (*case.images, case.labels)]
    stamps = tuple((file.st_size, file.st_mtime_ns) for file in files)
    return _load_case(case, layout, spacing, stamps)


@lru_cache(maxsize=64)  # mapped files, which take no memory of their own
def _load_case(
    case: Case, layout: Layout, spacing: Spacing | None, stamps: tuple[tuple[int, int], ...]
) -> Volume:
    """Return a decoded case; `stamps` change with its files."""
    salt = repr(layout if spacing is None else (layout, spacing))
    key = fingerprint((*case.images, case.labels), salt=salt)
    stem = default_folder() / "volumes" / f"{case.name}-{key}"
    paths = [stem.with_name(f"{stem.name}.{part}.npy") for part in ("image", "labels")]
    index = stem.with_name(f"{stem.name}.json")
    for _ in range(2):
        try:
            image, labels = (np.load(path, mmap_mode="r") for path in paths)
            about = read_json(index)
            points = np.array(about["points"], np.int64).reshape(-1, 3)
            return Volume(image, labels, Statistics(about["mean"], about["std"], points))
        except (OSError, ValueError, KeyError):
            _decode(case, layout, spacing, paths, index)
    raise OSError(f"{paths[0].parent} does not keep the decoded volumes: is its disk full?")


def _decode(
    case: Case, layout: Layout, spacing: Spacing | None, paths: list[Path], index: Path
) -> None:
    channels = [read_nifti(path) for path in case.images]
    ids = read_nifti(case.labels)
    for path, channel in zip(case.images, channels, strict=True):
        if channel.shape != ids.shape:
            raise DataError(path, f"size {channel.shape}, but {case.labels} has {ids.shape}")
        if not np.isfinite(channel).all():
            raise DataError(path, "has values that are not finite")
    labels = to_classes(case.labels, ids, layout)
    image: NDArray[np.float32] = np.stack(channels)
    if spacing is not None:
        shape = shape_at(case.labels, spacing)
        image, labels = resample(image, shape), resample_labels(labels, shape)
    mean, std = moments(image)
    about = {"mean": mean, "std": std, "points": structure_points(labels).tolist()}
    folder = index.parent
    folder.mkdir(parents=True, exist_ok=True)
    arrays: list[NDArray] = [image, labels]
    for path, array in zip(paths, arrays, strict=True):
        with replacing(path, inside=folder) as file:
            np.lib.format.write_array(file, array, allow_pickle=False)
    write_json(index, about, indent=0, inside=folder)


def to_classes(path: Path, ids: NDArray[np.float32], layout: Layout) -> NDArray[np.uint8]:
    """Return labels as classes; raise DataError for values not in dataset.json."""
    labels = np.where(ids == layout.ignored, VOID, ids) if layout.ignored is not None else ids
    bad = ~np.isin(labels, [*range(len(layout.classes)), VOID])
    if bad.any():
        raise DataError(
            path,
            f"label {ids[bad].max():g} in {bad.sum()} voxels, expected 0 to "
            f"{len(layout.classes) - 1} as {DATASET_FILE} says",
        )
    return labels.astype(np.uint8)


def moments(image: NDArray[np.float32]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel of a volume (C, D, H, W)."""
    axes = (1, 2, 3)
    return image.mean(axes, np.float64).tolist(), image.std(axes, np.float64).tolist()


def structure_points(labels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return up to POINTS voxels (K, 3), not background or VOID, evenly spread."""
    found = np.flatnonzero((labels > 0) & (labels != VOID))
    chosen = found[np.linspace(0, len(found) - 1, min(POINTS, len(found))).astype(np.int64)]
    return np.stack(np.unravel_index(chosen, labels.shape), 1)


def normalize(
    image: NDArray[np.float32], statistics: Statistics, intensities: Mapping[int, Intensities]
) -> NDArray[np.float32]:
    """Normalize a crop (C, D, H, W) as the module describes."""
    result = np.empty_like(image)
    for channel, values in enumerate(image):
        if channel in intensities:
            low, high, mean, std = intensities[channel]
            values = values.clip(low, high)
        else:
            mean, std = statistics.mean[channel], statistics.std[channel]
        result[channel] = (values - mean) / max(std, 1e-8)
    return result


def _intensities(values: NDArray) -> Intensities:
    if not len(values):
        raise ValueError(
            "no training case has a labeled structure, so the intensities of CT are unknown: check "
            f"the labels in {LABELS}/"
        )
    low, high = np.percentile(values, CT_PERCENTILES)
    clipped = values.clip(low, high)
    mean, std = float(clipped.mean()), float(clipped.std())
    return Intensities(float(low), float(high), mean, std)


# NIfTI files


def nibabel() -> Any:
    """Return the package that reads NIfTI files; raise ValueError without it."""
    try:
        return importlib.import_module("nibabel")
    except ModuleNotFoundError:
        raise ValueError(
            "NIfTI files need nibabel, which is not installed: in a clone of the repository, run: "
            'pip install ".[medical]"'
        ) from None


def read_nifti(path: Path) -> NDArray[np.float32]:
    """Read NIfTI as (D, H, W), scaled by its header; raise DataError if damaged."""
    package = nibabel()
    try:
        image = package.load(path)
        if len(image.shape) != 3:
            raise DataError(
                path, f"shape {image.shape}, expected 3 dimensions (one file per channel)"
            )
        return np.ascontiguousarray(image.get_fdata(dtype=np.float32).transpose(2, 1, 0))
    except DataError:
        raise
    except Exception as error:  # nibabel and zlib raise anything on damaged files
        raise DataError(path, f"cannot be read as NIfTI ({error})") from error


def volume_shape(path: Path) -> Shape:
    """Return the size (D, H, W) of a NIfTI file from its header."""
    package = nibabel()
    try:
        return tuple(package.load(path).shape[::-1])
    except Exception as error:
        raise DataError(path, f"cannot be read as NIfTI ({error})") from error


def voxel_size(path: Path) -> Spacing:
    """Return the size of a voxel (D, H, W) from the header of a NIfTI file.

    Raises:
        DataError: The header has no three positive sizes.
    """
    package = nibabel()
    try:
        sides = tuple(float(side) for side in package.load(path).header.get_zooms()[2::-1])
    except Exception as error:
        raise DataError(path, f"cannot be read as NIfTI ({error})") from error
    if len(sides) != 3 or not all(0 < side < float("inf") for side in sides):
        raise DataError(path, f"voxels of {sides}, expected three positive sizes")
    return sides


def resampled_shape(shape: Shape, own: Spacing, target: Spacing) -> Shape:
    """Return the size of a volume after resampling from one voxel size to another.

    >>> resampled_shape((40, 64, 64), (5.0, 1.0, 1.0), (2.5, 1.0, 2.0))
    (80, 64, 32)
    """
    return tuple(max(1, round(side * a / b)) for side, a, b in zip(shape, own, target, strict=True))


def shape_at(path: Path, spacing: Spacing | None) -> Shape:
    """Return the size of a NIfTI file, after resampling if a voxel size is given.

    Raises:
        DataError: The header is damaged, or the resampled volume would have over MOST_VOXELS.
    """
    shape = volume_shape(path)
    if spacing is None:
        return shape
    own = voxel_size(path)
    result = resampled_shape(shape, own, spacing)
    if math.prod(result) > MOST_VOXELS:
        raise DataError(
            path,
            f"voxels of {own}, which would be resampled to {spacing} and a volume of {result}: "
            "is the voxel size in its header wrong?",
        )
    return result


def resample(image: NDArray[np.float32], shape: Shape) -> NDArray[np.float32]:
    """Resample channels (C, D, H, W) to another size with trilinear interpolation."""
    if image.shape[1:] == shape:
        return image
    # One channel at a time: interpolate holds the input and the output.
    parts = (torch.from_numpy(np.ascontiguousarray(part))[None, None] for part in image)
    return np.stack([interpolate(part, shape, mode="trilinear")[0, 0].numpy() for part in parts])


def resample_labels(labels: NDArray[np.uint8], shape: Shape) -> NDArray[np.uint8]:
    """Resample labels (D, H, W) to another size, each from the nearest voxel."""
    if labels.shape == shape:
        return labels
    whole = torch.from_numpy(np.ascontiguousarray(labels))[None, None]
    return interpolate(whole, shape, mode="nearest-exact")[0, 0].numpy()


DATASET_FILE, IMAGES, LABELS = "dataset.json", "imagesTr", "labelsTr"
