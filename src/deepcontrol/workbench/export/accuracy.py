"""What an export that is not the same function costs: pixel errors on validation images."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..data import VOID, Batches
from ..metrics import ConfusionMatrix
from ..sizes import Size
from ..train.windows import forward_in_windows
from .check import Runner


@dataclass(frozen=True)
class Accuracy:
    pixel_error: float  # the share of wrongly labeled pixels, as `deepcontrol eval` counts it
    relabeled: float  # the share of labeled pixels that get another class than from the first


def compare(runs: Mapping[str, Runner], batches: Batches) -> dict[str, Accuracy]:
    """Each network on the same images; the first is what the others are compared with."""
    classes = len(batches.cache.classes)
    truth = {name: ConfusionMatrix(classes) for name in runs}
    first = {name: ConfusionMatrix(classes) for name in runs}
    for batch in batches.epoch():
        expected = None
        for name, run in runs.items():
            labels = run(batch.images)[0].argmax(1)
            if expected is None:
                expected = labels.masked_fill(batch.labels == VOID, VOID)
            truth[name].update(labels, batch.labels)
            first[name].update(labels, expected)
    return {name: Accuracy(truth[name].pixel_error, first[name].pixel_error) for name in runs}


def in_windows(run: Runner, size: Size | None) -> Runner:
    """The same, with images that are larger than `size` seen in windows of it; classes alone."""
    return lambda images: (forward_in_windows(lambda seen: run(seen)[0], images, size),)
