"""The texture atlas: a 256x256 tile per kind of surface, at four levels of blur.

A texel packs a shade (128 is neutral), a part (added to the palette slot of the face) and an
opacity bit, so one lookup gives brightness, color and outline. Row 0 is the bottom of a tile.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .randomness import SIDE, Noise, fractal, smooth, white

LEVELS = 4
PART_SHIFT = 8
OPAQUE = 1 << 12

# Parts of a facade: palette slots relative to the slot of the wall. DARK is an opening, LIT a lit
# pane or an awning, TRIM sills and trim.
WALL, GLASS, FRAME, DARK, LIT, TRIM = range(6)
BAY = 64  # texels per bay and per floor

Box = tuple[int, int, int, int]  # bottom, top, left, right
Sprite = tuple[Noise, npt.NDArray[np.bool_]]  # shade, opacity


class Texture(IntEnum):
    """Kinds of surface. The tiles from CROWN on have holes."""

    PLAIN = 0
    ASPHALT = 1
    SLABS = 2
    COBBLES = 3
    GRASS = 4
    PAINTED = 5
    BRICK = 6
    PLASTER = 7
    CONCRETE = 8
    ROOF = 9
    BARK = 10
    CLOTH = 11
    HEDGE = 12
    BODYWORK = 13
    GLASS = 14
    CARGO = 15
    SASH = 16
    SHUTTERS = 17
    RIBBON = 18
    CURTAIN_WALL = 19
    BALCONIES = 20
    SPARSE = 21
    SHOPS = 22
    CROWN = 23
    CROWN_WIDE = 24
    CROWN_TALL = 25
    CONIFER = 26
    BUSH = 27
    BARE = 28
    WHEEL = 29
    RAILINGS = 30
    MESH = 31
    PICKETS = 32


FACADES = tuple(Texture(kind) for kind in range(Texture.SASH, Texture.SHOPS))


@lru_cache(maxsize=1)
def texels_per_unit() -> npt.NDArray[np.float64]:
    """Return the texels per unit of texture coordinate for each texture.

    The unit is a meter for most surfaces, a bay for facades and the whole tile for sprites.
    """
    scale = np.full(len(Texture), 64.0)
    scale[[Texture.PLASTER, Texture.CONCRETE]] = 32.0
    scale[[Texture.GRASS, Texture.ROOF, Texture.CARGO]] = 48.0
    scale[Texture.ASPHALT] = 56.0
    scale[[Texture.COBBLES, Texture.BARK]] = 96.0
    scale[Texture.CLOTH] = 128.0
    scale[Texture.CROWN : Texture.WHEEL + 1] = SIDE
    return scale


@lru_cache(maxsize=1)
def atlas() -> npt.NDArray[np.uint16]:
    """Return all texels.

    Texel index: ((level * kinds + kind) * SIDE + row) * SIDE + column.
    """
    packed = np.zeros((LEVELS, len(Texture), SIDE, SIDE), dtype=np.uint16)
    plain = np.zeros((SIDE, SIDE), dtype=np.int32)
    solid = np.ones((SIDE, SIDE), dtype=np.bool_)
    surfaces = _surfaces()
    tiles = [(kind, shade, plain, solid) for kind, shade in surfaces.items()]
    tiles += [(kind, *tile, solid) for kind, tile in _facades(surfaces).items()]
    tiles += [(kind, shade, plain, opaque) for kind, (shade, opaque) in _sprites().items()]
    for kind, shade, part, opaque in tiles:
        cover = opaque.astype(np.int32) * 256
        for level in range(LEVELS):
            bits = np.clip(shade, 0, 255) + (part << PART_SHIFT) + OPAQUE * (cover > 112)
            packed[level, kind] = bits.astype(np.uint16)
            shade, cover = _blurred(shade), _blurred(cover)
    return packed.reshape(-1)


@lru_cache(maxsize=1)
def grime() -> npt.NDArray[np.uint8]:
    """Return slow brightness variation (flat SIDE x SIDE, 128 is neutral)."""
    field = fractal(95, 16, 3) + (smooth(99, 64) - 128) // 3
    return (128 + field.reshape(-1) // 7).astype(np.uint8)


def _blurred(field: Noise) -> Noise:
    """Average over 4x4 texels, wrapping around at the borders."""
    wide = field + np.roll(field, 1, 0)
    wide = wide + np.roll(wide, 2, 0)
    wide = wide + np.roll(wide, 1, 1)
    wide = wide + np.roll(wide, 2, 1)
    return np.roll(wide >> 4, (-1, -1), (0, 1))


def _indices() -> tuple[Noise, Noise]:
    row, column = np.indices((SIDE, SIDE), dtype=np.int32)
    return row, column


def _blocks(block_rows: int, block_columns: int, joint: int, stagger: bool, name: int) -> Noise:
    """Draw bricks, slabs or cobbles: one shade per block, dark joints."""
    row, column = _indices()
    course = row // block_rows
    if stagger:
        column = (column + (course % 2) * (block_columns // 2)) % SIDE
    tone = white(name)[course, column // block_columns] >> 3
    seam = (row % block_rows < joint) | (column % block_columns < joint)
    return np.where(seam, -26, tone - 16).astype(np.int32)


def _surfaces() -> dict[Texture, Noise]:
    """Draw the shades of the tiles without holes or parts."""
    row, column = _indices()
    plaster, plaster_grain = fractal(20, 8, 4), (white(21) - 128) // 16
    tar = (white(10) - 128) // 7 + fractal(11, 64, 2) // 10 + fractal(13, 8, 3) // 18
    course = row % 16
    gleam = np.where((row > 50) & (row < 60), 22, 0) - np.where(row < 26, 22, 0)
    streak = ((row + column) % 128 < 38) * 34 + ((row + column + 60) % 256 < 20) * 26
    rib = (column % 32 < 2) * -20 + (column % 32 == 2) * 12
    return {
        Texture.PLAIN: np.full((SIDE, SIDE), 128, dtype=np.int32),
        Texture.ASPHALT: 128 + tar - 16 * (np.abs(fractal(14, 4, 4)) < 3),
        Texture.SLABS: 132 + _blocks(32, 64, 2, True, 70) + (white(71) - 128) // 9,
        Texture.COBBLES: 130 + _blocks(16, 16, 3, True, 72) + fractal(73, 64, 2) // 5,
        Texture.GRASS: 126 + (white(80) - 128) // 4 + fractal(81, 16, 3) // 4,
        Texture.PAINTED: 124 + (white(84) - 128) // 9 - 40 * (fractal(85, 16, 4) > 96),
        Texture.BRICK: 130 + _blocks(5, 16, 1, True, 86) + fractal(87, 8, 2) // 12,
        Texture.PLASTER: 128 + plaster // 9 + plaster_grain,
        Texture.CONCRETE: 128 + plaster // 7 + plaster_grain + _blocks(64, 64, 1, False, 88) // 2,
        Texture.ROOF: (
            128 - 26 * (course < 3) + course - 14 * (column % 12 < 2) + fractal(30, 16, 3) // 7
        ),
        Texture.BARK: 142
        + fractal(40, 64, 2)[row // 6, column] // 3
        - np.abs(column % 128 - 44) // 2,
        Texture.CLOTH: 128 + fractal(90, 16, 2) // 5 + (white(91) - 128) // 12,
        Texture.HEDGE: 118 + fractal(92, 32, 3) // 2,
        Texture.BODYWORK: 120 + row // 8 + gleam + fractal(50, 4, 2) // 14,
        Texture.GLASS: 104 + row // 8 + streak + fractal(55, 4, 3) // 6,
        Texture.CARGO: 126 + rib + fractal(60, 4, 3) // 9,
    }


def _facades(walls: dict[Texture, Noise]) -> dict[Texture, tuple[Noise, Noise]]:
    """Draw facade tiles' shades and parts: four bays by four floors, no two alike."""
    brick, plaster = walls[Texture.BRICK], walls[Texture.PLASTER]
    return {
        Texture.SASH: _facade(brick, _sash),
        Texture.SHUTTERS: _facade(plaster, _shutters),
        Texture.RIBBON: _facade(walls[Texture.CONCRETE], _ribbon),
        Texture.CURTAIN_WALL: _facade(plaster, _curtain_wall),
        Texture.BALCONIES: _facade(plaster, _balconies),
        Texture.SPARSE: _facade(brick, _sparse),
        Texture.SHOPS: _facade(plaster, _shops),
    }


class _Cell:
    """One bay of one floor: views of the tile's shades and parts."""

    def __init__(self, shade: Noise, part: Noise, row: int, bay: int, rolls: Noise) -> None:
        block = np.s_[row * BAY : (row + 1) * BAY, bay * BAY : (bay + 1) * BAY]
        self.bay = bay
        self._shade, self._part, self._rolls = shade[block], part[block], rolls[row * 4 + bay]

    def roll(self, salt: int) -> int:
        """Return a fixed random byte of this cell."""
        return int(self._rolls[salt])

    def rectangle(self, box: Box, part: int, shade: int) -> None:
        """Paint a box of texels."""
        bottom, top, left, right = box
        self._part[bottom:top, left:right] = part
        self._shade[bottom:top, left:right] = shade

    def window(self, box: Box, mullions: int, transom: bool, salt: int = 0) -> None:
        """Paint a framed window with reflections; some are lit or have blinds."""
        bottom, top, left, right = box
        roll = self.roll(salt)
        self.rectangle((bottom - 2, top + 2, left - 2, right + 2), FRAME, 132)
        glass = LIT if roll < 20 else GLASS
        height = top - bottom
        for line in range(height):
            tone = 104 + 44 * line // height + (roll >> 4)
            self.rectangle((bottom + line, bottom + line + 1, left, right), glass, tone)
        if 60 < roll < 110:
            drop = height * (2 + roll % 3) // 6
            self.rectangle((top - drop, top, left, right), FRAME, 104 + roll % 24)
        elif 110 <= roll < 150:
            side = max((right - left) // 5, 1)
            self.rectangle((bottom, top, left, left + side), TRIM, 116)
            self.rectangle((bottom, top, right - side, right), TRIM, 112)
        for bar in range(1, mullions + 1):
            at = left + (right - left) * bar // (mullions + 1)
            self.rectangle((bottom, top, at - 1, at + 1), FRAME, 126)
        if transom:
            at = bottom + height * 5 // 8
            self.rectangle((at - 1, at + 1, left, right), FRAME, 124)
        self.rectangle((top, top + 2, left, right), FRAME, 90)


def _facade(wall: Noise, paint: Callable[[_Cell], None]) -> tuple[Noise, Noise]:
    """Paint all cells over a wall's shades; return the tile's shades and parts."""
    shade, part, rolls = wall.copy(), np.zeros((SIDE, SIDE), dtype=np.int32), white(200)
    for row in range(4):
        for bay in range(4):
            paint(_Cell(shade, part, row, bay, rolls))
    return shade, part


def _sash(cell: _Cell) -> None:
    """Paint an upright window with a stone sill and lintel."""
    cell.rectangle((50, 56, 16, 48), TRIM, 132)
    cell.window((17, 49, 21, 43), 1, True)
    cell.rectangle((11, 15, 16, 48), TRIM, 140)
    cell.rectangle((9, 11, 16, 48), WALL, 88)


def _shutters(cell: _Cell) -> None:
    """Paint a window with shutters above a string course."""
    cell.rectangle((0, 3, 0, BAY), TRIM, 138)
    cell.rectangle((3, 4, 0, BAY), WALL, 100)
    cell.window((16, 50, 24, 40), 1, True)
    closed = cell.roll(1) < 40
    for left in (24, 32) if closed else (13, 43):
        cell.rectangle((15, 51, left, left + 8), DARK, 150)
        for slat in range(17, 50, 4):
            cell.rectangle((slat, slat + 1, left + 1, left + 7), DARK, 112)


def _ribbon(cell: _Cell) -> None:
    """Paint a continuous band of glass between concrete parapets."""
    cell.window((24, 54, 2, 30), 0, False)
    cell.window((24, 54, 34, 62), 1, False, 2)
    cell.rectangle((19, 22, 0, BAY), TRIM, 134)
    cell.rectangle((57, 59, 0, BAY), WALL, 92)


def _curtain_wall(cell: _Cell) -> None:
    """Paint glass from floor to floor with thin mullions and spandrels."""
    for half in (0, 32):
        cell.window((14, 62, half + 2, half + 30), 0, False, half)
    cell.rectangle((0, 12, 0, BAY), WALL, 118 + cell.roll(3) % 20)


def _balconies(cell: _Cell) -> None:
    """Paint balconies in the even bays and plain windows in the odd bays."""
    if cell.bay % 2:
        cell.window((20, 48, 18, 46), 1, False)
        cell.rectangle((15, 18, 15, 49), TRIM, 138)
        return
    cell.rectangle((6, 54, 6, 58), WALL, 84)
    cell.window((8, 50, 12, 38), 1, False)
    cell.rectangle((4, 24, 3, 61), TRIM, 124 + cell.roll(4) % 16)
    for post in range(5, 60, 6):
        cell.rectangle((6, 22, post, post + 1), TRIM, 96)
    cell.rectangle((2, 4, 3, 61), WALL, 76)


def _sparse(cell: _Cell) -> None:
    """Paint a mostly blank wall with few small windows: gable ends and sheds."""
    if cell.roll(5) < 90:
        cell.window((26, 46, 26, 42), 0, True)
    if cell.bay == 3:
        cell.rectangle((0, BAY, 58, 60), DARK, 110)


def _shops(cell: _Cell) -> None:
    """Paint a storefront: a door, or a display window with sign and awning."""
    roll = cell.roll(6)
    cell.rectangle((0, 5, 0, BAY), TRIM, 100)
    if roll < 70:
        cell.rectangle((0, 44, 22, 44), FRAME, 118)
        cell.rectangle((0, 42, 24, 42), DARK, 122)
        cell.rectangle((24, 38, 27, 39), GLASS, 120)
        cell.window((12, 40, 4, 18), 0, False)
        cell.window((12, 40, 48, 60), 0, False)
        return
    cell.window((7, 42, 4, 42), roll % 3, False)
    for item in range(5):
        left = 6 + 7 * item
        height = 6 + cell.roll(8 + item) % 16
        cell.rectangle((8, 8 + height, left, left + 5), item, 96 + 9 * item)
    cell.rectangle((0, 42, 46, 60), DARK, 130)
    cell.rectangle((6, 38, 48, 58), GLASS, 112)
    cell.rectangle((46, 60, 0, BAY), LIT if roll % 2 else DARK, 126)
    for letter in range(10, 50, 5):
        if cell.roll(20 + letter) < 190:
            cell.rectangle((50, 56, letter, letter + 3), FRAME, 140)
    if roll > 170:
        for stripe in range(0, BAY, 8):
            part = LIT if stripe % 16 else FRAME
            cell.rectangle((36, 46, stripe, stripe + 8), part, 132 - roll % 16)
        cell.rectangle((34, 36, 0, BAY), DARK, 80)


def _sprites() -> dict[Texture, Sprite]:
    """Draw the tiles with holes. Plants and wheels fill the tile once; fences repeat."""
    return {
        Texture.CROWN: _crown(1, 124, 118, 90, 28),
        Texture.CROWN_WIDE: _crown(2, 132, 98, 100, 26),
        Texture.CROWN_TALL: _crown(3, 88, 128, 90, 25),
        Texture.CONIFER: _conifer(),
        Texture.BUSH: _bush(),
        Texture.BARE: _bare_branches(),
        Texture.WHEEL: _wheel(),
        Texture.RAILINGS: _railings(),
        Texture.MESH: _wire_mesh(),
        Texture.PICKETS: _pickets(),
    }


class _Foliage:
    """A tile of leaf clumps, painted back to front and lit from above."""

    def __init__(self, name: int) -> None:
        self.shade = np.full((SIDE, SIDE), 70, dtype=np.int32)
        self.opaque = np.zeros((SIDE, SIDE), dtype=np.bool_)
        self.bytes = white(310 + name).reshape(-1).tolist()
        self._leaf = fractal(300 + 8 * name, 32, 4)
        self._glint = white(301 + 8 * name) - 128

    def clump(self, x: int, y: int, radius: int, brightness: int) -> None:
        """Paint a ragged ball of leaves centered at (x, y)."""
        low, high = max(y - 2 * radius, 0), min(y + 2 * radius, SIDE)
        left, right = max(x - 2 * radius, 0), min(x + 2 * radius, SIDE)
        box = (slice(low, high), slice(left, right))
        dy = np.arange(low, high, dtype=np.int32)[:, None] - y
        dx = np.arange(left, right, dtype=np.int32)[None, :] - x
        leaf = self._leaf[box]
        inside = (dx * dx + dy * dy) * 128 < radius * radius * (118 + leaf)
        tone = 96 + brightness + 44 * dy // radius - 16 * dx // radius + leaf // 3
        tone += self._glint[box] // 9
        self.shade[box] = np.where(inside, tone, self.shade[box])
        self.opaque[box] |= inside


def _crown(name: int, half_width: int, half_height: int, clumps: int, radius: int) -> Sprite:
    """Draw a broadleaf crown: an ellipse of clumps, the lower ones first."""
    foliage = _Foliage(name)
    placed: list[tuple[int, int]] = []
    used = 0
    while len(placed) < clumps:
        x, y = foliage.bytes[used] - 128, foliage.bytes[used + 1] - 128
        used += 2
        if (x * 100 // half_width) ** 2 + (y * 100 // half_height) ** 2 < 5800:
            placed.append((x + 128, y + 128))
    for order, (x, y) in enumerate(sorted(placed, key=lambda at: at[1])):
        size = radius * (60 + foliage.bytes[4000 + order] // 4) // 100
        foliage.clump(x, y, max(size, 4), 30 * y // SIDE - 12)
    return foliage.shade, foliage.opaque


def _conifer() -> Sprite:
    """Draw a spruce: tiers that narrow toward the top."""
    foliage = _Foliage(4)
    for tier in range(46):
        y = 14 + tier * 228 // 46
        reach = (250 - y) * 100 // 250
        for spray in range(6):
            x = 128 + (foliage.bytes[tier * 6 + spray] - 128) * reach // 160
            foliage.clump(x, y, 7 + reach // 12, spray * 4 - 20)
    return foliage.shade, foliage.opaque


def _bush() -> Sprite:
    """Draw a low mass of leaves along the bottom of the tile."""
    foliage = _Foliage(5)
    for order in range(70):
        x = foliage.bytes[2 * order]
        limit = 200 - (x - 128) * (x - 128) // 110
        y = foliage.bytes[2 * order + 1] * limit // 256
        foliage.clump(x, y, 26, y // 8 - 10)
    return foliage.shade, foliage.opaque


def _bare_branches() -> Sprite:
    """Draw winter branches: contours of warped noise that fan out from the bottom."""
    row, column = _indices()
    warp = fractal(326, 8, 4)
    fan = (column - 128) * 220 // (row // 2 + 60) + warp // 5
    twig = np.abs((fan + 512) % 22 - 11) < np.maximum(4 - row // 64, 1)
    cross = np.abs(fractal(336, 16, 3)) < 7
    dx, dy = column - 128, row - 120
    ragged = dx * dx + dy * dy < 110 * 110 + warp * 40
    return 110 + warp // 4, (twig | cross) & ragged


def _wheel() -> Sprite:
    """Draw a tire, a rim and spokes."""
    row, column = _indices()
    dx, dy = column - 128, row - 128
    square = dx * dx + dy * dy
    tire = (square < 126 * 126) & (square > 104 * 104)
    hub = square < 16 * 16
    spokes = (np.abs(dx) < 3) | (np.abs(dy) < 3) | (np.abs(dx - dy) < 4) | (np.abs(dx + dy) < 4)
    shade = np.where(square > 112 * 112, 84, 140).astype(np.int32)
    return shade, tire | hub | (spokes & (square < 120 * 120))


def _railings() -> Sprite:
    """Draw upright bars between two rails (1 m tall at 64 texels per meter)."""
    row, column = _indices()
    height = row % 64
    bars = column % 8 < 2
    rails = ((height > 5) & (height < 9)) | ((height > 56) & (height < 60))
    posts = column % 128 < 5
    return 116 + 20 * (column % 8 == 0) - 10 * posts, (bars & (height < 62)) | rails | posts


def _wire_mesh() -> Sprite:
    """Draw diagonal wire between posts."""
    row, column = _indices()
    wire = ((row + column) % 10 < 2) | ((row - column) % 10 < 2)
    posts = column % 128 < 6
    rail = row % 128 > 122
    return np.where(posts | rail, 128, 104).astype(np.int32), wire | posts | rail


def _pickets() -> Sprite:
    """Draw boards with gaps on two rails."""
    row, column = _indices()
    board = column % 16 < 11
    height = row % 64
    rails = ((height > 12) & (height < 18)) | ((height > 44) & (height < 50))
    tone = 122 + (white(340)[0, column // 16] >> 3) - 16 - 24 * (rails & ~board)
    return tone.astype(np.int32), (board & (height < 61)) | rails
