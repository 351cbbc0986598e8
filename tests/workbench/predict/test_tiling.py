"""Tiles: their geometry, shared means, blended windows, and the choice of a size by memory."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deepcontrol.workbench.data import open_source
from deepcontrol.workbench.data.batches import normalized
from deepcontrol.workbench.models import ClassNet, Norm, SegNet
from deepcontrol.workbench.models.segmentation import ClassesAndContour
from deepcontrol.workbench.predict.tiling import (
    MEMORY_FRACTION,
    Span,
    Tile,
    _cgroup_headroom,
    bytes_per_pixel,
    choose_tile_size,
    core_logits,
    cut_tiles,
    label_blended,
    label_resized,
    label_tiled,
    read_window,
    round_up,
    tile_logits,
    window_grid,
)


class ArrayImage:
    """An image in memory."""

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        self.pixels = pixels
        self.size = (pixels.shape[0], pixels.shape[1])

    def read(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        return self.pixels[slice(*rows), slice(*columns)].copy()


def street(height: int, width: int) -> ArrayImage:
    return ArrayImage(open_source("streets", "val", limit=1).read(0, (height, width)).image)


def noise(height: int, width: int) -> ArrayImage:
    rng = np.random.default_rng(0)
    return ArrayImage(rng.integers(256, size=(height, width, 3)).astype(np.uint8))


def class_logits(outputs: object) -> Tensor:
    return getattr(outputs, "classes", outputs)  # type: ignore[return-value]


@pytest.mark.parametrize("size", [(32, 32), (97, 225), (128, 400), (333, 64)])
@pytest.mark.parametrize("core", [(32, 32), (64, 96), (512, 512)])
def test_cores_partition_the_image(size: tuple[int, int], core: tuple[int, int]) -> None:
    seen = np.zeros(size, int)
    for tile in cut_tiles(size, core, stride=32, halo=64):
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


def test_halo_must_be_a_multiple_of_the_stride() -> None:
    with pytest.raises(ValueError, match="multiple of the total stride 32, got 40 pixels"):
        cut_tiles((64, 64), (32, 32), stride=32, halo=40)


@pytest.mark.parametrize(("network", "length"), [(SegNet, 512), (ClassNet, 1792)])
def test_receptive_radius(network: type[SegNet | ClassNet], length: int) -> None:
    """Without means, pixels beyond the radius from an aligned border have no effect before it.

    A strip of the height of the total stride is enough: both sides have the same receptive field.
    """
    torch.manual_seed(0)
    model = make_sensitive_(network(4, width=0.0625).double().eval())
    stride, radius = network.total_stride, network.receptive_radius
    border = length // 2 // stride * stride
    image = torch.rand(1, 3, stride, length, dtype=torch.double)
    with torch.no_grad():
        before = class_logits(model(image))[..., :border]
        beyond, within = image.clone(), image.clone()
        beyond[..., border + radius :] += 1e3
        within[..., border + radius - stride : border + radius] += 1e3
        assert torch.equal(class_logits(model(beyond))[..., :border], before)
        assert not torch.equal(class_logits(model(within))[..., :border], before)


def make_sensitive_(model: nn.Module) -> nn.Module:
    """Use positive filters and no means, so that every visible pixel changes the output."""
    for name, parameter in model.named_parameters():
        nn.init.zeros_(parameter) if name.endswith("mean_scale") else parameter.data.abs_()
    return model


def network(norm: Norm, kind: type[nn.Module] = SegNet) -> nn.Module:
    """Build a network with parameters away from their initial values and logits that vary."""
    torch.manual_seed(3)
    model = kind(6, width=0.0625, norm=norm)
    for name, parameter in model.named_parameters():
        if name.endswith("mean_scale"):
            nn.init.uniform_(parameter, 0.6, 1.2)
        elif name.endswith(("bias", "gain")):
            parameter.data.add_(torch.randn(parameter.shape), alpha=0.1)
    return model.eval()


def tiles_for(
    model: nn.Module, image: ArrayImage, core: int, halo: int | None = None
) -> list[Tile]:
    stride, radius = int(model.total_stride), int(model.receptive_radius)  # type: ignore[arg-type]
    return cut_tiles(
        image.size, (core, core), stride, round_up(radius, stride) if halo is None else halo
    )


@torch.inference_mode()
def whole_logits(model: nn.Module, image: ArrayImage) -> Tensor:
    return class_logits(model(normalized(torch.from_numpy(image.pixels).unsqueeze(0))))[0]


def shared_logits(model: nn.Module, image: ArrayImage, tiles: list[Tile]) -> Tensor:
    return stitch(image, dict(tile_logits(model, image, tiles)))


@torch.inference_mode()
def separate_logits(model: nn.Module, image: ArrayImage, tiles: list[Tile]) -> Tensor:
    """Compute each tile with its own means."""
    return stitch(image, {t: core_logits(model(read_window(image, t, model)), t) for t in tiles})


def stitch(image: ArrayImage, logits: dict[Tile, Tensor]) -> Tensor:
    classes = next(iter(logits.values())).shape[0]
    together = torch.full((classes, *image.size), torch.nan)
    for tile, of_tile in logits.items():
        rows, columns = (slice(*span) for span in tile.core)
        together[:, rows, columns] = of_tile
    return together


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two logits, relative to their standard deviation."""
    return ((a - b).abs().amax() / b.std((1, 2)).mean()).item()


def relabeled(a: Tensor, b: Tensor) -> float:
    """Return the share of pixels with different labels."""
    return (a.argmax(0) != b.argmax(0)).float().mean().item()


@pytest.mark.parametrize("size", [(256, 448), (237, 451)])
def test_tiles_with_shared_means_have_no_seams(size: tuple[int, int]) -> None:
    model, image = network("agc"), street(*size)
    tiles, exact = tiles_for(model, image, core=160), whole_logits(model, image)
    assert len(tiles) == 6
    together, torn = shared_logits(model, image, tiles), separate_logits(model, image, tiles)
    assert distance(together, exact) < 1e-3
    assert relabeled(together, exact) < 1e-3
    # Tiles with separate means differ.
    assert distance(torn, exact) > 0.3
    assert relabeled(torn, exact) > 0.02


def test_narrow_halo_changes_the_logits() -> None:
    model, image = network("agc"), street(256, 448)
    exact = whole_logits(model, image)
    narrow = shared_logits(model, image, tiles_for(model, image, core=160, halo=32))
    assert distance(narrow, exact) > 0.01


@pytest.mark.slow
def test_classnet() -> None:
    model, image = network("agc", ClassNet), street(100, 1500)
    tiles, exact = tiles_for(model, image, core=512), whole_logits(model, image)
    assert [t.window[1] for t in tiles] == [(0, 1280), (0, 1500), (256, 1500)]
    assert distance(shared_logits(model, image, tiles), exact) < 1e-3
    assert distance(separate_logits(model, image, tiles), exact) > 0.1


@pytest.mark.slow
def test_classnet_with_large_padding() -> None:
    model, image = network("agc", ClassNet), street(270, 400)  # padded to 384x512
    tiles, exact = tiles_for(model, image, core=256), whole_logits(model, image)
    assert len(tiles) == 4
    assert distance(shared_logits(model, image, tiles), exact) < 1e-3


@pytest.mark.parametrize("norm", ["bn", "none"])
def test_one_pass_without_agc(norm: Norm) -> None:
    model, image = network(norm), street(224, 448)
    tiles = tiles_for(model, image, core=128)
    progress: list[tuple[int, int]] = []
    ids = label_tiled(model, image, tiles, lambda *done: progress.append(done))
    assert progress == [(i + 1, len(tiles)) for i in range(len(tiles))]
    assert (ids != whole_logits(model, image).argmax(0).numpy()).mean() < 1e-3


def test_progress_counts_all_passes() -> None:
    model, image = network("agc"), street(64, 96)
    tiles = tiles_for(model, image, core=64)
    progress: list[tuple[int, int]] = []
    label_tiled(model, image, tiles, lambda *done: progress.append(done))
    assert len(tiles) == 2
    assert len(progress) == 52
    assert progress[-1] == (52, 52)  # 25 AGC layers and the output


def test_single_tile_is_the_whole_image() -> None:
    model, image = network("agc"), street(64, 96)
    (tile,) = tiles_for(model, image, core=96)
    assert torch.equal(shared_logits(model, image, [tile]), whole_logits(model, image))


class RandomLogits(nn.Module):
    """Return logits that depend on the whole window, and record the window sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.device_parameter = nn.Parameter(torch.zeros(()))
        self.sizes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> ClassesAndContour:
        self.sizes.append(tuple(x.shape[2:]))
        generator = torch.Generator().manual_seed(int(1000 * x.double().abs().sum()))
        logits = 3 * torch.randn(x.shape, generator=generator)
        return ClassesAndContour(logits, logits[:, :1])


def test_resized_outputs_that_are_not_finite() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(torch.nan))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x

    with pytest.raises(ValueError, match="not finite"):
        label_resized(Broken().eval(), noise(40, 64), (32, 32))


def reference_blended(
    model: nn.Module, image: ArrayImage, size: tuple[int, int]
) -> NDArray[np.uint8]:
    """Blend windows with the probabilities of the whole image in memory."""
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
    for top in window_grid(image.size, size)[0]:
        for left in window_grid(image.size, size)[1]:
            seen = whole[:, :, top : top + size[0], left : left + size[1]]
            with torch.no_grad():
                part = class_logits(model(seen))[0].softmax(0).cpu()
            sums = torch.zeros(len(part), *image.size) if sums is None else sums
            sums[:, top : top + size[0], left : left + size[1]] += weight * part
    assert sums is not None
    return sums.argmax(0).to(torch.uint8).numpy()


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (20, 30), (64, 64), (1, 3), (19, 31)])
def test_blending_uses_all_windows_of_a_pixel(size: tuple[int, int]) -> None:
    image, model = noise(20, 31), RandomLogits()
    expected = reference_blended(RandomLogits(), image, size)
    probabilities = np.full((3, 20, 31), np.nan, np.float32)
    found = label_blended(model, image, size, probabilities=probabilities)
    assert np.array_equal(found, expected)
    assert np.array_equal(probabilities.argmax(0), expected)
    assert np.allclose(probabilities.sum(0), 1, atol=1e-5)
    assert set(model.sizes) == {(min(size[0], 20), min(size[1], 31))}


def test_blending_with_a_network(device: str) -> None:
    model, image = SegNet(5, width=0.0625).eval().to(device), noise(150, 97)
    found = label_blended(model, image, (64, 64))
    # The order of the sums differs.
    assert (found != reference_blended(model, image, (64, 64))).mean() < 0.01


@pytest.mark.parametrize("whole", [1, 2, 9, 31, 100])
@pytest.mark.parametrize("own", [1, 2, 7, 10, 40])
def test_windows_overlap_by_half(whole: int, own: int) -> None:
    starts, _ = window_grid((whole, 1), (own, 1))
    assert starts[0] == 0
    assert starts[-1] == max(0, whole - own)
    assert all(0 < b - a <= max(1, own // 2) for a, b in itertools.pairwise(starts))


def test_progress_of_blending() -> None:
    progress: list[tuple[int, int]] = []
    label_blended(RandomLogits(), noise(20, 31), (16, 31), lambda *done: progress.append(done))
    assert progress == [(1, 2), (2, 2)]


def test_bytes_per_pixel_of_a_chain() -> None:
    """The input and the output of one layer are alive at the same time, and the image."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 4, 1))
    assert bytes_per_pixel(model, stride=8) == 4 * (3 + 8 + 16)
    assert all(not p.is_meta for p in model.parameters())


def test_bytes_per_pixel_do_not_depend_on_the_size() -> None:
    model = SegNet(19, width=0.125)
    assert bytes_per_pixel(model, 32) == pytest.approx(bytes_per_pixel(model, 64), rel=0.01)


@pytest.mark.parametrize("free", [2**24, 2**27, 2**30])
def test_chosen_tile_is_the_largest_that_fits(free: int) -> None:
    each, halo = bytes_per_pixel(SegNet(19, width=0.125), 32), 192
    height, width = choose_tile_size(each, (20000, 30000), 32, halo, free)
    assert height == width
    assert height % 32 == 0
    window = (height + 2 * halo) ** 2 * each
    assert window <= MEMORY_FRACTION * free or height == halo
    next_larger = (height + 32 + 2 * halo) ** 2 * each
    assert next_larger > MEMORY_FRACTION * free


def test_image_that_fits_is_not_tiled() -> None:
    image = (333, 512)
    enough = math.ceil(math.prod(image) * 276 / MEMORY_FRACTION)
    assert choose_tile_size(276, image, 32, 192, enough) == image
    assert choose_tile_size(276, image, 32, 192, enough - 1) != image


def test_memory_limit_of_a_container(tmp_path: Path) -> None:
    assert _cgroup_headroom(tmp_path) > 2**60
    (tmp_path / "memory.current").write_text("300\n")
    for limit, left in (("max", 2**62), ("1000", 700), ("200", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert _cgroup_headroom(tmp_path) == left


@pytest.mark.gpu
def test_gpu_peak_memory_is_within_the_estimate() -> None:
    model = SegNet(19, width=0.5).cuda().eval()
    estimate = bytes_per_pixel(model, 32) * 1024 * 1024
    image = torch.randn(1, 3, 1024, 1024, device="cuda")
    with torch.inference_mode():
        model(image)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(image)
    assert torch.cuda.max_memory_allocated() - before < estimate / MEMORY_FRACTION
