"""The labels of an image that is larger than what its network learned from: by windows, blended.

AGC's means, and other statistics of what is seen, are then as in training. Each window has its own,
so that neighbors disagree a little where they meet: they overlap by half, and the probabilities
of each count the less, the nearer its edge is.
"""

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data import Size
from ..train.windows import starts_of
from .label import Pixels, Progress, core_of, window_of
from .tiles import Tile


@torch.inference_mode()
def label_blended(
    model: nn.Module, image: Pixels, size: Size, progress: Progress = lambda *_: None
) -> NDArray[np.uint8]:
    """Each pixel's most likely class (H, W), by a model in evaluation mode, in windows of a size.

    Only one row of windows is held at a time.
    """
    (height, width), rows, columns = image.size, *corners(image.size, size)
    own = min(size[0], height), min(size[1], width)
    weight = tent(own, next(model.parameters()).device)
    band = torch.empty(0)  # the weighted probabilities of the rows from `top` on
    ids = np.zeros(image.size, np.uint8)
    done = 0
    for top, following in itertools.pairwise([*rows, height]):
        for left in columns:
            window = (top, top + own[0]), (left, left + own[1])
            tile = Tile(core=window, window=window)
            logits = core_of(model(window_of(image, tile, model)), tile).float()
            if not done:
                band = logits.new_zeros(len(logits), own[0], width)
            band[:, :, left : left + own[1]] += weight * logits.softmax(0)
            done += 1
            progress(done, len(rows) * len(columns))
        ready = following - top  # the next row of windows begins there
        ids[top:following] = band[:, :ready].argmax(0).to(torch.uint8).cpu().numpy()
        if following < height:
            band[:, : own[0] - ready] = band[:, ready:].clone()
            band[:, own[0] - ready :] = 0
    return ids


def corners(image: Size, size: Size) -> tuple[list[int], list[int]]:
    """Where windows of a size begin: their rows and columns.

    >>> corners((384, 512), (256, 512))
    ([0, 128], [0])
    """
    rows, columns = (
        starts_of(whole, own, step=max(1, own // 2)) for whole, own in zip(image, size, strict=True)
    )
    return rows, columns


def tent(size: Size, device: torch.device) -> Tensor:
    """How much each position of a window counts: from its edges to its middle, in proportion.

    >>> tent((1, 4), torch.device("cpu"))
    tensor([[0.2500, 0.7500, 0.7500, 0.2500]])
    """

    def along(length: int) -> Tensor:
        inside = torch.arange(length, device=device) + 0.5
        return torch.minimum(inside, length - inside)

    return along(size[0])[:, None] * along(size[1])
