"""Tiles make up the image, once each pixel, and see as far as the network does."""

import numpy as np
import pytest
import torch
from torch import nn

from deepcontrol.workbench.models import ClassNet, SegNet
from deepcontrol.workbench.predict.tiles import cut


@pytest.mark.parametrize("size", [(32, 32), (97, 225), (128, 400), (333, 64)])
@pytest.mark.parametrize("core", [(32, 32), (64, 96), (512, 512)])
def test_cores_make_up_the_image(size: tuple[int, int], core: tuple[int, int]) -> None:
    seen = np.zeros(size, int)
    for tile in cut(size, core, unit=32, halo=64):
        rows, columns = (slice(*span) for span in tile.core)
        seen[rows, columns] += 1
        for (start, stop), (begin, end), whole, most in zip(
            tile.core, tile.window, size, core, strict=True
        ):
            assert stop - start <= most
            assert begin % 32 == start % 32 == 0
            assert begin == max(0, start - 64)
            assert end == min(whole, stop + 64)
        (top, _), (left, _) = tile.interior
        assert (top + tile.window[0][0], left + tile.window[1][0]) == (rows.start, columns.start)
    assert (seen == 1).all()


def test_a_halo_lies_on_the_unit() -> None:
    with pytest.raises(ValueError, match="halo of 40 pixels"):
        cut((64, 64), (32, 32), unit=32, halo=40)


@pytest.mark.parametrize(("network", "length"), [(SegNet, 512), (ClassNet, 1792)])
def test_reach_is_how_far_a_network_sees(network: type[SegNet | ClassNet], length: int) -> None:
    """Without means, what lies beyond the reach of an aligned border changes nothing before it.

    A strip as high as the unit will do: what a network sees is the same along both sides.
    """
    torch.manual_seed(0)
    model = open_all_(network(4, width=0.0625).double().eval())
    unit, reach = network.unit, network.reach
    border = length // 2 // unit * unit
    image = torch.rand(1, 3, unit, length, dtype=torch.double)
    with torch.no_grad():
        before = logits(model, image)[..., :border]
        beyond, within = image.clone(), image.clone()
        beyond[..., border + reach :] += 1e3
        within[..., border + reach - unit : border + reach] += 1e3
        assert torch.equal(logits(model, beyond)[..., :border], before)
        assert not torch.equal(logits(model, within)[..., :border], before)


def logits(model: nn.Module, image: torch.Tensor) -> torch.Tensor:
    outputs = model(image)
    return getattr(outputs, "classes", outputs)


def open_all_(model: nn.Module) -> nn.Module:
    """Positive filters, no means: everything that a layer can see changes what it says."""
    for name, parameter in model.named_parameters():
        nn.init.zeros_(parameter) if name.endswith("mean_scale") else parameter.data.abs_()
    return model
