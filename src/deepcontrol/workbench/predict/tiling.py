"""Label an image: whole, in tiles with shared means, in blended windows, resized.

A tile has a core, and cores do not overlap. The network sees a window: the core with a halo around
it. The halo is as wide as the receptive field, so that the border of the window does not affect the
core. Cores and windows start at multiples of the total stride of the network, so that poolings are
aligned as in the whole image. All tiles share the mean of the whole image in each AGC layer.

A network that was trained on crops of its images should see windows of the crop size instead, each
with its own statistics. Such windows overlap by half, and their probabilities are blended. A
network that was trained on resized images sees them resized, and its logits are interpolated.
"""

import copy
import itertools
import math
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...nn import SharedMeans
from ..data import Size
from ..data.batches import normalized
from ..data.folder import fit_image, fitting
from ..data.sample import window_starts

# Share of the free memory for the feature maps of an image or a tile. Their size is computed; the
# workspaces of convolutions are not, and use the rest.
MEMORY_FRACTION = 0.5
NOT_FINITE = "the network's outputs for this image are not finite"
_BAND_VALUES = 2**25  # logits that are interpolated at a time: 128 MiB
PROBE_STRIDES = 4  # side of the image for the memory estimate, in total strides

Span = tuple[int, int]  # start and stop, in pixels
Progress = Callable[[int, int], None]  # (tiles done over all passes, tiles in total)


class RegionReader(Protocol):
    """An image that can be read in regions."""

    @property
    def size(self) -> Size: ...

    def read(self, rows: Span, columns: Span) -> NDArray[np.uint8]: ...  # (H, W, C)


@dataclass(frozen=True)
class Tile:
    """A part of an image: the core is labeled, the window is the network input."""

    core: tuple[Span, Span]  # rows, columns
    window: tuple[Span, Span]

    @property
    def size(self) -> Size:
        (top, bottom), (left, right) = self.window
        return bottom - top, right - left

    @property
    def interior(self) -> tuple[Span, Span]:
        """The core in coordinates of the window."""
        rows, columns = (
            (start - whole[0], stop - whole[0])
            for (start, stop), whole in zip(self.core, self.window, strict=True)
        )
        return rows, columns


def cut_tiles(image: Size, core: Size, stride: int, halo: int) -> list[Tile]:
    """Cut an image into tiles, row by row.

    Args:
        image: Size of the image.
        core: Largest size of a core. Cores of a row or column have about equal lengths.
        stride: Total stride of the network. Cores and windows start at multiples of it.
        halo: Width of the border around a core, a multiple of `stride`.

    >>> [tile.window[1] for tile in cut_tiles((64, 300), core=(64, 128), stride=32, halo=32)]
    [(0, 160), (96, 288), (224, 300)]
    """
    if halo % stride:
        raise ValueError(f"halo must be a multiple of the total stride {stride}, got {halo} pixels")
    rows, columns = (_spans(*a, stride, halo) for a in zip(image, core, strict=True))
    return [Tile((r[0], c[0]), (r[1], c[1])) for r in rows for c in columns]


def _spans(length: int, core: int, stride: int, halo: int) -> list[tuple[Span, Span]]:
    """Return the cores and windows along one side. Only the last core may be shorter."""
    count = -(-length // core)
    step = round_up(-(-length // count), stride)
    cores = [(start, min(start + step, length)) for start in range(0, length, step)]
    return [((a, b), (max(0, a - halo), min(length, b + halo))) for a, b in cores]


def round_up(length: int, multiple: int) -> int:
    """Round a length up to a multiple.

    >>> round_up(211, 32)
    224
    """
    return -(-length // multiple) * multiple


def label_tiled(
    model: nn.Module,
    image: RegionReader,
    tiles: list[Tile],
    progress: Progress = lambda *_: None,
    probabilities: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """Return the most likely class of each pixel (H, W), for a model in eval mode.

    `probabilities` (classes, H, W) is filled if it is given.
    """
    ids = np.zeros(image.size, np.uint8)
    for tile, logits in tile_logits(model, image, tiles, progress):
        rows, columns = (slice(*span) for span in tile.core)
        ids[rows, columns] = logits.argmax(0).to(torch.uint8).cpu().numpy()
        if probabilities is not None:
            probabilities[:, rows, columns] = logits.float().softmax(0).cpu().numpy()
    return ids


@torch.inference_mode()
def tile_logits(
    model: nn.Module, image: RegionReader, tiles: list[Tile], progress: Progress = lambda *_: None
) -> Iterator[tuple[Tile, Tensor]]:
    """Yield the logits (classes, H, W) of the core of each tile.

    With several tiles and AGC layers, there is one pass over all tiles per AGC layer to compute its
    shared mean, and a last pass for the logits. Otherwise there is a single pass.
    """
    if len(tiles) == 1:  # its mean is the mean of the image
        (tile,) = tiles
        yield tile, core_logits(model(read_window(image, tile, model)), tile)
        progress(1, 1)
        return
    with SharedMeans(model, pads_to=getattr(model, "pad_multiple", 1)) as shared:
        done, total = 0, len(tiles) * (len(shared.layers) + 1)
        counting = True
        while counting:
            for tile in tiles:
                outputs = shared(read_window(image, tile, model), tile.interior)
                if outputs is not None:
                    yield tile, core_logits(outputs, tile)
                done += 1
                progress(done, total)
            counting = shared.end_pass()


@torch.inference_mode()
def label_blended(
    model: nn.Module,
    image: RegionReader,
    size: Size,
    progress: Progress = lambda *_: None,
    probabilities: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """Return the class of each pixel (H, W) from overlapping windows of `size`.

    `probabilities` (classes, H, W) is filled if it is given.

    The probabilities of a pixel are averaged over its windows, with weights that fall linearly from
    the center of a window to its edges. Only one row of windows is held in memory. The model must
    be in eval mode.
    """
    (height, width), rows, columns = image.size, *window_grid(image.size, size)
    own = min(size[0], height), min(size[1], width)
    weight = blend_weights(own, next(model.parameters()).device)
    band = torch.empty(0)  # weighted probabilities of the rows from `top` on
    ids = np.zeros(image.size, np.uint8)
    done = 0
    for top, following in itertools.pairwise([*rows, height]):
        for left in columns:
            window = (top, top + own[0]), (left, left + own[1])
            tile = Tile(core=window, window=window)
            logits = core_logits(model(read_window(image, tile, model)), tile).float()
            if not done:
                band = logits.new_zeros(len(logits), own[0], width)
            band[:, :, left : left + own[1]] += weight * logits.softmax(0)
            done += 1
            progress(done, len(rows) * len(columns))
        ready = following - top  # the next row of windows does not change these rows
        done_rows = band[:, :ready]
        ids[top:following] = done_rows.argmax(0).to(torch.uint8).cpu().numpy()
        if probabilities is not None:
            probabilities[:, top:following] = (done_rows / done_rows.sum(0)).cpu().numpy()
        if following < height:
            band[:, : own[0] - ready] = band[:, ready:].clone()
            band[:, own[0] - ready :] = 0
    return ids


@torch.inference_mode()
def label_resized(
    model: nn.Module,
    image: RegionReader,
    size: Size,
    probabilities: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """Return each pixel's class (H, W) for an image that the network sees at `size`.

    The image is resized to fit into `size` and padded, as in training. The logits are interpolated
    back to its own size. `probabilities` (classes, H, W) is filled if it is given.

    Raises:
        ValueError: A logit is not finite. argmax would count NaN as a class.
    """
    height, width = image.size
    pixels = fit_image(image.read((0, height), (0, width)), size)
    device = next(model.parameters()).device
    outputs = model(normalized(torch.from_numpy(pixels).to(device).unsqueeze(0)))
    logits: Tensor = getattr(outputs, "classes", outputs)  # ClassNet also returns contours
    own = fitting(image.size, size)
    logits = logits[:, :, : own[0], : own[1]].float()
    if not torch.isfinite(logits).all():
        raise ValueError(NOT_FINITE)
    return enlarge_labels(logits, image.size, probabilities)


def enlarge_labels(
    logits: Tensor, size: Size, probabilities: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Return the classes (H, W) of logits (1, classes, h, w), interpolated to `size`.

    The interpolation is bilinear. It runs in bands of rows, because the logits of a large image
    with many classes need gigabytes.
    """
    height, width = size
    ids = np.empty(size, np.uint8)
    rows_at_once = max(1, _BAND_VALUES // (logits.shape[1] * width))
    x = (torch.arange(width, device=logits.device) + 0.5) / width * 2 - 1
    for top in range(0, height, rows_at_once):
        bottom = min(height, top + rows_at_once)
        y = (torch.arange(top, bottom, device=logits.device) + 0.5) / height * 2 - 1
        grid = torch.stack(
            [x.expand(bottom - top, width), y.unsqueeze(1).expand(bottom - top, width)], -1
        )
        band = functional.grid_sample(
            logits, grid.unsqueeze(0), padding_mode="border", align_corners=False
        )
        ids[top:bottom] = band.argmax(1)[0].to(torch.uint8).cpu().numpy()
        if probabilities is not None:
            probabilities[:, top:bottom] = band[0].softmax(0).cpu().numpy()
    return ids


def window_grid(image: Size, size: Size) -> tuple[list[int], list[int]]:
    """Return the first rows and the first columns of windows that overlap by half.

    >>> window_grid((384, 512), (256, 512))
    ([0, 128], [0])
    """
    rows, columns = (
        window_starts(whole, own, stride=max(1, own // 2))
        for whole, own in zip(image, size, strict=True)
    )
    return rows, columns


def blend_weights(size: Size, device: torch.device) -> Tensor:
    """Return the weights of a window (H, W), proportional to edge distances.

    >>> blend_weights((1, 4), torch.device("cpu"))
    tensor([[0.2500, 0.7500, 0.7500, 0.2500]])
    """

    def along(length: int) -> Tensor:
        inside = torch.arange(length, device=device) + 0.5
        return torch.minimum(inside, length - inside)

    return along(size[0])[:, None] * along(size[1])


def read_window(image: RegionReader, tile: Tile, model: nn.Module) -> Tensor:
    """Read a tile's window as a network input (1, 3, H, W) on the model's device."""
    pixels = torch.from_numpy(image.read(*tile.window)).to(next(model.parameters()).device)
    return normalized(pixels.unsqueeze(0))


def core_logits(outputs: Any, tile: Tile) -> Tensor:
    """Crop the outputs for a window to the logits (classes, H, W) of the core.

    Raises:
        ValueError: A logit is not finite. argmax would count NaN as a class.
    """
    logits: Tensor = getattr(outputs, "classes", outputs)  # ClassNet also returns contours
    rows, columns = (slice(*span) for span in tile.interior)
    core = logits[0, :, rows, columns]
    if not torch.isfinite(core).all():
        raise ValueError(NOT_FINITE)
    return core


def choose_tile_size(per_pixel: float, image: Size, stride: int, halo: int, free: int) -> Size:
    """Return the largest size of a core that fits in memory.

    That is the whole image, or a square core with a window that needs at most MEMORY_FRACTION of
    the `free` bytes. A core is at least as wide as its halo, even if its window needs more.
    """
    pixels = MEMORY_FRACTION * free / per_pixel
    if math.prod(image) <= pixels:
        return image
    side = int(math.sqrt(pixels)) - 2 * halo
    side = max(round_up(max(halo, 1), stride), side // stride * stride)
    return side, side


def bytes_per_pixel(model: nn.Module, stride: int) -> float:
    """Estimate the peak memory of a forward pass per pixel, on the meta device."""
    side = PROBE_STRIDES * stride
    on_meta = copy.deepcopy(model).to("meta")
    with torch.inference_mode(), _LiveBytes() as live:
        on_meta(torch.empty(1, getattr(model, "in_channels", 3), side, side, device="meta"))
    return live.peak / side**2


class _LiveBytes(TorchDispatchMode):
    """Track the bytes of all live storages that ops allocate, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {_storage(a) for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)}
        result = op(*args, **(kwargs or {}))
        for a in tree_leaves(result):
            if isinstance(a, Tensor) and _storage(a) not in self._seen | known:
                self._add(a)
        return result

    def _add(self, a: Tensor) -> None:
        storage = a.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes


def _storage(a: Tensor) -> int:
    return a.untyped_storage()._cdata


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of the host within its container limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_available_memory(), _cgroup_headroom())


def _available_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(kib) * 1024
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_headroom(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes left under the container's memory limit; 2^62 without one."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return 2**62
    return 2**62 if limit == "max" else max(0, int(limit) - used)
