"""Tiles with holes: foliage, fences and spoked wheels, as (shade, opaque) pairs.

Row 0 is the bottom. Foliage sprites fill the tile once; fences repeat.
"""

import numpy as np
import numpy.typing as npt

from .noise import SIDE, Ints, fractal, white

Sprite = tuple[Ints, npt.NDArray[np.bool_]]


def _indices() -> tuple[Ints, Ints]:
    row, column = np.indices((SIDE, SIDE), dtype=np.int32)
    return row.astype(np.int32), column.astype(np.int32)


class _Foliage:
    """Clumps of leaves painted from the back to the front, each lit from above."""

    def __init__(self, name: int) -> None:
        self.shade = np.full((SIDE, SIDE), 70, dtype=np.int32)
        self.opaque = np.zeros((SIDE, SIDE), dtype=np.bool_)
        self._leaf = fractal(300 + 8 * name, 32, 4)
        self._glint = white(301 + 8 * name) - 128

    def clump(self, x: int, y: int, radius: int, depth: int) -> None:
        """One ragged ball of leaves centered at (x, y); `depth` brightens the nearer ones."""
        low, high = max(y - 2 * radius, 0), min(y + 2 * radius, SIDE)
        left, right = max(x - 2 * radius, 0), min(x + 2 * radius, SIDE)
        box = (slice(low, high), slice(left, right))
        dy = np.arange(low, high, dtype=np.int32)[:, None] - y
        dx = np.arange(left, right, dtype=np.int32)[None, :] - x
        leaf = self._leaf[box]
        inside = (dx * dx + dy * dy) * 128 < radius * radius * (118 + leaf)
        tone = 96 + depth + 44 * dy // radius - 16 * dx // radius + leaf // 3
        tone += self._glint[box] // 9
        self.shade[box] = np.where(inside, tone, self.shade[box])
        self.opaque[box] |= inside

    def done(self) -> Sprite:
        """The finished sprite."""
        return self.shade, self.opaque


def crown(name: int, half_width: int, half_height: int, clumps: int, radius: int) -> Sprite:
    """A broadleaf crown: an ellipse of clumps, the lower and outer ones drawn first."""
    foliage = _Foliage(name)
    bytes_ = white(310 + name).reshape(-1)
    placed: list[tuple[int, int]] = []
    taken = 0
    while len(placed) < clumps:
        x, y = int(bytes_[taken]) - 128, int(bytes_[taken + 1]) - 128
        taken += 2
        if (x * 100 // half_width) ** 2 + (y * 100 // half_height) ** 2 < 5800:
            placed.append((x + 128, y + 128))
    for order, (x, y) in enumerate(sorted(placed, key=lambda at: at[1])):
        size = radius * (60 + int(bytes_[4000 + order]) // 4) // 100
        foliage.clump(x, y, max(size, 4), 30 * y // SIDE - 12)
    return foliage.done()


def conifer(name: int) -> Sprite:
    """A spruce: tiers that narrow toward the top."""
    foliage = _Foliage(name)
    bytes_ = white(310 + name).reshape(-1)
    for tier in range(46):
        y = 14 + tier * 228 // 46
        reach = (250 - y) * 100 // 250
        for spray in range(6):
            x = 128 + (int(bytes_[tier * 6 + spray]) - 128) * reach // 160
            foliage.clump(x, y, 7 + reach // 12, spray * 4 - 20)
    return foliage.done()


def bush(name: int) -> Sprite:
    """A low mass of leaves that fills the bottom of the tile from side to side."""
    foliage = _Foliage(name)
    bytes_ = white(310 + name).reshape(-1)
    for order in range(70):
        x = int(bytes_[2 * order])
        limit = 200 - (x - 128) * (x - 128) // 110
        y = int(bytes_[2 * order + 1]) * limit // 256
        foliage.clump(x, y, 26, y // 8 - 10)
    return foliage.done()


def bare(name: int) -> Sprite:
    """Winter branches: contour lines of warped noise that fan out from the bottom center."""
    row, column = _indices()
    warp = fractal(320 + name, 8, 4)
    fan = (column - 128) * 220 // (row // 2 + 60) + warp // 5
    twig = np.abs((fan + 512) % 22 - 11) < np.maximum(4 - row // 64, 1)
    cross = np.abs(fractal(330 + name, 16, 3)) < 7
    dx, dy = column - 128, row - 120
    ragged = dx * dx + dy * dy < 110 * 110 + warp * 40
    return 110 + warp // 4, (twig | cross) & ragged


def railings() -> Sprite:
    """Upright bars between two rails (4 m of fence, 1 m tall at 64 texels a meter)."""
    row, column = _indices()
    height = row % 64
    bars = column % 8 < 2
    rails = ((height > 5) & (height < 9)) | ((height > 56) & (height < 60))
    posts = column % 128 < 5
    return 116 + 20 * (column % 8 == 0) - 10 * posts, (bars & (height < 62)) | rails | posts


def wire_mesh() -> Sprite:
    """Diagonal wire between posts."""
    row, column = _indices()
    wire = ((row + column) % 10 < 2) | ((row - column) % 10 < 2)
    posts = column % 128 < 6
    rail = row % 128 > 122
    return np.where(posts | rail, 128, 104).astype(np.int32), wire | posts | rail


def pickets() -> Sprite:
    """Boards with gaps, nailed to two rails."""
    row, column = _indices()
    board = column % 16 < 11
    height = row % 64
    rails = ((height > 12) & (height < 18)) | ((height > 44) & (height < 50))
    tone = 122 + (white(340)[0, column // 16] >> 3) - 16 - 24 * (rails & ~board)
    return tone.astype(np.int32), (board & (height < 61)) | rails


def wheel() -> Sprite:
    """A tire ring, a rim and spokes."""
    row, column = _indices()
    dx, dy = column - 128, row - 128
    square = dx * dx + dy * dy
    ring = (square < 126 * 126) & (square > 104 * 104)
    hub = square < 16 * 16
    spokes = (np.abs(dx) < 3) | (np.abs(dy) < 3) | (np.abs(dx - dy) < 4) | (np.abs(dx + dy) < 4)
    shade = np.where(square > 112 * 112, 84, 140).astype(np.int32)
    return shade, ring | hub | (spokes & (square < 120 * 120))
