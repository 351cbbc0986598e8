"""Label NIfTI volumes with a network that was trained on nnU-Net's raw layout."""

import gzip
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from torch import nn

from ..data.nifti import Shape, Spacing, nibabel, read_nifti, resample, shape_at
from ..data.nnunet import ENDINGS
from ..data.sample import window_starts
from ..data.volumes import Intensities, Statistics, moments, normalize
from ..folders.runfolder import CONFIG
from ..folders.storage import replacing
from ..terminal import format_size
from ..train.config_file import check_code, load_config
from ..train.evaluate import evaluating
from ..train.faults import is_device_failure
from .tiling import NOT_FINITE, free_memory
from .trained import load_model


class VolumeFormat(NamedTuple):
    """How the values of a run's volumes become inputs."""

    intensities: dict[int, Intensities]  # by CT channel
    voxel_size: Spacing | None  # voxel size of the inputs; None if volumes keep their resolution

    @classmethod
    def of_run(cls, run: Path, derived: Mapping[str, Any]) -> Self:
        """Read the derived values of config.json; raise ValueError if they are invalid."""
        try:
            intensities = {
                int(channel): Intensities(*map(float, values))
                for channel, values in derived.get("intensities", {}).items()
            }
            voxel_size = derived.get("voxel_size")
            if voxel_size is None:
                return cls(intensities, None)
            sides = tuple(float(side) for side in voxel_size)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{run / CONFIG}: invalid format of volumes: {error}") from error
        if len(sides) != 3 or not all(0 < side < math.inf for side in sides):
            raise ValueError(f"{run / CONFIG}: voxel_size {sides}, expected 3 positive lengths")
        return cls(intensities, sides)


class VolumeNetwork(NamedTuple):
    """A trained network with the form of its inputs."""

    model: nn.Module
    classes: tuple[str, ...]
    channels: int
    crop: Shape
    format: VolumeFormat


class Job(NamedTuple):
    """The files of a case, one per channel, and the labels to write."""

    images: tuple[Path, ...]
    labels: Path

    @property
    def probabilities(self) -> Path:
        return self.labels.with_name(
            self.labels.name.replace(ENDINGS[0], f"-probabilities{ENDINGS[0]}")
        )


def load_volume_network(
    run: Path, checkpoint: str, device: torch.device, model_name: str | None = None
) -> VolumeNetwork:
    """Load the network of a run that was trained on volumes.

    Raises:
        ValueError: The folder is not such a run, or has no such checkpoint.
    """
    config, derived = load_config(run)
    config = check_code(config, run, model_name)
    try:
        classes = tuple(str(name) for name in derived["classes"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run / CONFIG}: invalid classes: {error}") from error
    return VolumeNetwork(
        load_model(run, checkpoint, config, len(classes), device),
        classes,
        config.in_channels,
        config.sample_size,
        VolumeFormat.of_run(run, derived),
    )


def find_jobs(paths: Sequence[Path], channels: int, out: Path) -> list[Job]:
    """List the cases of files and folders, in nnU-Net's naming for several channels.

    Raises:
        ValueError: A path does not exist, is no NIfTI file, a case lacks a channel, or outputs
            would overwrite an input or each other.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.name.endswith(ENDINGS))
            if not found:
                raise ValueError(f"{path}: no NIfTI files (*.nii.gz, *.nii) in this folder")
            files += found
        elif path.is_file() and path.name.endswith(ENDINGS):
            files.append(path)
        else:
            reason = "is no NIfTI file (.nii.gz or .nii)" if path.exists() else "no such file"
            raise ValueError(f"{path}: {reason}, but this run was trained on volumes")
    cases: dict[Path, dict[int, Path]] = {}
    for path in files:
        name = next(path.name.removesuffix(e) for e in ENDINGS if path.name.endswith(e))
        numbered = re.fullmatch(r"(.+)_(\d{4})", name)
        key, channel = (numbered[1], int(numbered[2])) if numbered else (name, 0)
        cases.setdefault(path.parent / key, {})[channel] = path
    jobs = []
    for case, own in cases.items():
        if sorted(own) != list(range(channels)):
            expected = ", ".join(f"{case.name}_{i:04}.nii.gz" for i in range(channels))
            names = ", ".join(path.name for path in own.values())
            raise ValueError(f"{case.parent}: found {names}, expected {expected}")
        jobs.append(Job(tuple(own[i] for i in range(channels)), out / f"{case.name}.nii.gz"))
    written = [job.labels.name for job in jobs]
    twice = sorted({name for name in written if written.count(name) > 1})
    if twice:
        raise ValueError(
            f"several cases would be written to {', '.join(twice)}: predict them one by one"
        )
    inputs = set(map(os.path.realpath, files))
    for path in (path for job in jobs for path in (job.labels, job.probabilities)):
        if os.path.realpath(path) in inputs:
            raise ValueError(
                f"{path} is an input volume, and a prediction would overwrite it: choose another "
                "folder with --out"
            )
    return jobs


def class_probabilities(
    network: VolumeNetwork,
    image: NDArray[np.float32],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NDArray[np.float32]:
    """Return the probability of each class, (classes, D, H, W).

    The volume is read in windows of the training size that overlap by half, as in nnU-Net. The
    probabilities of a voxel are averaged over its windows, with Gaussian weights around their
    centers.

    Args:
        network: The network.
        image: Values of the files at the voxel size of the network, (C, D, H, W).
        progress: Called with the windows done and their number.

    Raises:
        ValueError: A logit is not finite, or memory is short.
    """
    mean, std = moments(image)
    statistics = Statistics(mean, std, np.empty((0, 3), np.int64))
    device = next(network.model.parameters()).device
    shape = image.shape[1:]
    check_memory(len(network.classes), shape)
    total = np.zeros((len(network.classes), *shape), np.float32)
    weights = np.zeros(shape, np.float32)
    weight = gaussian_weights(network.crop)
    sides = zip(shape, network.crop, strict=True)
    tiles = list(itertools.product(*(window_starts(a, b, max(1, b // 2)) for a, b in sides)))
    with evaluating(network.model, device, None):
        for done, starts in enumerate(tiles, 1):
            inside = tuple(slice(a, a + b) for a, b in zip(starts, network.crop, strict=True))
            crop = normalize(image[:, *inside], statistics, network.format.intensities)
            own = crop.shape[1:]  # a volume may be smaller than the window
            missing = [(0, a - b) for a, b in zip(network.crop, own, strict=True)]
            inputs = torch.from_numpy(np.pad(crop, [(0, 0), *missing]))[None].to(device)
            found = network.model(inputs)[0].float().softmax(0).cpu().numpy()
            if not np.isfinite(found).all():
                raise ValueError(NOT_FINITE)
            valid = tuple(slice(side) for side in own)
            total[:, *inside] += weight[valid] * found[:, *valid]
            weights[inside] += weight[valid]
            progress(done, len(tiles))
    total /= weights
    return total


def gaussian_weights(size: Shape) -> NDArray[np.float32]:
    """Return a window's weights: a Gaussian of deviation an eighth of each side.

    No weight is below 1e-3 of the largest, so that every voxel of a volume has one.

    >>> gaussian_weights((1, 1, 8))[0, 0].round(3)
    array([0.002, 0.044, 0.325, 0.882, 0.882, 0.325, 0.044, 0.002], dtype=float32)
    """
    sides = (np.arange(n) - (n - 1) / 2 for n in size)
    along = [np.exp(-0.5 * (side * 8 / n) ** 2) for side, n in zip(sides, size, strict=True)]
    weights = along[0][:, None, None] * along[1][:, None] * along[2]
    return np.maximum(weights, 1e-3 * weights.max()).astype(np.float32)


def check_memory(classes: int, shape: Shape) -> None:
    """Raise ValueError if the probabilities need more than half of the free memory."""
    needed, free = 4 * classes * math.prod(shape), free_memory(torch.device("cpu"))
    if needed > free / 2:
        raise ValueError(
            f"the probabilities of {classes} classes in {format_size(shape)} voxels need "
            f"{needed / 2**30:.1f} GiB, more than half of the free {free / 2**30:.1f} GiB: crop "
            "the volume"
        )


def case_probabilities(
    network: VolumeNetwork,
    job: Job,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NDArray[np.float32]:
    """Return probabilities (classes, D, H, W) at the resolution of a case's files."""
    image = read_channels(job.images)
    shape = image.shape[1:]
    if network.format.voxel_size is None:
        return class_probabilities(network, image, progress)
    check_memory(len(network.classes), shape)
    resampled = resample(image, shape_at(job.images[0], network.format.voxel_size))
    return resample(class_probabilities(network, resampled, progress), shape)


def predict_volumes(
    network: VolumeNetwork,
    paths: Sequence[Path],
    out: Path,
    console: Console,
    errors: Console,
    with_probabilities: bool = False,
) -> int:
    """Label volumes and write them as NIfTI with the affine of their input.

    With probabilities, NAME-probabilities.nii.gz has one volume per class.

    Returns:
        The exit code: 1 if any volume failed.
    """
    jobs, failed = find_jobs(paths, network.channels, out), 0
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("volumes", total=None)

        def advance(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        for job in jobs:
            progress.reset(bar, description=escape(job.images[0].name), total=None)
            started = time.perf_counter()
            try:
                found = case_probabilities(network, job, advance)
                write_nifti(job, job.labels, found.argmax(0).astype(np.uint8))
                written = str(job.labels)
                if with_probabilities:
                    write_nifti(job, job.probabilities, found)
                    written += f", {job.probabilities.name}"
            except Exception as error:  # continue with the other volumes
                if is_device_failure(error):  # the others would all fail
                    raise
                failed += 1
                errors.print(
                    f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True
                )
                continue
            line = f"{job.images[0]}: {written} ({time.perf_counter() - started:.1f} s)"
            progress.console.print(escape(line), highlight=False, soft_wrap=True)
    if failed:
        console.print(f"{failed} of {len(jobs)} volumes failed.", style="bold")
    return 1 if failed else 0


def read_channels(paths: Sequence[Path]) -> NDArray[np.float32]:
    """Read the files of a case as (C, D, H, W)."""
    channels = [read_nifti(path) for path in paths]
    for path, channel in zip(paths, channels, strict=True):
        if channel.shape != channels[0].shape:
            raise ValueError(
                f"{path}: size {channel.shape}, but {paths[0].name} has {channels[0].shape}"
            )
    return np.stack(channels)


def write_nifti(job: Job, path: Path, volume: NDArray) -> None:
    """Write (D, H, W) or (classes, D, H, W) as NIfTI, in the first channel's space."""
    package = nibabel()
    source: Any = package.load(job.images[0])
    image = package.Nifti1Image(volume.T, source.affine)  # (X, Y, Z), then classes
    sides = source.header.get_zooms()[:3]
    image.header.set_zooms((*sides, 1.0) if volume.ndim == 4 else sides)
    with replacing(path, inside=path.parent) as file:
        file.write(gzip.compress(image.to_bytes(), mtime=0))
