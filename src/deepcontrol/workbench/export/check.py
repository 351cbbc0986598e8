"""Compare an exported file with its network, on random and validation images.

`RunImages` reads the images: training images calibrate, validation images measure the accuracy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..data import VOID, Batches, prepare
from ..data.folder import FolderSource
from ..metrics import ConfusionMatrix
from ..terminal import Size, format_size
from ..train.config import Train
from ..train.data import open_split
from ..train.evaluate import forward_in_windows, split_windows
from .targets import Runner, Shape, Sizes, as_tuple

TOLERANCE = 1e-4  # relative to the largest output, or absolute if that is below 1
# If two values of a pooling window are equal up to rounding, SegNet may unpool to the other
# position, and nearby outputs differ without an error in the file. This is rare, so each shape is
# tried with several inputs until one agrees.
ATTEMPTS = 3
CALIBRATION_IMAGES = 64  # largest number


class MismatchError(ValueError):
    """The outputs of an exported file differ from those of the network."""


@dataclass(frozen=True)
class Comparison:
    """Differences between a file and its network on random images."""

    difference: float  # largest over all shapes
    shapes: list[Shape]
    rejected: list[float]  # differences on inputs that were replaced by another


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of an exported network on the validation set."""

    pixel_error: float  # share of wrong pixels, as in `deepcontrol eval`
    relabeled: float  # share of labeled pixels with another class than the reference network


def check(run: Runner, model: nn.Module, sizes: Sizes) -> Comparison:
    """Compare a file with its network on random images of all `sizes.checked`.

    Raises:
        MismatchError: The outputs differ by more than TOLERANCE.
    """
    generator = torch.Generator().manual_seed(0)
    differences, rejected = [], []
    for shape in sizes.checked:
        attempts = (
            difference(run, model, torch.randn(shape, generator=generator)) for _ in range(ATTEMPTS)
        )
        seen: list[float] = []
        for found in attempts:
            seen.append(found)
            if found <= TOLERANCE:
                break
        else:
            raise MismatchError(
                f"the exported network differs from torch by {min(seen):.1e} on {shape[0]} images "
                f"of {format_size(shape[2:])}, expected at most {TOLERANCE:.0e}: no file was "
                "written"
            )
        differences.append(seen[-1])
        rejected += seen[:-1]
    return Comparison(max(differences), sizes.checked, rejected)


def difference(run: Runner, model: nn.Module, images: Tensor) -> float:
    """Return the largest difference, divided by the largest output or by 1."""
    with torch.no_grad():
        expected = as_tuple(model(images))
    found = run(images)
    if [a.shape for a in found] != [b.shape for b in expected]:
        return float("inf")
    parts = [
        (a - b).abs().max() / b.abs().max().clamp(min=1)
        for a, b in zip(found, expected, strict=True)
    ]
    return torch.stack(parts).max().nan_to_num(nan=float("inf")).item()


def compare_accuracy(runs: Mapping[str, Runner], batches: Batches) -> dict[str, Accuracy]:
    """Measure several networks on the same images. The first one is the reference."""
    classes = len(batches.dataset.classes)
    against_labels = {name: ConfusionMatrix(classes) for name in runs}
    against_first = {name: ConfusionMatrix(classes) for name in runs}
    for batch in batches.epoch():
        reference = None
        for name, run in runs.items():
            predicted = run(batch.images)[0].argmax(1)
            if reference is None:
                reference = predicted.masked_fill(batch.labels == VOID, VOID)
            against_labels[name].update(predicted, batch.labels)
            against_first[name].update(predicted, reference)
    return {
        name: Accuracy(against_labels[name].pixel_error, against_first[name].pixel_error)
        for name in runs
    }


def in_windows(run: Runner, size: Size | None) -> Runner:
    """Run on windows of `size` and join the class logits. None runs on whole images."""
    return lambda images: (forward_in_windows(lambda seen: run(seen)[0], images, size),)


class RunImages:
    """Images of a run's dataset, one at a time and without augmentation."""

    def __init__(self, config: Train, data_root: Path | None = None) -> None:
        self._config = config if data_root is None else replace(config, data_root=data_root)

    def calibration(self) -> Iterator[Tensor]:
        """Iterate over training images (1, 3, H, W), in windows if the run uses them.

        Validation images are not used, so that they can measure the result.
        """
        config = self._config
        source = open_split(config, "train", config.train_limit)
        images = source.files if isinstance(source, FolderSource) else source  # not their tiles
        limit = min(CALIBRATION_IMAGES, len(images))
        source = open_split(config, "train", limit)
        for batch in Batches(prepare(source, config.image_size), 1).epoch():
            yield from split_windows(batch.images, config.window)

    @property
    def window(self) -> Size | None:
        """Window size for larger images; None to use whole images."""
        return self._config.window

    def validation(self) -> Batches:
        """Return the validation set with batch size 1."""
        config = self._config
        source = open_split(config, "val", config.val_limit)
        return Batches(prepare(source, config.image_size), 1)
