"""`deepcontrol export`: the network of a run as a file for a device."""

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...convert import calibrate, fold
from ..predict.network import Network, load_network
from ..sizes import Size
from ..train.config import Train, load_config
from .accuracy import Accuracy, compare, in_windows
from .check import Agreement, Runner, check
from .describe import describe, output_names, write_description
from .images import RunImages
from .int8 import quantize
from .packages import require
from .program import Sizes, as_tuple, sizes_of, trace
from .targets import TARGETS, TargetName

Accuracies = dict[str, Accuracy]


@dataclass(frozen=True)
class Export:
    """Write the network of a run as a file for a device, and check it.

    Each AGC (automatic gain control) neuron becomes a convolution with a computed bias first. The
    file is then run on random images of two shapes. If an output is further from torch's than 1e-4
    of the largest (or of 1), nothing is written and the exit code is 1. A JSON file beside it says
    what a developer must know: names, sizes, how pixels become inputs, in which windows a network
    that learned from crops is to be used, the classes.

    Batch, height and width stay open: sides of 64 pixels or more for segnet, multiples of 128 from
    256 on for classnet. executorch plans its memory ahead, so it has one image of one size.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    to: TargetName = "onnx"
    """ONNX, torch.export's own file, or ExecuTorch. The first and the last need an extra."""
    out: Path | None = None
    """The file to write; `export/` in the run folder unless told otherwise."""
    checkpoint: Literal["best", "last"] = "best"
    """Which of the run's networks."""
    fold: bool = True
    """Fold AGC; without, the means are taken of each convolution's output."""
    fixed_means: bool = False
    """Fix AGC's means to those of training images: plain convolutions, no longer the same function.
    What that costs is measured on the run's validation images."""
    int8: bool = False
    """onnx: convolutions in eight bits, their ranges from training images. What that costs is
    measured on the run's validation images."""
    size: Size | None = None
    """executorch: the image's size; that of training unless told otherwise."""
    data_root: Path | None = None
    """The data set's folder for --fixed-means and --int8, if it is not where it was in training."""


def run_export(command: Export, console: Console) -> int:
    """Write the file and its description; raises, and leaves nothing, if it is not right."""
    target = TARGETS[command.to]
    config, _ = load_config(command.run)
    _refuse_contradictions(command, config)
    if target.extra is not None:
        require(f"--to {command.to}", target.extra)
    network = load_network(command.run, command.checkpoint, torch.device("cpu"))
    sizes = sizes_of(network.model, (command.size or config.size) if target.fixed_size else None)
    if command.int8 and not sizes.take(config.size):
        raise ValueError(f"--int8 runs the file on the run's images, and it takes {sizes}")
    out = command.out or command.run / "export" / f"{_name(command, config)}{target.suffix}"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out.parent) as folder:
        file = Path(folder) / f"model{target.suffix}"
        images = RunImages(config, command.data_root)
        agreement, accuracies = _write(
            command, network, sizes, output_names(config.model), images, file
        )
        file.replace(out)
    description = describe(out.name, command.to, config.model, network, sizes, agreement) | {
        "checkpoint": command.checkpoint,
        "folded": network.norm == "agc" and (command.fold or command.fixed_means),
        "fixed_means": command.fixed_means,
        "int8": command.int8,
        "validation": {name: asdict(accuracy) for name, accuracy in accuracies.items()} or None,
    }
    description["check"]["before_int8"] = command.int8
    # Open sizes leave the choice to whoever uses the file, and fixed means do not depend on it.
    window = None if command.fixed_means or sizes.fixed is not None else network.window
    description["input"]["seen_in_windows_of"] = None if window is None else list(window)
    about = out.with_name(f"{out.name}.json")
    write_description(about, description)
    _print(console, description, out, agreement, accuracies)
    return 0


def _refuse_contradictions(command: Export, config: Train) -> None:
    if command.int8 and command.to != "onnx":
        raise ValueError(f"--int8 is for --to onnx, not for {command.to}")
    if command.size is not None and not TARGETS[command.to].fixed_size:
        raise ValueError(f"--size is for --to executorch: {command.to} takes images of any size")
    if command.fixed_means and config.norm != "agc":
        raise ValueError(f"--fixed-means fixes AGC's means, and this run has norm {config.norm}")
    if command.fixed_means and not command.fold:
        raise ValueError("--fixed-means folds AGC: leave --no-fold out")


def _name(command: Export, config: Train) -> str:
    return f"{config.model}{'-fixed-means' * command.fixed_means}{'-int8' * command.int8}"


def _write(
    command: Export,
    network: Network,
    sizes: Sizes,
    outputs: list[str],
    images: RunImages,
    file: Path,
) -> tuple[Agreement, Accuracies]:
    """The file, checked against torch; and what was measured on validation images."""
    target = TARGETS[command.to]
    model = exact = network.model
    if command.fixed_means:
        model = exact = calibrate(network.model, images.calibration())
    elif command.fold and network.norm == "agc":
        model = fold(exact)
    target.write(trace(model, sizes), file, outputs)
    agreement = check(target.run(file), exact, sizes)
    runs: dict[str, Runner] = {
        "as trained": in_windows(lambda seen: as_tuple(network.model(seen)), images.window)
    }
    # Fixed means are no longer those of what is seen: such a network looks at whole images.
    window = None if command.fixed_means else images.window
    if command.fixed_means:
        runs["fixed means"] = lambda images: as_tuple(exact(images))
    if command.int8:
        quantize(file, images.calibration())
        runs[", ".join([*list(runs)[1:], "int8"])] = in_windows(target.run(file), window)
    if len(runs) == 1:  # the same function, as was checked
        return agreement, {}
    with torch.no_grad():
        return agreement, compare(runs, images.validation())


def _print(
    console: Console,
    description: dict[str, Any],
    out: Path,
    agreement: Agreement,
    accuracies: Accuracies,
) -> None:
    shapes = " and ".join("x".join(map(str, shape)) for shape in agreement.shapes)
    before = " before int8" if description["int8"] else ""
    said = (
        f"{out}: {out.stat().st_size / 2**20:.1f} MiB, described in {out.name}.json; largest "
        f"difference to torch{before} {agreement.difference:.1e} (on {shapes})"
    )
    if agreement.passed_over:
        worst = f"{max(agreement.passed_over):.1e}"
        said += f"; {len(agreement.passed_over)} other inputs were passed over, up to {worst}"
    console.print(escape(said), highlight=False, soft_wrap=True)
    if accuracies:
        table = Table("validation images", "wrong pixels %", "labeled otherwise %")
        for name, accuracy in accuracies.items():
            shares = (accuracy.pixel_error, accuracy.relabeled)
            table.add_row(name, *(f"{100 * share:.2f}" for share in shares))
        console.print(table)
