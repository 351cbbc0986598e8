"""SharedMeans: tiles with shared means give the output of the whole image."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, AGCConv2d
from deepcontrol.nn import AGCConvPool2d, SharedMeans

Span = tuple[int, int]


class Pooling(nn.Module):
    """All kinds of layers that can share means, with a pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = AGCConv2d(3, 6, 3, padding=1, activation="leaky_relu")
        self.pool = AGCConvPool2d(6, 8, 3, padding=1)
        self.plain = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = AGC2d(8)
        self.bare = AGC2d(8, affine=False)
        for module in (self.first, self.pool, self.norm):
            nn.init.uniform_(module.mean_scale, 0.5, 1.5)
            nn.init.normal_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        pooled, _ = self.pool(self.first(x))
        return self.bare(self.norm(self.plain(pooled)).relu())


def by_halves(shared: SharedMeans, image: Tensor, at: int, halo: int, stride: int) -> Tensor:
    """Compute the output of an image from an upper and a lower tile."""
    height, width = image.shape[2:]
    upper, lower = image[:, :, : at + halo], image[:, :, at - halo :]
    measuring = True
    while measuring:
        above = shared(upper, ((0, at), (0, width)))
        below = shared(lower, ((halo, height - at + halo), (0, width)))
        measuring = shared.end_pass()
    return torch.cat([above[:, :, : at // stride], below[:, :, halo // stride :]], 2)


@pytest.mark.parametrize("shape", [(1, 3, 32, 20), (2, 3, 39, 17)])
@torch.no_grad()
def test_tiles_equal_the_whole_image(shape: tuple[int, ...]) -> None:
    model, image = Pooling().double(), torch.randn(*shape, dtype=torch.double)
    whole = model(image)
    with SharedMeans(model) as shared:
        assert len(shared.layers) == 4
        tiled = by_halves(shared, image, at=16, halo=6, stride=2)
    torch.testing.assert_close(tiled, whole)
    # The comparison can fail: it does if the halo is too small.
    with SharedMeans(model) as shared:
        seams = by_halves(shared, image, at=16, halo=2, stride=2)
    assert not torch.allclose(seams, whole)


@pytest.mark.parametrize("stride", [3, 5, 6, 7])
@torch.no_grad()
def test_strides_that_are_no_powers_of_two_raise(stride: int) -> None:
    model = nn.Sequential(AGCConv2d(3, 6, stride, stride=stride), AGC2d(6))
    image = torch.randn(1, 3, 24 * stride, 10 * stride)
    refusal = "cannot tell the stride|multiples of the network's stride"  # 7 rounds to 8
    with pytest.raises(ValueError, match=refusal), SharedMeans(model) as shared:
        by_halves(shared, image, at=12 * stride, halo=2 * stride, stride=stride)


@torch.no_grad()
def test_convolutions_without_padding() -> None:
    model = nn.Sequential(AGCConv2d(3, 6, 3), AGCConv2d(6, 6, 3, stride=2)).double()
    image = torch.randn(1, 3, 95, 40, dtype=torch.double)
    with SharedMeans(model) as shared:
        tiled = by_halves(shared, image, at=48, halo=4, stride=2)
    torch.testing.assert_close(tiled, model(image))


@torch.no_grad()
def test_layers_use_their_own_means_afterwards() -> None:
    model, image = Pooling(), torch.randn(1, 3, 16, 16)
    before = model(image)
    with SharedMeans(model) as shared:
        assert shared(image[:, :, :8], ((0, 8), (0, 16))) is None  # the first layer was measured
    torch.testing.assert_close(model(image), before, rtol=0, atol=0)


@torch.no_grad()
def test_layers_work_after_an_error() -> None:
    model = Pooling()
    with pytest.raises(ValueError, match="channels"), SharedMeans(model) as shared:
        shared(torch.randn(1, 4, 16, 16), ((0, 16), (0, 16)))
    assert model(torch.randn(1, 3, 16, 16)).isfinite().all()


def test_interior_off_the_stride_raises() -> None:
    model = Pooling()
    with torch.no_grad(), SharedMeans(model) as shared:
        for _ in range(2):  # the maps of the third layer have half the size
            shared(torch.randn(1, 3, 17, 16), ((0, 9), (0, 16)))
            shared.end_pass()
        with pytest.raises(ValueError, match="0 to 9 of 17 pixels for a map of 8"):
            shared(torch.randn(1, 3, 17, 16), ((0, 9), (0, 16)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "make",
    [
        lambda: AGCConv2d(4, 8, 3, padding=1, activation="silu"),
        lambda: AGC2d(4),
        lambda: AGC2d(4, affine=False),
    ],
    ids=["neuron", "layer", "bare layer"],
)
@torch.no_grad()
def test_one_tile_equals_the_plain_layer(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    layer, x = make().to(dtype), torch.randn(2, 4, 12, 12).add(1).to(dtype)
    with SharedMeans(layer) as shared:
        assert shared(x, ((0, 12), (0, 12))) is None
        assert shared.end_pass()
        y = shared(x, ((0, 12), (0, 12)))
        assert not shared.end_pass()
    assert y.dtype == dtype
    torch.testing.assert_close(y, layer(x))
