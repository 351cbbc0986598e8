"""2x2 pooling in plain torch: the formulas that specify it, and a faster way on CPUs.

    x (N, C, H, W)      index uint8 (N, C, H // 2, W // 2), 2 * dy + dx      size = (H, W)

The formulas `pool`, `pick` and `place` are choices between elements: autograd differentiates them,
torch.export and vmap trace them, compilers fuse them into one loop. Run op by op on a CPU they are
slow, so the eager path there takes torch's own pooling, gather and scatter (`cpu_pool`, `cpu_pick`,
`cpu_place`) and turns bytes into positions and back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from .maps import like_layout


def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each window of x and its place there: the first one, or the last NaN."""
    a, b, c, d = _corners(x)
    above, right_above = _larger(a, b)
    below, right_below = _larger(c, d)
    largest, lower = _larger(above, below)
    index = torch.where(lower, right_below.to(torch.uint8) + 2, right_above.to(torch.uint8))
    return largest, index


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Of each window of x, the element that index names."""
    a, b, c, d = _corners(x)
    right = (index & 1).bool()
    return torch.where(index >= 2, torch.where(right, d, c), torch.where(right, b, a))


def place(values: Tensor, index: Tensor, size: Sequence[int]) -> Tensor:
    """The map (N, C, *size) with each value where index says in its window, zeros elsewhere."""
    rows, dy = _windows(size[0], index.shape[-2], index)
    columns, dx = _windows(size[1], index.shape[-1], index)
    # Read from the map's side, element by element: so a compiler writes it in one loop.
    chosen, value = (a.index_select(-2, rows).index_select(-1, columns) for a in (index, values))
    return torch.where(chosen == 2 * dy.unsqueeze(-1) + dx, value, 0)


def _windows(size: int, windows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """For each of `size` positions its window and its place there; an odd last one is in none."""
    position = torch.arange(size, device=like.device)
    nowhere = 4  # which no index is equal to
    place = torch.where(position < 2 * windows, position % 2, nowhere)
    return (position // 2).clamp(max=windows - 1), place


def _corners(x: Tensor) -> list[Tensor]:
    """x at (dy, dx) of each window: (0, 0), (0, 1), (1, 0), (1, 1)."""
    height, width = x.shape[-2:]
    # In this form torch.export can tell that all four have the same size.
    return [
        x[..., dy : height - 1 + dy : 2, dx : width - 1 + dx : 2] for dy in (0, 1) for dx in (0, 1)
    ]


def _larger(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The larger value, and whether it is the second; not torch.maximum, which mixes up -0 and 0"""
    later = (second > first) | second.isnan()
    return torch.where(later, second, first), later


def laid_out(a: Tensor, channels_last: bool) -> Tensor:
    """a (N, C, H, W) in that layout; the formulas' results are not always."""
    return like_layout(a, (0, 2, 3, 1) if channels_last else (0, 1, 2, 3))


def cpu_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    pooled, position = max_pool2d(x, 2, return_indices=True)
    width = x.shape[3]
    # In int32, which is faster; where a huge map overflows it, it does so on both sides.
    within = position.to(torch.int32).sub_(_first_corners(x.shape[2:], torch.int32))
    below = (within >= 2).view(torch.uint8)  # within is one of 0, 1, width, width + 1
    return pooled, within.sub_(below, alpha=width - 2).to(torch.uint8)


def cpu_pick(x: Tensor, index: Tensor, channels_last: bool) -> Tensor:
    picked = _in_memory(x, channels_last).gather(-1, _positions(index, x.shape[2:], channels_last))
    return _as_maps(picked, index.shape, channels_last)


def cpu_place(values: Tensor, index: Tensor, size: Sequence[int], channels_last: bool) -> Tensor:
    n, c, _, _ = index.shape
    area = size[0] * size[1]
    flat = values.new_zeros((n, area * c) if channels_last else (n, c, area))
    positions = _positions(index, size, channels_last)
    flat.scatter_(-1, positions, _in_memory(values, channels_last))
    return _as_maps(flat, (n, c, *size), channels_last)


def _positions(index: Tensor, size: Sequence[int], channels_last: bool) -> Tensor:
    """Where the indexed elements are, counted along the last dimension of _in_memory(x)."""
    channels, width = index.shape[1], size[1]
    pixel = channels if channels_last else 1  # how far the next pixel of a row is
    steps = torch.tensor([0, 1, width, width + 1], device=index.device) * pixel
    start = _first_corners(size, torch.int64) * pixel
    if channels_last:
        start = start.unsqueeze(-1) + torch.arange(channels)
        index = index.permute(0, 2, 3, 1)
    positions = steps.index_select(0, index.flatten().int()).view(index.shape).add_(start)
    return positions.flatten(1 if channels_last else 2)


def _first_corners(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The position y * W + x of each window's first element, (H // 2, W // 2)."""
    height, width = size
    rows = torch.arange(height // 2, dtype=dtype).unsqueeze(1)
    return rows * (2 * width) + torch.arange(width // 2, dtype=dtype) * 2


def _in_memory(a: Tensor, channels_last: bool) -> Tensor:
    """a (N, C, H, W) in its order in memory: (N, C, H * W), or (N, H * W * C); seldom a copy."""
    return a.permute(0, 2, 3, 1).flatten(1) if channels_last else a.flatten(2)


def _as_maps(flat: Tensor, shape: Sequence[int], channels_last: bool) -> Tensor:
    n, c, h, w = shape
    return flat.view(n, h, w, c).permute(0, 3, 1, 2) if channels_last else flat.view(n, c, h, w)
