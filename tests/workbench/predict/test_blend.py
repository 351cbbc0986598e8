"""Windows of one size over the whole image, each counted the less, the nearer its edge is."""

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deepcontrol.workbench.data.batches import normalized
from deepcontrol.workbench.models import SegNet
from deepcontrol.workbench.models.classnet import ClassesAndContour
from deepcontrol.workbench.predict.blend import corners, label_blended

Span = tuple[int, int]


class Held:
    """An image in memory."""

    def __init__(self, height: int, width: int) -> None:
        rng = np.random.default_rng(0)
        self.pixels = rng.integers(256, size=(height, width, 3)).astype(np.uint8)

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[0], self.pixels.shape[1]

    def read(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        return self.pixels[slice(*rows), slice(*columns)]


class Moody(nn.Module):
    """Says something else of every window, and keeps the sizes of what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Parameter(torch.zeros(()))  # for its device
        self.sizes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> ClassesAndContour:
        self.sizes.append(tuple(x.shape[2:]))
        mood = torch.Generator().manual_seed(int(1000 * x.double().abs().sum()))
        logits = 3 * torch.randn(x.shape, generator=mood)
        return ClassesAndContour(logits, logits[:, :1])


def plainly(model: nn.Module, image: Held, size: tuple[int, int]) -> NDArray[np.uint8]:
    """The same with the probabilities of the whole image in memory."""
    device = next(model.parameters()).device
    whole = normalized(torch.from_numpy(image.pixels).unsqueeze(0).to(device))
    sums: Tensor | None = None
    height, width = (min(pair) for pair in zip(image.size, size, strict=True))
    weight = torch.tensor(
        [
            [(min(i, height - 1 - i) + 0.5) * (min(j, width - 1 - j) + 0.5) for j in range(width)]
            for i in range(height)
        ]
    )
    for top in corners(image.size, size)[0]:
        for left in corners(image.size, size)[1]:
            seen = whole[:, :, top : top + size[0], left : left + size[1]]
            with torch.no_grad():
                outputs = model(seen)
            part = getattr(outputs, "classes", outputs)[0].softmax(0).cpu()
            sums = torch.zeros(len(part), *image.size) if sums is None else sums
            sums[:, top : top + size[0], left : left + size[1]] += weight * part
    assert sums is not None
    return sums.argmax(0).to(torch.uint8).numpy()


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (20, 30), (64, 64), (1, 3), (19, 31)])
def test_all_windows_of_a_pixel_count(size: tuple[int, int]) -> None:
    image, model = Held(20, 31), Moody()
    assert np.array_equal(label_blended(model, image, size), plainly(Moody(), image, size))
    assert set(model.sizes) == {(min(size[0], 20), min(size[1], 31))}


def test_networks(device: str) -> None:
    model, image = SegNet(5, width=0.0625).eval().to(device), Held(150, 97)
    found = label_blended(model, image, (64, 64))
    assert (found != plainly(model, image, (64, 64))).mean() < 0.01  # sums in another order


@pytest.mark.parametrize("whole", [1, 2, 9, 31, 100])
@pytest.mark.parametrize("own", [1, 2, 7, 10, 40])
def test_neighbors_share_a_half(whole: int, own: int) -> None:
    starts, _ = corners((whole, 1), (own, 1))
    assert starts[0] == 0
    assert starts[-1] == max(0, whole - own)
    assert all(0 < b - a <= max(1, own // 2) for a, b in itertools.pairwise(starts))


def test_progress() -> None:
    told: list[tuple[int, int]] = []
    label_blended(Moody(), Held(20, 31), (16, 31), lambda *so_far: told.append(so_far))
    assert told == [(1, 2), (2, 2)]
