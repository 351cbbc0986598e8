"""How much of an image goes through a network at once: as much as the free memory takes."""

import copy
import math
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..data import Size
from .tiles import up_to_multiple

# Of the free memory, what the maps of an image or a tile may take. What they take is counted, what
# convolutions take beside them is not: the rest is for that, and for others.
SHARE = 0.5
PROBE = 4  # the network is tried, on paper, on an image of so many units a side


def automatic_tile(per_pixel: float, image: Size, unit: int, halo: int, free: int) -> Size:
    """The whole image where it takes at most half of the free bytes; else a square that does.

    The square is a tile's core. Where even the smallest tile takes more, it is that one: a core of
    one halo's width.
    """
    pixels = SHARE * free / per_pixel
    if math.prod(image) <= pixels:
        return image
    side = int(math.sqrt(pixels)) - 2 * halo
    side = max(up_to_multiple(max(halo, 1), unit), side // unit * unit)
    return side, side


def bytes_per_pixel(model: nn.Module, unit: int) -> float:
    """The most that lives at once while a model labels an image, for each of its pixels.

    Counted without computing anything, on torch's meta device.
    """
    side = PROBE * unit
    on_paper = copy.deepcopy(model).to("meta")
    with torch.inference_mode(), _LiveBytes() as live:
        on_paper(torch.empty(1, 3, side, side, device="meta"))
    return live.peak / side**2


def free_bytes(device: torch.device) -> int:
    """Of the device's memory, or of the machine's and whatever limit our processes have."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_available(), _left_to_group())


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(kib) * 1024
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left_to_group(group: Path = Path("/sys/fs/cgroup")) -> int:
    """What a container may still take; without a limit, anything."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return 2**62
    return 2**62 if limit == "max" else max(0, int(limit) - used)


class _LiveBytes(TorchDispatchMode):
    """Adds up the storages that ops make, and takes off those that are gone."""

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
