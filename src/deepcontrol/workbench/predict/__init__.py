"""`deepcontrol predict`: label images with a run's network, in tiles if large."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from torch import nn

from ..data.sample import Palette
from ..folders.runfolder import CONFIG
from ..terminal import Size
from ..train.config_file import check_code, load_config
from ..train.distributed import choose_device
from ..train.faults import is_device_failure, is_out_of_memory
from .classes import classify, load_classifier
from .images import ImageFile, Job, PixelFormat, find_jobs, write_legend, write_outputs
from .tiling import (
    Tile,
    bytes_per_pixel,
    choose_tile_size,
    cut_tiles,
    free_memory,
    label_blended,
    label_resized,
    label_tiled,
    round_up,
    window_grid,
)
from .trained import load_model
from .volumes import load_volume_network, predict_volumes

__all__ = ["Network", "Predict", "load_network", "run_predict"]


# Norms with statistics of the input that tiles cannot share.
PER_TILE_NORMS = ("gn", "in", "ln", "frn", "evonorm-s0", "ws+gn")
# Norms with statistics of the input in evaluation too. The outputs depend on the crop.
CROP_DEPENDENT_NORMS = ("agc", "agc+wn", "agc+ws", *PER_TILE_NORMS)


@dataclass(frozen=True)
class Predict:
    """Label images with the network of a run.

    Segmentation writes two PNG files per image: NAME-labels.png with one class id per byte and the
    class colors as its palette, and NAME-overlay.png with the image under the class colors.
    legend.png shows ids, names and colors. A GeoTIFF also gets NAME-labels.tif with its
    georeference. A network trained on your own images with --fit resize sees images resized as in
    training; others see them at their own scale, which should match the training images. Images
    that fail are reported, and the exit code is 1.

    Classification prints the most likely class of each image and writes predictions.csv with the
    probabilities of all classes. Images are resized to the training size and cropped. The rest of
    this text is about segmentation.

    An image that needs more than half of the free memory is split into tiles. Tiles overlap by the
    receptive field and share one mean per AGC layer, so that the labels equal those of the whole
    image. This takes as many passes over the tiles as there are AGC layers. Networks with
    BatchNorm (bn, ws+bn) or without normalization need a single pass. The statistics of other norms
    cannot be shared, so tiles show seams.

    A network trained on crops, with AGC or one of these other norms, labels overlapping windows of
    the crop size and blends their probabilities. --tile selects tiles instead.

    Volumes (NIfTI) always use overlapping windows. NAME.nii.gz has the labels, with the voxels and
    the affine of the input.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run folder."""
    images: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="IMAGE...", help_behavior_hint="(required)"),
    ]
    """Image files and folders. Folders are searched recursively."""
    out: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: RUN/predictions)")] = (
        None
    )
    """Output folder."""
    tile: Annotated[
        Size | None, tyro.conf.arg(help_behavior_hint="(default: the largest that fits in memory)")
    ] = None
    """Tile size, not counting the overlap. A tile larger than the image labels it whole."""
    probabilities: bool = False
    """Also write NAME-probabilities.tif: a 32-bit band per class, in the order of the ids. Volumes
    get NAME-probabilities.nii.gz. For classification, predictions.csv always has them."""
    checkpoint: Literal["best", "last"] = "best"
    """Checkpoint to load."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device. auto uses a GPU if available."""
    model: Annotated[str | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Needed only if the run's network is a function of your own (module:function): its name, which
    allows its code to run."""


@dataclass(frozen=True)
class Network:
    """A trained network and the properties that inference needs."""

    model: nn.Module  # in eval mode
    classes: tuple[str, ...]
    palette: Palette
    norm: str
    window: Size | None = None  # crop size of the training, if outputs depend on the crop
    resized_to: Size | None = None  # training size, if images were resized to fit into it
    pixels: PixelFormat | None = None  # how a run on --data folder reads its images

    @property
    def can_tile(self) -> bool:
        """Whether the receptive field is known, so that tiles can overlap by it."""
        return hasattr(self.model, "receptive_radius")

    @property
    def total_stride(self) -> int:
        """Input pixels per position of the deepest map. Tiles start at its multiples."""
        return int(self.model.total_stride)  # type: ignore[arg-type]

    @property
    def halo(self) -> int:
        """Width of the border around a tile that can affect the outputs inside."""
        return round_up(int(self.model.receptive_radius), self.total_stride)  # type: ignore[arg-type]

    @cached_property
    def bytes_per_pixel(self) -> float:
        """Peak memory of a forward pass per input pixel."""
        return bytes_per_pixel(self.model, self.total_stride)


def load_network(
    run: Path, checkpoint: str, device: torch.device, model_name: str | None = None
) -> Network:
    """Load the `best` or the `last` checkpoint of a run folder, in eval mode.

    Args:
        run: Run folder.
        checkpoint: "best" or "last".
        device: Where the network runs.
        model_name: The run's --model, to allow its code to run if it is a function of any module.

    Raises:
        ValueError: The folder is not a run folder, has no such checkpoint, has invalid classes, or
            needs model_name.
    """
    config, derived = load_config(run)
    config = check_code(config, run, model_name)
    try:
        classes, palette = _classes(derived)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run / CONFIG}: invalid classes and colors: {error}") from error
    model = load_model(run, checkpoint, config, len(classes), device)
    trained_on_crops = derived.get("image_size", list(config.image_size)) != list(config.image_size)
    needs_window = trained_on_crops and config.norm in CROP_DEPENDENT_NORMS
    network = Network(model, classes, palette, config.norm)
    if config.has_own_images:
        network = replace(network, pixels=PixelFormat.of_run(config.in_channels, derived))
        if config.fit == "resize":
            return replace(network, resized_to=config.image_size)
        needs_window = True
    if needs_window or not network.can_tile:
        network = replace(network, window=config.window)
    return network


def _classes(derived: dict[str, Any]) -> tuple[tuple[str, ...], Palette]:
    """Return the classes' names and colors; raise KeyError or TypeError if invalid."""
    names = tuple(str(name) for name in derived["classes"])
    colors = [tuple(color) for color in derived["colors"]]
    valid = all(len(c) == 3 and all(v in range(256) for v in c) for c in colors)
    if not valid or len(colors) != len(names) or not 1 <= len(names) < 256:
        raise TypeError("expected one color of three values from 0 to 255 for each class")
    return names, tuple((int(r), int(g), int(b)) for r, g, b in colors)


def run_predict(command: Predict, console: Console, errors: Console) -> int:
    """Label all images. Returns the exit code: 1 if any image failed."""
    if not command.images:
        raise ValueError("no images given: name an image or a folder to predict")
    out = command.run / "predictions" if command.out is None else command.out
    if (
        command.out is None and out.is_symlink()
    ):  # a downloaded run folder must not redirect the output
        raise ValueError(f"{out} is a symbolic link: pass its target with --out to write there")
    device = choose_device(command.device)
    config = load_config(command.run)[0]
    if len(config.sample_size) == 3:
        if command.tile is not None:
            raise ValueError("--tile is for images: volumes are read in windows of --size")
        volumes = load_volume_network(command.run, command.checkpoint, device, command.model)
        return predict_volumes(volumes, command.images, out, console, errors, command.probabilities)
    if config.task == "classification":
        if command.tile is not None:
            raise ValueError("--tile is for segmentation: this run classifies whole images")
        classifier = load_classifier(command.run, command.checkpoint, device, command.model)
        return classify(classifier, command.images, out, console, errors)
    jobs = find_jobs(command.images, out)
    network = load_network(command.run, command.checkpoint, device, command.model)
    if command.tile is not None:
        network = _without_windows(network)
    failed = _predict_all(network, jobs, command, console, errors)
    if failed < len(jobs):
        legend = write_legend(out, network.classes, network.palette)
        console.print(escape(f"Legend: {legend}"), highlight=False, soft_wrap=True)
    if failed:
        console.print(f"{failed} of {len(jobs)} images failed.", style="bold")
    return 1 if failed else 0


def _predict_all(
    network: Network, jobs: Sequence[Job], command: Predict, console: Console, errors: Console
) -> int:
    """Label the images and report those that fail. Return their number."""
    failed = 0
    with Progress(console=console, transient=True) as progress:
        images = progress.add_task("images", total=len(jobs))
        tiles = progress.add_task("tiles", total=None)
        for job in jobs:
            progress.update(tiles, description=escape(job.image.name), completed=0, total=None)
            try:
                line = predict_one(
                    network,
                    job,
                    command.tile,
                    lambda done, total: progress.update(tiles, completed=done, total=total),
                    command.probabilities,
                )
                progress.console.print(escape(line), highlight=False, soft_wrap=True)
            except Exception as error:  # continue with the other images
                if is_device_failure(error):  # the others would all fail
                    raise
                failed += 1
                reason = f"{job.image}: {_reason(error, job, network)}"
                errors.print(
                    f"[bold red]error:[/] {escape(reason)}", highlight=False, soft_wrap=True
                )
            progress.advance(images)
    return failed


def _without_windows(network: Network) -> Network:
    """Return the network for --tile, which uses neither windows nor resized images."""
    if network.resized_to is not None:
        raise ValueError(
            "--tile is for networks that see images at their own resolution, and this run resized "
            "its images (--fit resize): omit --tile, or train with --fit tile"
        )
    if not network.can_tile:
        raise ValueError("--tile is for segnet, classnet and unet: omit it")
    return replace(network, window=None)


def predict_one(
    network: Network,
    job: Job,
    tile: Size | None,
    progress: Callable[[int, int], None],
    with_probabilities: bool = False,
) -> str:
    """Label one image and write its outputs. Returns a line for the log."""
    started = time.perf_counter()
    device = next(network.model.parameters()).device
    free = free_memory(torch.device("cpu"))
    image = ImageFile(job.image, free) if network.pixels is None else network.pixels.open(job.image)
    if network.resized_to is None and min(image.size) < network.total_stride:
        height, width = image.size
        raise ValueError(
            f"size {height}x{width} is too small for the network: "
            f"expected at least {network.total_stride}x{network.total_stride}"
        )
    found = _empty_probabilities(network, image.size) if with_probabilities else None
    count, parts = 1, ""
    if network.resized_to is not None:
        ids = label_resized(network.model, image, network.resized_to, found)
    elif network.window is not None:
        ids = label_blended(network.model, image, network.window, progress, found)
        count, parts = math.prod(map(len, window_grid(image.size, network.window))), "windows"
    else:
        tiles = choose_tiles(network, image.size, tile, free_memory(device))
        ids = label_tiled(network.model, image, tiles, progress, found)
        count, parts = len(tiles), "tiles"
        if network.norm in PER_TILE_NORMS:
            parts += f" with seams: {network.norm} uses separate statistics for each tile"
    written = write_outputs(job, image, ids, network.palette, found)
    seconds = time.perf_counter() - started
    parts = f", {count} {parts}" if count > 1 else ""
    files = ", ".join([str(written[0]), *(path.name for path in written[1:])])
    return f"{job.image}: {files} ({seconds:.1f} s{parts})"


def _empty_probabilities(network: Network, size: Size) -> NDArray[np.float32]:
    """Allocate (classes, H, W); raise ValueError above half of the free memory."""
    shape = (len(network.classes), *size)
    needed, free = 4 * math.prod(shape), free_memory(torch.device("cpu"))
    if needed > free / 2:
        raise ValueError(
            f"the probabilities of {shape[0]} classes need {needed / 2**30:.1f} GiB, more than "
            f"half of the free {free / 2**30:.1f} GiB: omit --probabilities, or split the image"
        )
    return np.empty(shape, np.float32)


def choose_tiles(network: Network, image: Size, tile: Size | None, free: int) -> list[Tile]:
    """Cut an image into tiles of the given size, or the largest that fits in memory."""
    stride, halo = network.total_stride, network.halo
    if tile is None:
        tile = choose_tile_size(network.bytes_per_pixel, image, stride, halo, free)
    core = (round_up(tile[0], stride), round_up(tile[1], stride))
    return cut_tiles(image, core, stride, halo)


def _reason(error: Exception, job: Job, network: Network) -> str:
    if is_out_of_memory(error):
        if network.window is not None:
            height, width = network.window
            return f"not enough memory for a window of the crop size {height}x{width}"
        return "not enough memory: set a smaller --tile"
    if not isinstance(error, (ValueError, OSError)):
        return f"{type(error).__name__}: {error}"
    return str(error).removeprefix(f"{job.image}: ")  # a DataError starts with the path
