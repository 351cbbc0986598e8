"""The tile that the free memory takes."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from deepcontrol.workbench.models import SegNet
from deepcontrol.workbench.predict.memory import (
    SHARE,
    _left_to_group,
    automatic_tile,
    bytes_per_pixel,
)


def test_bytes_of_a_chain() -> None:
    """Of a chain, the input and the output of one layer live at once, and the image."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 4, 1))
    assert bytes_per_pixel(model, unit=8) == 4 * (3 + 8 + 16)
    assert all(not p.is_meta for p in model.parameters())


def test_bytes_are_per_pixel() -> None:
    model = SegNet(19, width=0.125)
    assert bytes_per_pixel(model, 32) == pytest.approx(bytes_per_pixel(model, 64), rel=0.01)


@pytest.mark.parametrize("free", [2**24, 2**27, 2**30])
def test_a_tile_fits(free: int) -> None:
    each, halo = bytes_per_pixel(SegNet(19, width=0.125), 32), 192
    height, width = automatic_tile(each, (20000, 30000), 32, halo, free)
    assert height == width
    assert height % 32 == 0
    window = (height + 2 * halo) ** 2 * each
    assert window <= SHARE * free or height == halo
    next_larger = (height + 32 + 2 * halo) ** 2 * each
    assert next_larger > SHARE * free


def test_an_image_that_fits_stays_whole() -> None:
    image = (333, 512)
    enough = math.ceil(math.prod(image) * 276 / SHARE)
    assert automatic_tile(276, image, 32, 192, enough) == image
    assert automatic_tile(276, image, 32, 192, enough - 1) != image


def test_a_containers_limit(tmp_path: Path) -> None:
    assert _left_to_group(tmp_path) > 2**60
    (tmp_path / "memory.current").write_text("300\n")
    for limit, left in (("max", 2**62), ("1000", 700), ("200", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert _left_to_group(tmp_path) == left


@pytest.mark.gpu
def test_a_gpus_peak_is_what_was_counted() -> None:
    model = SegNet(19, width=0.5).cuda().eval()
    counted = bytes_per_pixel(model, 32) * 1024 * 1024
    image = torch.randn(1, 3, 1024, 1024, device="cuda")
    with torch.inference_mode():
        model(image)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(image)
    assert torch.cuda.max_memory_allocated() - before < counted / SHARE
