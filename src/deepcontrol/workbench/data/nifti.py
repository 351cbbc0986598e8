"""Read NIfTI files and resample volumes to another voxel size."""

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from .sample import DataError

Shape = tuple[int, ...]  # depth, height, width
Spacing = tuple[float, ...]  # size of a voxel along D, H and W, mostly in mm
MOST_VOXELS = 2**31  # largest resampled volume: 1290 along each side


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
