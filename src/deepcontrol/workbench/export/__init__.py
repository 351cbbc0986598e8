"""`deepcontrol export`: write a network as ONNX, torch.export or ExecuTorch file."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ... import __version__
from ...convert import calibrate, fold
from ..data.batches import PIXEL_MEAN, PIXEL_STD
from ..folders.storage import check_writable, move_file, write_atomic
from ..models import is_agc
from ..predict import Network, load_network
from ..predict.volumes import VolumeFormat
from ..terminal import Size
from ..train.checkpoint import load_of_run
from ..train.config import Train
from ..train.config_file import load_config
from .card import CARD, model_card
from .check import (
    TOLERANCE,
    Accuracy,
    Comparison,
    RunImages,
    check,
    compare_accuracy,
    in_windows,
)
from .targets import (
    AXES,
    INPUT,
    TARGETS,
    Runner,
    Sizes,
    TargetName,
    as_tuple,
    quantize,
    require,
    sizes_of,
    trace,
    versions,
)

__all__ = ["Export", "run_export"]


Accuracies = dict[str, Accuracy]

_MEANING = {
    "classes": "logits; the argmax along axis 1 is the class of the {}",
    "contour": "logits; above 0, the pixel is on the boundary of an instance",
}


@dataclass(frozen=True)
class Export:
    """Export the network of a run to a file, and check the file.

    AGC (automatic gain control) layers are folded: each becomes a convolution with a computed bias.
    The exported file runs on random images of two shapes. If its outputs differ from torch by more
    than 1e-4 (relative to the largest output, or absolute if that is below 1), no file is written
    and the exit code is 1. A JSON file next to the export describes inputs, outputs and classes,
    and model-card.md is the readable version, with metrics, data and the code to run the file.

    The options --fixed-means and --int8 change the outputs. The pixel error on the validation set
    is printed before and after.

    Batch size, height and width are dynamic. Height and width must be at least 64 for segnet; for
    unet a multiple of 16, at least 32; for classnet a multiple of 128, at least 256. Classifiers
    and networks of other libraries take images of the training size, and unet3d volumes of the
    size of its crops. executorch supports one image of one size.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run folder."""
    to: TargetName = "onnx"
    """File format. exported is a torch.export file; the others need an extra."""
    out: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: in RUN/export)")] = None
    """Output file."""
    checkpoint: Literal["best", "last"] = "best"
    """Checkpoint to load."""
    fold: bool = True
    """Fold AGC into the convolutions."""
    fixed_means: bool = False
    """Replace the means of AGC by constants from training images. Changes the outputs."""
    int8: bool = False
    """Quantize the convolutions to int8, calibrated on training images (onnx only)."""
    size: Annotated[
        Size | None, tyro.conf.arg(help_behavior_hint="(default: the training size)")
    ] = None
    """Image size (executorch only)."""
    data_root: Annotated[
        Path | None, tyro.conf.arg(help_behavior_hint="(default: the folder used in training)")
    ] = None
    """Dataset folder for --fixed-means and --int8."""
    model: Annotated[str | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Needed only if the run's network is a function of your own (module:function): its name, which
    allows its code to run."""


def run_export(command: Export, console: Console) -> int:
    """Export, check and describe a network. Returns the exit code.

    Raises:
        ValueError: The options contradict each other, or the file fails the check. No file is left.
    """
    target = TARGETS[command.to]
    config, derived = load_config(command.run)
    _check_options(command, config)
    volumes = VolumeFormat.of_run(command.run, derived)
    if target.extra is not None:
        require(f"--to {command.to}", target.extra)
    network = load_network(command.run, command.checkpoint, torch.device("cpu"), command.model)
    fixed = (command.size or config.sample_size) if target.fixed_size else None
    sizes = sizes_of(network.model, fixed, config.sample_size)
    height, width = config.image_size
    if command.int8 and not sizes.accept((height, width)):
        raise ValueError(
            f"--int8 needs the image size of the run ({height}x{width}), but the exported "
            f"network accepts only {sizes}: export without --int8"
        )
    out = command.out or command.run / "export" / f"{_name(command, config)}{target.suffix}"
    inside = out.parent if command.out else command.run
    description_path = out.with_name(f"{out.name}.json")
    card_path = out.with_name(CARD)
    for path in (out, description_path, card_path):
        check_writable(path, inside)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out.parent) as folder:
        file = Path(folder) / f"{_name(command, config)}{target.suffix}"
        images = RunImages(config, command.data_root)
        with _progress(console) as progress:
            comparison, accuracies = _write(
                command, network, sizes, output_names(config.model), images, file, progress
            )
        move_file(file, out, inside)
    description = describe(out.name, command.to, config, volumes, network, sizes, comparison) | {
        "checkpoint": command.checkpoint,
        "folded": is_agc(network.norm) and (command.fold or command.fixed_means),
        "fixed_means": command.fixed_means,
        "int8": command.int8,
        "validation": {name: asdict(accuracy) for name, accuracy in accuracies.items()} or None,
    }
    description["check"]["before_int8"] = command.int8
    # A file with a fixed size has no choice of windows, and fixed means do not depend on them.
    window = None if command.fixed_means or sizes.fixed is not None else network.window
    description["input"]["window"] = None if window is None else list(window)
    text = json.dumps(description, indent=2, allow_nan=False) + "\n"
    write_atomic(description_path, text, inside)
    position = load_of_run(command.run, command.checkpoint).state.get("position", {})
    card = model_card(command.run, config, description, position.get("epoch"))
    write_atomic(card_path, card, inside)
    _print(console, description, out, comparison, accuracies)
    return 0


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Show the part of the work that runs: torch.onnx takes half a minute."""
    if not console.is_terminal:
        yield lambda text: console.print(f"{text} ...", highlight=False)
        return
    with console.status("loading") as status:
        yield status.update


def _check_options(command: Export, config: Train) -> None:
    is_volume = len(config.sample_size) == 3
    if (is_volume or config.task == "classification") and (command.int8 or command.fixed_means):
        other = "labels volumes" if is_volume else "classifies images"
        raise ValueError(
            f"--int8 and --fixed-means are for segmentation of images, and this run {other}: omit "
            "them"
        )
    if is_volume and command.size is not None:
        raise ValueError("--size is for images: volumes are exported with the size of the crops")
    if command.int8 and command.to != "onnx":
        raise ValueError(f"--int8 needs --to onnx, got --to {command.to}")
    if command.size is not None and not TARGETS[command.to].fixed_size:
        raise ValueError(f"--size needs --to executorch: {command.to} has dynamic sizes")
    if command.fixed_means and not is_agc(config.norm):
        raise ValueError(f"--fixed-means needs a run with norm agc, got norm {config.norm}")
    if command.fixed_means and not command.fold:
        raise ValueError("--fixed-means always folds AGC: remove --no-fold")


def _name(command: Export, config: Train) -> str:
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in config.model)
    return f"{name}{'-fixed-means' * command.fixed_means}{'-int8' * command.int8}"


def _write(
    command: Export,
    network: Network,
    sizes: Sizes,
    outputs: list[str],
    images: RunImages,
    file: Path,
    progress: Callable[[str], None],
) -> tuple[Comparison, Accuracies]:
    """Write and compare the file with torch; measure accuracy if its outputs changed.

    `progress` is called with the name of each part of the work.
    """
    target = TARGETS[command.to]
    model = exact = network.model
    if command.fixed_means:
        progress("fixing the means on training images")
        model = exact = calibrate(network.model, images.calibration())
    elif command.fold and is_agc(network.norm):
        model = fold(exact)
    progress("tracing the network")
    program = trace(model, sizes)
    progress(f"writing {file.name}")
    target.write(program, file, outputs, sizes.axes)
    progress(f"comparing {file.name} with torch")
    comparison = check(target.run(file), exact, sizes)
    runs: dict[str, Runner] = {
        "as trained": in_windows(lambda seen: as_tuple(network.model(seen)), images.window)
    }
    # With fixed means the outputs do not depend on the crop, so whole images are used.
    window = None if command.fixed_means else images.window
    if command.fixed_means:
        runs["fixed means"] = lambda images: as_tuple(exact(images))
    if command.int8:
        progress("quantizing to int8 on training images")
        quantize(file, images.calibration())
        runs[", ".join([*list(runs)[1:], "int8"])] = in_windows(target.run(file), window)
    if len(runs) == 1:  # the outputs are unchanged
        return comparison, {}
    progress("evaluating on the validation images")
    with torch.no_grad():
        return comparison, compare_accuracy(runs, images.validation())


def output_names(model: str) -> list[str]:
    """Return the names of a network's outputs."""
    return ["classes", "contour"] if model == "classnet" else ["classes"]


def describe(
    file: str,
    target: TargetName,
    config: Train,
    volumes: VolumeFormat,
    network: Network,
    sizes: Sizes,
    comparison: Comparison,
) -> dict[str, Any]:
    """Describe inputs, outputs, classes and check results of an exported file."""
    batch, *sides = AXES.values() if sizes.fixed is None else (1, *sizes.fixed)
    if sizes.any_batch:
        batch = AXES[0]
    channels = {"classes": len(network.classes), "contour": 1}
    is_segmentation = config.task == "segmentation"
    element = "image" if not is_segmentation else "voxel" if len(sides) == 3 else "pixel"
    return {
        "file": file,
        "target": target,
        "model": config.model,
        "task": config.task,
        "norm": network.norm,
        "input": {
            "name": INPUT,
            "dtype": "float32",
            "shape": [batch, sizes.channels, *sides],
            "channels": _channels(config, sizes.channels),
            "smallest_side": sizes.smallest if sizes.fixed is None else None,
            "sides_are_multiples_of": sizes.step,
            "resizing": _resizing(config, volumes),
            **_normalization(config, volumes, sizes.channels),
        },
        "outputs": [
            {
                "name": name,
                "dtype": "float32",
                "shape": [batch, channels[name], *(sides if is_segmentation else [])],
                "meaning": _MEANING[name].format(element),
            }
            for name in output_names(config.model)
        ],
        "classes": list(network.classes),
        "colors": [list(color) for color in network.palette],
        "check": {
            "largest_difference_to_torch": comparison.difference,
            "rejected_differences": comparison.rejected,
            "tolerance": TOLERANCE,
            "shapes": [list(shape) for shape in comparison.shapes],
        },
        "versions": {"deepcontrol": __version__, **versions(TARGETS[target].extra)},
    }


def _channels(config: Train, channels: int) -> str:
    if len(config.sample_size) == 3:
        return "in the order of dataset.json; axes D, H, W are Z, Y, X of NIfTI"
    return {1: "gray", 3: "RGB"}.get(channels, "in the order of the images")


def _normalization(config: Train, volumes: VolumeFormat, channels: int) -> dict[str, Any]:
    """Return how input values follow from those of the files, with the constants."""
    if len(config.sample_size) == 2:
        return {
            "normalization": "(pixel - mean) / std, for pixels of 0 to 255",
            "mean": [PIXEL_MEAN] * channels,
            "std": [PIXEL_STD] * channels,
        }
    return {
        "normalization": "(value - mean) / std, with mean and std of the channel in the whole "
        "volume; channels with intensities: clipped to low and high, then with their mean and std",
        "intensities": {
            str(channel): values._asdict() for channel, values in volumes.intensities.items()
        },
    }


def _resizing(config: Train, volumes: VolumeFormat) -> str | None:
    """Return how images were resized in training; None if they keep their resolution."""
    if volumes.voxel_size is not None:
        sides = " x ".join(f"{side:g}" for side in volumes.voxel_size)
        return f"to voxels of {sides} mm (D, H, W)"
    height, width = config.image_size
    if config.task == "classification":
        return f"to cover {height}x{width}, cropped at the center"
    if config.has_own_images and config.fit == "resize":
        return (
            f"to fit into {height}x{width} with the aspect ratio of the image, padded at the "
            "bottom and right with its border pixels"
        )
    return None


def _print(
    console: Console,
    description: dict[str, Any],
    out: Path,
    comparison: Comparison,
    accuracies: Accuracies,
) -> None:
    shapes = " and ".join("x".join(map(str, shape)) for shape in comparison.shapes)
    before = " before int8" if description["int8"] else ""
    line = (
        f"{out}: {out.stat().st_size / 2**20:.1f} MiB, described in {out.name}.json and {CARD}; "
        f"largest difference from torch{before} {comparison.difference:.1e} (on {shapes})"
    )
    if comparison.rejected:
        worst = f"{max(comparison.rejected):.1e}"
        line += f"; {len(comparison.rejected)} inputs rejected with differences up to {worst}"
    console.print(escape(line), highlight=False, soft_wrap=True)
    if accuracies:
        table = Table("network", "validation pixel error %", "relabeled pixels %")
        for name, accuracy in accuracies.items():
            shares = (accuracy.pixel_error, accuracy.relabeled)
            table.add_row(name, *(f"{100 * share:.2f}" for share in shares))
        console.print(table)
