"""Facade tiles: four bays by four floors of windows, each bay slightly different.

Row 0 is the bottom of a floor. A part is a palette slot relative to the slot of the wall:
0 wall, 1 glass, 2 frame, 3 dark opening, 4 lit pane or awning, 5 sill and trim.
"""

from collections.abc import Callable

import numpy as np

from .randomness import SIDE, Noise, white

WALL, GLASS, FRAME, DARK, LIT, TRIM = range(6)
BAY = 64  # texels per bay and per floor

Box = tuple[int, int, int, int]  # bottom, top, left, right


class Cell:
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


def facade(wall: Noise, paint: Callable[[Cell], None]) -> tuple[Noise, Noise]:
    """Paint all cells over a wall's shades; return the tile's shades and parts."""
    shade, part, rolls = wall.copy(), np.zeros((SIDE, SIDE), dtype=np.int32), white(200)
    for row in range(4):
        for bay in range(4):
            paint(Cell(shade, part, row, bay, rolls))
    return shade, part


def sash(cell: Cell) -> None:
    """Paint an upright window with a stone sill and lintel."""
    cell.rectangle((50, 56, 16, 48), TRIM, 132)
    cell.window((17, 49, 21, 43), 1, True)
    cell.rectangle((11, 15, 16, 48), TRIM, 140)
    cell.rectangle((9, 11, 16, 48), WALL, 88)


def shutters(cell: Cell) -> None:
    """Paint a window with shutters above a string course."""
    cell.rectangle((0, 3, 0, BAY), TRIM, 138)
    cell.rectangle((3, 4, 0, BAY), WALL, 100)
    cell.window((16, 50, 24, 40), 1, True)
    closed = cell.roll(1) < 40
    for left in (24, 32) if closed else (13, 43):
        cell.rectangle((15, 51, left, left + 8), DARK, 150)
        for slat in range(17, 50, 4):
            cell.rectangle((slat, slat + 1, left + 1, left + 7), DARK, 112)


def ribbon(cell: Cell) -> None:
    """Paint a continuous band of glass between concrete parapets."""
    cell.window((24, 54, 2, 30), 0, False)
    cell.window((24, 54, 34, 62), 1, False, 2)
    cell.rectangle((19, 22, 0, BAY), TRIM, 134)
    cell.rectangle((57, 59, 0, BAY), WALL, 92)


def curtain_wall(cell: Cell) -> None:
    """Paint glass from floor to floor with thin mullions and spandrels."""
    for half in (0, 32):
        cell.window((14, 62, half + 2, half + 30), 0, False, half)
    cell.rectangle((0, 12, 0, BAY), WALL, 118 + cell.roll(3) % 20)


def balconies(cell: Cell) -> None:
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


def sparse(cell: Cell) -> None:
    """Paint a mostly blank wall with few small windows: gable ends and sheds."""
    if cell.roll(5) < 90:
        cell.window((26, 46, 26, 42), 0, True)
    if cell.bay == 3:
        cell.rectangle((0, BAY, 58, 60), DARK, 110)


def shops(cell: Cell) -> None:
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
