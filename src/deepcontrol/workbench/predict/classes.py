"""Classify images with the network of a run: a table, and predictions.csv."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from ..data.batches import normalized
from ..data.pixels import cover_and_crop
from ..folders.runfolder import CONFIG
from ..folders.storage import write_atomic
from ..terminal import printable
from ..train.config_file import check_code, load_config
from .images import ImageFile, images_in
from .tiling import NOT_FINITE, free_memory
from .trained import load_model

BATCH = 32
TABLE = "predictions.csv"


class Classifier(NamedTuple):
    """A trained network and the format of its images."""

    model: nn.Module  # in eval mode
    classes: tuple[str, ...]
    size: tuple[int, int]
    channels: int

    def probabilities(self, images: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Return class probabilities (N, classes) of images (H, W, C) of `size`."""
        device = next(self.model.parameters()).device
        with torch.no_grad():
            batch = normalized(torch.from_numpy(np.stack(images)).to(device))
            return self.model(batch).float().softmax(1).cpu()


class Prediction(NamedTuple):
    image: Path
    probabilities: list[float]  # by class


def load_classifier(
    run: Path, checkpoint: str, device: torch.device, model_name: str | None = None
) -> Classifier:
    """Load the network of a classification run in eval mode.

    Args:
        run: Run folder.
        checkpoint: "best" or "last".
        device: Where the network runs.
        model_name: The run's --model, to allow its code to run if it is a function of any module.

    Raises:
        ValueError: The folder is not a run folder, has no such checkpoint, or needs model_name.
    """
    config, derived = load_config(run)
    config = check_code(config, run, model_name)
    names = derived.get("classes")
    if not isinstance(names, list) or not names:
        raise ValueError(f"{run / CONFIG}: expected a list of classes, got {names!r}")
    model = load_model(run, checkpoint, config, len(names), device)
    return Classifier(model, tuple(map(str, names)), config.image_size, config.in_channels)


def classify(
    classifier: Classifier, paths: Sequence[Path], out: Path, console: Console, errors: Console
) -> int:
    """Classify images, print a table, write predictions.csv; return the exit code.

    The file has a row per image: its path, the most likely class, its probability, and then the
    probability of every class. Images are resized and cropped at their center, as for evaluation.

    Args:
        classifier: The network.
        paths: Image files and folders.
        out: Folder for predictions.csv.
        console: Console for the table.
        errors: Console for the images that cannot be read. They make the exit code 1.
    """
    files = [file for path in paths for file in (images_in(path, out) if path.is_dir() else [path])]
    failed: list[str] = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("images", total=len(files))
        predictions: list[Prediction] = []
        for start in range(0, len(files), BATCH):
            batch = files[start : start + BATCH]
            predictions += _predict(classifier, batch, failed)
            progress.advance(bar, len(batch))
    table = Table("image", "class", "probability %")
    table.columns[2].justify = "right"
    rows = []
    for image, probabilities in predictions:
        best = int(np.argmax(probabilities))
        name, probability = classifier.classes[best], probabilities[best]
        table.add_row(escape(str(image)), escape(name), f"{100 * probability:.1f}")
        rows.append(
            [
                printable(str(image)),
                name,
                f"{probability:.6f}",
                *(f"{p:.6f}" for p in probabilities),
            ]
        )
    if rows:
        header = ["image", "class", "probability", *map(printable, classifier.classes)]
        write_atomic(out / TABLE, _csv(header, rows), inside=out)
        if not console.is_terminal:
            console.width = 200  # do not wrap lines in a log
        console.print(table)
        console.print(escape(f"Table: {out / TABLE}"), highlight=False, soft_wrap=True)
    for reason in failed:
        errors.print(f"[bold red]error:[/] {escape(reason)}", highlight=False, soft_wrap=True)
    if failed:
        console.print(f"{len(failed)} of {len(files)} images failed.", style="bold")
    return 1 if failed else 0


def _predict(
    classifier: Classifier, files: Sequence[Path], failed: list[str]
) -> Iterator[Prediction]:
    """Yield the predictions of the readable images; append the reasons of the others."""
    images: dict[Path, NDArray[np.uint8]] = {}
    for path in files:
        try:
            images[path] = read_image(path, classifier)
        except Exception as error:  # continue with the other images
            failed.append(f"{path}: {str(error).removeprefix(f'{path}: ')}")
    if not images:
        return
    found = classifier.probabilities(list(images.values()))
    for path, probabilities in zip(images, found, strict=True):
        if probabilities.isnan().any():
            failed.append(f"{path}: {NOT_FINITE}")
        else:
            yield Prediction(path, probabilities.tolist())


def read_image(path: Path, classifier: Classifier) -> NDArray[np.uint8]:
    """Read an image at the size and channels that the network was trained on."""
    image = ImageFile(path, free_memory(torch.device("cpu")))
    height, width = image.size
    pixels = image.read((0, height), (0, width), "L" if classifier.channels == 1 else "RGB")
    return cover_and_crop(pixels, classifier.size)


def _csv(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()
