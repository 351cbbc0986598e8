"""The labels of one image: whole, or by tiles of which one at a time is on the device."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...nn import SharedMeans
from ..data import Size
from ..data.batches import normalized
from .tiles import Span, Tile

Progress = Callable[[int, int], None]  # (tiles done in all passes, tiles in all)


class Pixels(Protocol):
    """An image that can be read by parts."""

    @property
    def size(self) -> Size: ...

    def read(self, rows: Span, columns: Span) -> NDArray[np.uint8]: ...  # (H, W, 3)


def label(
    model: nn.Module, image: Pixels, tiles: list[Tile], progress: Progress = lambda *_: None
) -> NDArray[np.uint8]:
    """Each pixel's most likely class (H, W), by a model in evaluation mode."""
    ids = np.zeros(image.size, np.uint8)
    for tile, logits in logits_by_tile(model, image, tiles, progress):
        rows, columns = (slice(*span) for span in tile.core)
        ids[rows, columns] = logits.argmax(0).to(torch.uint8).cpu().numpy()
    return ids


@torch.inference_mode()
def logits_by_tile(
    model: nn.Module, image: Pixels, tiles: list[Tile], progress: Progress = lambda *_: None
) -> Iterator[tuple[Tile, Tensor]]:
    """The logits (classes, H, W) of each tile's core.

    Several tiles share one mean for each AGC layer, for which they are passed over once for each,
    and once more for the logits. Without AGC layers, and for a single tile, one pass is all.
    """
    if len(tiles) == 1:  # whose mean is the image's
        (tile,) = tiles
        yield tile, core_of(model(window_of(image, tile, model)), tile)
        progress(1, 1)
        return
    with SharedMeans(model, pads_to=getattr(model, "pads_to", 1)) as shared:
        done, total = 0, len(tiles) * (len(shared.layers) + 1)
        counting = True
        while counting:
            for tile in tiles:
                outputs = shared(window_of(image, tile, model), tile.interior)
                if outputs is not None:
                    yield tile, core_of(outputs, tile)
                done += 1
                progress(done, total)
            counting = shared.end_pass()


def window_of(image: Pixels, tile: Tile, model: nn.Module) -> Tensor:
    """What the model is shown of a tile, (1, 3, H, W), on the model's device."""
    pixels = torch.from_numpy(image.read(*tile.window)).to(next(model.parameters()).device)
    return normalized(pixels.unsqueeze(0))


def core_of(outputs: Any, tile: Tile) -> Tensor:
    """The logits (classes, H, W) of the part that a tile stands for."""
    logits: Tensor = getattr(outputs, "classes", outputs)  # ClassNet gives contours as well
    rows, columns = (slice(*span) for span in tile.interior)
    return logits[0, :, rows, columns]
