"""Pictures of how far a model has come: image, truth, prediction, error, side by side."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ..data import VOID, Batches
from ..data.batches import PIXEL_MEAN, PIXEL_STD
from ..data.sheet import colored
from ..sizes import Size
from .evaluate import evaluating, predict

IMAGES = 4
WRONG = (255, 48, 48)


def sample_sheet(
    model: nn.Module, batches: Batches, autocast: torch.dtype | None, window: Size | None = None
) -> NDArray[np.uint8]:
    """Images from all over a split, a row each: as pixels (H, W, 3).

    Where several processes share the batches, each shows its own images; all have to take part.
    """
    count = len(batches.cache)
    wanted = dict.fromkeys(i * count // IMAGES for i in range(IMAGES))  # of a film, not one scene
    rows: list[NDArray[np.uint8]] = []
    with evaluating(model, batches.device, autocast):
        for number, batch in enumerate(batches.epoch()):
            start = number * batches.batch_size
            here = [i - start for i in wanted if 0 <= i - start < batches.batch_size]
            if not here:
                continue
            predicted = predict(model, batch.images, window)
            for offset in here:
                mine = min(offset // batches.world, len(predicted) - 1)
                rows.append(_row(batch.images[mine], batch.labels[mine], predicted[mine], batches))
    return np.vstack(rows)


def save_png(pixels: NDArray[np.uint8], path: Path) -> None:
    if path.parent.is_symlink():  # a run folder may come from elsewhere
        raise OSError(f"{path.parent} is a link: pictures go into the run folder itself")
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    Image.fromarray(pixels).save(path)


def _row(image: Tensor, labels: Tensor, predicted: Tensor, batches: Batches) -> NDArray[np.uint8]:
    pixels = (image.permute(1, 2, 0).float() * PIXEL_STD + PIXEL_MEAN).round().clamp(0, 255)
    shown = pixels.to(torch.uint8).cpu().numpy()
    truth, guess = labels.cpu().numpy(), predicted.to(torch.uint8).cpu().numpy()
    palette = batches.cache.palette
    return np.hstack(
        [shown, colored(truth, palette), colored(guess, palette), _error(truth, guess, shown)]
    )


def _error(
    truth: NDArray[np.uint8], guess: NDArray[np.uint8], shown: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """What is wrong in red over the darkened image; void, which counts nowhere, in black."""
    gray = shown.mean(2, keepdims=True) * 0.5
    picture = np.repeat(gray, 3, axis=2).astype(np.uint8)
    picture[(guess != truth) & (truth != VOID)] = WRONG
    picture[truth == VOID] = 0
    return picture
