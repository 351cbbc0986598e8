"""Label NIfTI volumes with a network that was trained on nnU-Net's raw layout."""

import gzip
import itertools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from torch import nn

from ..data.tiles import windows
from ..data.volumes import Intensities, Statistics, moments, nibabel, normalize, read_nifti
from ..folders.output import replacing
from ..train.build import build_model
from ..train.checkpoint import load_of_run
from ..train.config_file import check_code, load_config
from ..train.evaluate import evaluating
from ..train.faults import check_weights
from ..train.snapshot import load_weights

ENDINGS = (".nii.gz", ".nii")
Shape = tuple[int, ...]  # depth, height, width


class VolumeNetwork(NamedTuple):
    """A trained network with the form of its inputs."""

    model: nn.Module
    channels: int
    crop: Shape
    intensities: dict[int, Intensities]  # of CT channels


class Job(NamedTuple):
    """The files of a case, one per channel, and the labels to write."""

    images: tuple[Path, ...]
    labels: Path


def load_volume_network(
    run: Path, checkpoint: str, device: torch.device, model_name: str | None = None
) -> VolumeNetwork:
    """Load the network of a run that was trained on volumes.

    Raises:
        ValueError: The folder is not such a run, or has no such checkpoint.
    """
    config, derived = load_config(run)
    config = check_code(config, run, model_name)
    model = build_model(config, len(derived["classes"]))
    load_weights(model, load_of_run(run, checkpoint).model)
    check_weights(model, run / checkpoint)
    try:
        intensities = {
            int(channel): Intensities(*map(float, values))
            for channel, values in derived.get("intensities", {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{run / 'config.json'}: invalid intensities: {error}") from error
    return VolumeNetwork(
        model.eval().to(device), config.in_channels, config.sample_size, intensities
    )


def find_jobs(paths: Sequence[Path], channels: int, out: Path) -> list[Job]:
    """List the cases of files and folders, in nnU-Net's naming if there are several channels.

    Raises:
        ValueError: A path does not exist, is no NIfTI file, or a case lacks a channel.
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
    return jobs


def label_volume(
    network: VolumeNetwork,
    image: NDArray[np.float32],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NDArray[np.uint8]:
    """Return the most likely class of each voxel, (D, H, W).

    The volume is read in windows of the training size, as in the evaluation: each voxel comes from
    the window with the nearest center.

    Args:
        network: The network.
        image: Values of the files, (C, D, H, W).
        progress: Called with the windows done and their number.
    """
    mean, std = moments(image)
    statistics = Statistics(mean, std, np.empty((0, 3), np.int64))
    device = next(network.model.parameters()).device
    labels = np.zeros(image.shape[1:], np.uint8)
    sides = zip(image.shape[1:], network.crop, strict=True)
    tiles = list(itertools.product(*(windows(*side) for side in sides)))
    with evaluating(network.model, device, None):
        for done, tile in enumerate(tiles, 1):
            starts, predicted = zip(*tile, strict=True)
            inside = tuple(slice(a, a + b) for a, b in zip(starts, network.crop, strict=True))
            crop = normalize(image[:, *inside], statistics, network.intensities)
            missing = [(0, a - b) for a, b in zip(network.crop, crop.shape[1:], strict=True)]
            inputs = torch.from_numpy(np.pad(crop, [(0, 0), *missing]))[None].to(device)
            found = network.model(inputs).argmax(1)[0].to(torch.uint8).cpu().numpy()
            own = tuple(
                slice(p.start - a, p.stop - a) for p, a in zip(predicted, starts, strict=True)
            )
            labels[predicted] = found[own]
            progress(done, len(tiles))
    return labels


def predict_volumes(
    network: VolumeNetwork, paths: Sequence[Path], out: Path, console: Console, errors: Console
) -> int:
    """Label volumes and write them as NIfTI with the affine of their input.

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
                image = read_channels(job.images)
                labels = label_volume(network, image, advance)
                write_labels(job, labels)
            except Exception as error:  # whatever one volume raises, the others go on
                failed += 1
                errors.print(
                    f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True
                )
                continue
            line = f"{job.images[0]}: {job.labels} ({time.perf_counter() - started:.1f} s)"
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


def write_labels(job: Job, labels: NDArray[np.uint8]) -> None:
    """Write labels as NIfTI, in the space of the first channel."""
    package = nibabel()
    source: Any = package.load(job.images[0])
    image = package.Nifti1Image(labels.transpose(2, 1, 0), source.affine)
    image.header.set_zooms(source.header.get_zooms()[:3])
    with replacing(job.labels, inside=job.labels.parent) as file:
        file.write(gzip.compress(image.to_bytes(), mtime=0))
