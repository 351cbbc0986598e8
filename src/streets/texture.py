"""The texture atlas: every kind of surface as one 256x256 tile at four levels of softness.

A texel packs a shade (128 is neutral) with a part, the number added to a face's palette slot,
and an opacity bit, so that one lookup gives brightness, color and outline.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from . import facades, sprites
from .noise import SIDE, Ints, fractal, smooth, soften, white

LEVELS = 4
PART_SHIFT = 8
OPAQUE = 1 << 12

Tile = tuple[Ints, Ints, npt.NDArray[np.bool_]]


class Texture(IntEnum):
    """Kinds of surface; those from CROWN on have holes and are tested texel by texel."""

    PLAIN = 0
    ASPHALT = 1
    SLABS = 2
    COBBLES = 3
    GRASS = 4
    EARTH = 5
    PAINTED = 6
    BRICK = 7
    PLASTER = 8
    CONCRETE = 9
    ROOF = 10
    BARK = 11
    CLOTH = 12
    HEDGE = 13
    BODYWORK = 14
    GLASS = 15
    CARGO = 16
    SASH = 17
    SHUTTERS = 18
    RIBBON = 19
    CURTAIN_WALL = 20
    BALCONIES = 21
    SPARSE = 22
    SHOPS = 23
    CROWN = 24
    CROWN_WIDE = 25
    CROWN_TALL = 26
    CONIFER = 27
    BUSH = 28
    BARE = 29
    RAILINGS = 30
    MESH = 31
    PICKETS = 32
    WHEEL = 33


FACADES = (
    Texture.SASH,
    Texture.SHUTTERS,
    Texture.RIBBON,
    Texture.CURTAIN_WALL,
    Texture.BALCONIES,
    Texture.SPARSE,
)

_TEXELS_PER_UNIT: dict[Texture, float] = {
    Texture.ASPHALT: 56.0,
    Texture.SLABS: 64.0,
    Texture.COBBLES: 96.0,
    Texture.GRASS: 48.0,
    Texture.EARTH: 40.0,
    Texture.PAINTED: 64.0,
    Texture.BRICK: 64.0,
    Texture.PLASTER: 32.0,
    Texture.CONCRETE: 32.0,
    Texture.ROOF: 48.0,
    Texture.BARK: 96.0,
    Texture.CLOTH: 128.0,
    Texture.HEDGE: 64.0,
    Texture.BODYWORK: 64.0,
    Texture.GLASS: 64.0,
    Texture.CARGO: 48.0,
    Texture.RAILINGS: 64.0,
    Texture.MESH: 64.0,
    Texture.PICKETS: 64.0,
}


def _grid(block_rows: int, block_columns: int, joint: int, stagger: bool, name: int) -> Ints:
    """Blocks with dark joints and one shade a block: bricks, slabs and cobbles."""
    row, column = np.indices((SIDE, SIDE), dtype=np.int32)
    course = row // block_rows
    if stagger:
        column = (column + (course % 2) * (block_columns // 2)) % SIDE
    tone = white(name)[course, column // block_columns] >> 3
    seam = (row % block_rows < joint) | (column % block_columns < joint)
    return np.where(seam, -26, tone - 16).astype(np.int32)


def _asphalt() -> Ints:
    grain = (white(10) - 128) // 7 + fractal(11, 64, 2) // 10
    worn = fractal(13, 8, 3) // 18
    crack = np.abs(fractal(14, 4, 4)) < 3
    return 128 + grain + worn - 16 * crack


def _plaster(strength: int) -> Ints:
    return 128 + fractal(20, 8, 4) // strength + (white(21) - 128) // 16


def _roof() -> Ints:
    row, column = np.indices((SIDE, SIDE), dtype=np.int32)
    course = row % 16
    return 128 - 26 * (course < 3) + course - 14 * (column % 12 < 2) + fractal(30, 16, 3) // 7


def _bark() -> Ints:
    stretched = fractal(40, 64, 2)[np.arange(SIDE) // 6]
    column = np.arange(SIDE, dtype=np.int32)
    round_shade = 30 - np.abs(column % 128 - 44) // 2
    return 112 + stretched // 3 + round_shade


def _bodywork() -> Ints:
    height = np.arange(SIDE, dtype=np.int32)[:, None]
    gleam = np.where((height > 50) & (height < 60), 22, 0) - np.where(height < 26, 22, 0)
    return 120 + height // 8 + gleam + fractal(50, 4, 2) // 14


def _glass() -> Ints:
    row, column = np.indices((SIDE, SIDE), dtype=np.int32)
    streak = ((row + column) % 128 < 38) * 34 + ((row + column + 60) % 256 < 20) * 26
    return 104 + row // 8 + streak + fractal(55, 4, 3) // 6


def _cargo() -> Ints:
    column = np.arange(SIDE, dtype=np.int32)[None, :]
    rib = (column % 32 < 2) * -20 + (column % 32 == 2) * 12
    return 126 + rib + fractal(60, 4, 3) // 9


def _ground_and_walls() -> dict[Texture, Callable[[], Ints]]:
    return {
        Texture.PLAIN: lambda: np.full((SIDE, SIDE), 128, dtype=np.int32),
        Texture.ASPHALT: _asphalt,
        Texture.SLABS: lambda: 132 + _grid(32, 64, 2, True, 70) + (white(71) - 128) // 9,
        Texture.COBBLES: lambda: 130 + _grid(16, 16, 3, True, 72) + fractal(73, 64, 2) // 5,
        Texture.GRASS: lambda: 126 + (white(80) - 128) // 4 + fractal(81, 16, 3) // 4,
        Texture.EARTH: lambda: 128 + (white(82) - 128) // 6 + fractal(83, 16, 4) // 4,
        Texture.PAINTED: lambda: 124 + (white(84) - 128) // 9 - 40 * (fractal(85, 16, 4) > 96),
        Texture.BRICK: lambda: 130 + _grid(5, 16, 1, True, 86) + fractal(87, 8, 2) // 12,
        Texture.PLASTER: lambda: _plaster(9),
        Texture.CONCRETE: lambda: _plaster(7) + _grid(64, 64, 1, False, 88) // 2,
        Texture.ROOF: _roof,
        Texture.BARK: _bark,
        Texture.CLOTH: lambda: 128 + fractal(90, 16, 2) // 5 + (white(91) - 128) // 12,
        Texture.HEDGE: lambda: 118 + fractal(92, 32, 3) // 2,
        Texture.BODYWORK: _bodywork,
        Texture.GLASS: _glass,
        Texture.CARGO: _cargo,
    }


def _tiles() -> dict[Texture, Tile]:
    solid = np.ones((SIDE, SIDE), dtype=np.bool_)
    nothing = np.zeros((SIDE, SIDE), dtype=np.int32)
    tiles: dict[Texture, Tile] = {
        kind: (make(), nothing, solid) for kind, make in _ground_and_walls().items()
    }
    brick = tiles[Texture.BRICK][0]
    plaster = tiles[Texture.PLASTER][0]
    concrete = tiles[Texture.CONCRETE][0]
    for kind, (shade, part) in {
        Texture.SASH: facades.sash(brick),
        Texture.SHUTTERS: facades.shutters(plaster),
        Texture.RIBBON: facades.ribbon(concrete),
        Texture.CURTAIN_WALL: facades.curtain_wall(plaster),
        Texture.BALCONIES: facades.balconies(plaster),
        Texture.SPARSE: facades.sparse(brick),
        Texture.SHOPS: facades.shops(plaster),
    }.items():
        tiles[kind] = (shade, part, solid)
    for kind, (shade, opaque) in {
        Texture.CROWN: sprites.crown(1, 124, 118, 90, 28),
        Texture.CROWN_WIDE: sprites.crown(2, 132, 98, 100, 26),
        Texture.CROWN_TALL: sprites.crown(3, 88, 128, 90, 25),
        Texture.CONIFER: sprites.conifer(4),
        Texture.BUSH: sprites.bush(5),
        Texture.BARE: sprites.bare(6),
        Texture.RAILINGS: sprites.railings(),
        Texture.MESH: sprites.wire_mesh(),
        Texture.PICKETS: sprites.pickets(),
        Texture.WHEEL: sprites.wheel(),
    }.items():
        tiles[kind] = (shade, nothing, opaque)
    return tiles


@lru_cache(maxsize=1)
def texels_per_unit() -> npt.NDArray[np.float64]:
    """Texels for one unit of texture coordinate: meters, facade bays (64) or whole sprites."""
    scale = [64.0 if kind < Texture.CROWN else float(SIDE) for kind in Texture]
    for kind, texels in _TEXELS_PER_UNIT.items():
        scale[kind] = texels
    return np.array(scale)


@lru_cache(maxsize=1)
def atlas() -> npt.NDArray[np.uint16]:
    """All texels, flat: index = ((level * kinds + kind) * 256 + row) * 256 + column."""
    tiles = _tiles()
    packed = np.zeros((LEVELS, len(Texture), SIDE, SIDE), dtype=np.uint16)
    for kind, (shade, part, opaque) in tiles.items():
        cover = opaque.astype(np.int32) * 256
        for level in range(LEVELS):
            bits = np.clip(shade, 0, 255) + (part << PART_SHIFT) + OPAQUE * (cover > 112)
            packed[level, kind] = bits.astype(np.uint16)
            shade, cover = soften(shade), soften(cover)
    return packed.reshape(-1)


@lru_cache(maxsize=1)
def grime() -> npt.NDArray[np.uint8]:
    """Slow brightness variation laid over every surface (flat 256x256, 128 is neutral)."""
    field = fractal(95, 16, 3) + (smooth(99, 64) - 128) // 3
    return (128 + field.reshape(-1) // 7).astype(np.uint8)
