"""Medical volumes in nnU-Net's raw layout, as crops for 3-D networks.

A hash of the case's name selects the validation cases. Volumes are (D, H, W), the reverse of
NIfTI's (X, Y, Z). They keep their resolution, or all get the median voxel size of the training
cases: trilinear for images, the nearest voxel for labels. CT channels are clipped to the 0.5 and
99.5 percentiles of the labeled structures and scaled by their mean and deviation; other channels
have zero mean and unit variance in each volume. These are nnU-Net's rules.

Training reads random crops, a third of them around a voxel of a structure, as many per epoch as
tiles cover the volumes. Validation reads these tiles, and each voxel counts once.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ..folders.storage import read_json, replacing, write_json
from .cache import default_folder
from .dataset import DatasetSplit
from .files import fingerprint, split_by_name
from .nifti import (
    Shape,
    Spacing,
    nibabel,
    read_nifti,
    resample,
    resample_labels,
    shape_at,
    voxel_size,
)
from .nnunet import DATASET_FILE, LABELS, Case, Layout, find_cases, read_layout
from .sample import VOID, DataError, Progress, Sample, check_split, starter_colors, windows

POINTS = 2000  # voxels of structures per case: for statistics of CT, and to place crops
FOREGROUND_SHARE = 1 / 3  # fraction of training crops around a labeled structure
CT_PERCENTILES = (0.5, 99.5)


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
            # Unlike np.load, it raises ValueError for anything that is not a .npy file.
            image, labels = (np.lib.format.open_memmap(path, mode="r") for path in paths)
            about = read_json(index)
            points = np.array(about["points"], np.int64).reshape(-1, 3)
            return Volume(image, labels, Statistics(about["mean"], about["std"], points))
        except (OSError, ValueError, LookupError, TypeError):
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
