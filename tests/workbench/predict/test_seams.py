"""Seams, measured: tiles that share means against the network's output on the whole image."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deepcontrol.workbench.data import open_source
from deepcontrol.workbench.data.batches import normalized
from deepcontrol.workbench.models import ClassNet, SegNet
from deepcontrol.workbench.models.blocks import Norm
from deepcontrol.workbench.predict.label import core_of, label, logits_by_tile, window_of
from deepcontrol.workbench.predict.tiles import Span, Tile, cut, up_to_multiple


class Held:
    """An image in memory."""

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        self.pixels = pixels
        self.size = (pixels.shape[0], pixels.shape[1])

    def read(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        return self.pixels[slice(*rows), slice(*columns)].copy()


def street(height: int, width: int) -> Held:
    return Held(open_source("streets", "val", limit=1).read(0, (height, width)).image)


def network(norm: Norm, kind: type[nn.Module] = SegNet) -> nn.Module:
    """With parameters as far from their start as training takes them, and logits that vary."""
    torch.manual_seed(3)
    model = kind(6, width=0.0625, norm=norm)
    for name, parameter in model.named_parameters():
        if name.endswith("mean_scale"):
            nn.init.uniform_(parameter, 0.6, 1.2)
        elif name.endswith(("bias", "gain")):
            parameter.data.add_(torch.randn(parameter.shape), alpha=0.1)
    return model.eval()


def tiles_for(model: nn.Module, image: Held, core: int, halo: int | None = None) -> list[Tile]:
    unit, reach = int(model.unit), int(model.reach)  # type: ignore[arg-type]
    return cut(
        image.size, (core, core), unit, up_to_multiple(reach, unit) if halo is None else halo
    )


@torch.inference_mode()
def whole(model: nn.Module, image: Held) -> Tensor:
    outputs = model(normalized(torch.from_numpy(image.pixels).unsqueeze(0)))
    return getattr(outputs, "classes", outputs)[0]


def shared(model: nn.Module, image: Held, tiles: list[Tile]) -> Tensor:
    return put_together(image, dict(logits_by_tile(model, image, tiles)))


@torch.inference_mode()
def apart(model: nn.Module, image: Held, tiles: list[Tile]) -> Tensor:
    """Each tile by itself, with means of its own."""
    return put_together(image, {t: core_of(model(window_of(image, t, model)), t) for t in tiles})


def put_together(image: Held, logits: dict[Tile, Tensor]) -> Tensor:
    classes = next(iter(logits.values())).shape[0]
    together = torch.full((classes, *image.size), torch.nan)
    for tile, of_tile in logits.items():
        rows, columns = (slice(*span) for span in tile.core)
        together[:, rows, columns] = of_tile
    return together


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two logits, in units of their spread over the image."""
    return ((a - b).abs().amax() / b.std((1, 2)).mean()).item()


def relabeled(a: Tensor, b: Tensor) -> float:
    """The share of pixels that get another label."""
    return (a.argmax(0) != b.argmax(0)).float().mean().item()


@pytest.mark.parametrize("size", [(256, 448), (237, 451)])
def test_tiles_that_share_means_have_no_seams(size: tuple[int, int]) -> None:
    model, image = network("agc"), street(*size)
    tiles, exact = tiles_for(model, image, core=160), whole(model, image)
    assert len(tiles) == 6
    together, torn = shared(model, image, tiles), apart(model, image, tiles)
    assert distance(together, exact) < 1e-3
    assert relabeled(together, exact) < 1e-3
    # With means of their own, tiles are another image each.
    assert distance(torn, exact) > 0.3
    assert relabeled(torn, exact) > 0.02


def test_the_halo_is_needed() -> None:
    model, image = network("agc"), street(256, 448)
    exact = whole(model, image)
    narrow = shared(model, image, tiles_for(model, image, core=160, halo=32))
    assert distance(narrow, exact) > 0.01


def test_classnet() -> None:
    model, image = network("agc", ClassNet), street(100, 1500)
    tiles, exact = tiles_for(model, image, core=512), whole(model, image)
    assert [t.window[1] for t in tiles] == [(0, 1280), (0, 1500), (256, 1500)]
    assert distance(shared(model, image, tiles), exact) < 1e-3
    assert distance(apart(model, image, tiles), exact) > 0.1


def test_classnet_where_tiles_are_padded_by_much() -> None:
    model, image = network("agc", ClassNet), street(270, 400)  # as 384x512
    tiles, exact = tiles_for(model, image, core=256), whole(model, image)
    assert len(tiles) == 4
    assert distance(shared(model, image, tiles), exact) < 1e-3


@pytest.mark.parametrize("norm", ["bn", "none"])
def test_one_pass_without_agc(norm: Norm) -> None:
    model, image = network(norm), street(224, 448)
    tiles = tiles_for(model, image, core=128)
    progress: list[tuple[int, int]] = []
    ids = label(model, image, tiles, lambda *done: progress.append(done))
    assert progress == [(i + 1, len(tiles)) for i in range(len(tiles))]
    assert (ids != whole(model, image).argmax(0).numpy()).mean() < 1e-3


def test_passes_are_counted() -> None:
    model, image = network("agc"), street(64, 96)
    tiles = tiles_for(model, image, core=64)
    progress: list[tuple[int, int]] = []
    label(model, image, tiles, lambda *done: progress.append(done))
    assert len(tiles) == 2
    assert len(progress) == 52
    assert progress[-1] == (52, 52)  # 25 layers, and the output


def test_an_image_that_is_one_tile_goes_through_whole() -> None:
    model, image = network("agc"), street(64, 96)
    (tile,) = tiles_for(model, image, core=96)
    assert torch.equal(shared(model, image, [tile]), whole(model, image))
