"""`deepcontrol predict`: images and folders to labels and overlays."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from ..sizes import Size
from ..train.devices import choose_device
from ..train.faults import is_out_of_memory
from .blend import corners, label_blended
from .images import Job, OpenImage, find_jobs, write
from .label import label
from .memory import automatic_tile, free_bytes
from .network import OF_THE_TILE, Network, load_network
from .tiles import Tile, cut, up_to_multiple


@dataclass(frozen=True)
class Predict:
    """Label images with the network of a run.

    Writes two PNGs for each image: NAME-labels.png, a class id in each byte, and NAME-overlay.png,
    the image under the classes' colors. Images are labeled at their own size: give them the
    scale of the training images. One that cannot be read is named, the others are labeled, and
    the exit code is 1.

    An image that takes more than half of the free memory goes through the network by tiles. They
    overlap by as much as the network sees, and share one mean for each AGC layer, so that the
    labels are those of the whole image. That takes a pass over all tiles for each layer, as far as
    that layer; networks with bn or without norm take one. gn, in and frn have statistics of each
    tile, which cannot be shared: there seams remain.

    A network that was trained on crops of its images, and has statistics of what it sees (agc, gn,
    in, frn), sees windows of the crops' size, each with its own. They overlap by half, and their
    probabilities are blended. With --tile it sees tiles as above.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    images: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="IMAGE...", help_behavior_hint="(required)"),
    ]
    """Images, and folders that are searched with all that lies below them."""
    out: Path | None = None
    """The folder to write to; `predictions` in the run folder unless told otherwise."""
    tile: Size | None = None
    """Label tiles of this size, without what they overlap; chosen by the free memory otherwise. One
    that is larger than the image shows it whole."""
    checkpoint: Literal["best", "last"] = "best"
    """Which of the run's networks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""


def run_predict(command: Predict, console: Console, errors: Console) -> int:
    """Label all images; 1 if one of them could not be."""
    if not command.images:
        raise ValueError("name an image or a folder to predict")
    out = command.run / "predictions" if command.out is None else command.out
    if command.out is None and out.is_symlink():  # a run folder may come from elsewhere
        raise ValueError(f"{out} is a link: name its folder with --out if it shall be followed")
    jobs = find_jobs(command.images, out)
    network = load_network(command.run, command.checkpoint, choose_device(command.device))
    if command.tile is not None:
        network = replace(network, window=None)
    failed = 0
    with Progress(console=console, transient=True) as progress:
        images = progress.add_task("images", total=len(jobs))
        tiles = progress.add_task("tiles", total=None)
        for job in jobs:
            progress.update(tiles, description=escape(job.image.name), completed=0, total=None)
            try:
                said = predict_one(
                    network,
                    job,
                    command.tile,
                    lambda done, total: progress.update(tiles, completed=done, total=total),
                )
                progress.console.print(escape(said), highlight=False, soft_wrap=True)
            except (ValueError, OSError, RuntimeError, MemoryError) as error:
                if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                    raise
                failed += 1
                reason = f"{job.image}: {_reason(error, job, network)}"
                errors.print(
                    f"[bold red]error:[/] {escape(reason)}", highlight=False, soft_wrap=True
                )
            progress.advance(images)
    if failed:
        console.print(f"{failed} of {len(jobs)} images could not be labeled.", style="bold")
    return 1 if failed else 0


def predict_one(
    network: Network, job: Job, tile: Size | None, progress: Callable[[int, int], None]
) -> str:
    """Label one image and write it; returns a line about it."""
    started = time.perf_counter()
    device = next(network.model.parameters()).device
    image = OpenImage(job.image, free_bytes(torch.device("cpu")))
    if min(image.size) < network.unit:
        height, width = image.size
        raise ValueError(f"{height}x{width} is below the network's smallest, {network.unit}")
    if network.window is not None:
        ids = label_blended(network.model, image, network.window, progress)
        count, parts = math.prod(map(len, corners(image.size, network.window))), "windows"
    else:
        tiles = choose_tiles(network, image.size, tile, free_bytes(device))
        ids = label(network.model, image, tiles, progress)
        count, parts = len(tiles), "tiles"
        if network.norm in OF_THE_TILE:
            parts += f" with seams: {network.norm} takes its statistics from each tile"
    write(job, image, ids, network.palette)
    seconds = time.perf_counter() - started
    parts = f", {count} {parts}" if count > 1 else ""
    return f"{job.image}: {job.overlay}, {job.labels.name} ({seconds:.1f} s{parts})"


def choose_tiles(network: Network, image: Size, tile: Size | None, free: int) -> list[Tile]:
    """The tiles of an image: of the size asked for, or of what the free memory takes."""
    unit, halo = network.unit, network.halo
    if tile is None:
        tile = automatic_tile(network.bytes_per_pixel, image, unit, halo, free)
    core = (up_to_multiple(tile[0], unit), up_to_multiple(tile[1], unit))
    return cut(image, core, unit, halo)


def _reason(error: Exception, job: Job, network: Network) -> str:
    if is_out_of_memory(error):
        if network.window is not None:  # a larger --tile than it was trained on
            return "not enough memory for a window of the crops' size"
        return "not enough memory: give a smaller --tile"
    return str(error).removeprefix(f"{job.image}: ")  # a DataError names its file already
