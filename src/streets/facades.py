"""Facade tiles: four bays by four floors of windows, every bay a little different.

Row 0 is the bottom of a story. Parts are palette slots relative to the wall's:
0 wall, 1 glass, 2 frame, 3 dark opening, 4 lit pane or awning, 5 sill and trim.
"""

import numpy as np

from .noise import SIDE, Ints, white

WALL, GLASS, FRAME, DARK, LIT, TRIM = range(6)
BAY = 64

Sheet = tuple[Ints, Ints]


class _Sheet:
    """A facade in the making: rectangles painted over a wall, cell by cell."""

    def __init__(self, wall: Ints) -> None:
        self.shade = wall.copy()
        self.part = np.zeros((SIDE, SIDE), dtype=np.int32)
        self._dice = white(200)

    def roll(self, row: int, column: int, salt: int) -> int:
        """A fixed byte for one cell."""
        return int(self._dice[row * 4 + column, salt])

    def rectangle(
        self, cell: tuple[int, int], box: tuple[int, int, int, int], part: int, shade: int
    ) -> None:
        """Paint (bottom, top, left, right) texels of a cell."""
        bottom, top, left, right = box
        rows = slice(cell[0] * BAY + bottom, cell[0] * BAY + top)
        columns = slice(cell[1] * BAY + left, cell[1] * BAY + right)
        self.part[rows, columns] = part
        self.shade[rows, columns] = shade

    def window(
        self,
        cell: tuple[int, int],
        box: tuple[int, int, int, int],
        mullions: int,
        transom: bool,
        salt: int = 0,
    ) -> None:
        """A framed pane with reflections, perhaps a blind or curtains, perhaps lit."""
        bottom, top, left, right = box
        roll = self.roll(*cell, salt)
        self.rectangle(cell, (bottom - 2, top + 2, left - 2, right + 2), FRAME, 132)
        glass = LIT if roll < 20 else GLASS
        height = top - bottom
        for line in range(height):
            tone = 104 + 44 * line // height + (roll >> 4)
            self.rectangle(cell, (bottom + line, bottom + line + 1, left, right), glass, tone)
        if 60 < roll < 110:
            drop = height * (2 + roll % 3) // 6
            self.rectangle(cell, (top - drop, top, left, right), FRAME, 104 + roll % 24)
        elif 110 <= roll < 150:
            side = max((right - left) // 5, 1)
            self.rectangle(cell, (bottom, top, left, left + side), TRIM, 116)
            self.rectangle(cell, (bottom, top, right - side, right), TRIM, 112)
        for bar in range(1, mullions + 1):
            at = left + (right - left) * bar // (mullions + 1)
            self.rectangle(cell, (bottom, top, at - 1, at + 1), FRAME, 126)
        if transom:
            at = bottom + height * 5 // 8
            self.rectangle(cell, (at - 1, at + 1, left, right), FRAME, 124)
        self.rectangle(cell, (top, top + 2, left, right), FRAME, 90)

    def cells(self) -> list[tuple[int, int]]:
        """All (floor, bay) pairs."""
        return [(row, column) for row in range(4) for column in range(4)]

    def done(self) -> Sheet:
        """The finished shade and part tiles."""
        return self.shade, self.part


def sash(wall: Ints) -> Sheet:
    """Upright windows with stone sills and lintels in brick."""
    sheet = _Sheet(wall)
    for cell in sheet.cells():
        sheet.rectangle(cell, (50, 56, 16, 48), TRIM, 132)
        sheet.window(cell, (17, 49, 21, 43), 1, True)
        sheet.rectangle(cell, (11, 15, 16, 48), TRIM, 140)
        sheet.rectangle(cell, (9, 11, 16, 48), WALL, 88)
    return sheet.done()


def shutters(wall: Ints) -> Sheet:
    """Rendered walls, windows with shutters, a string course at each floor."""
    sheet = _Sheet(wall)
    for cell in sheet.cells():
        sheet.rectangle(cell, (0, 3, 0, BAY), TRIM, 138)
        sheet.rectangle(cell, (3, 4, 0, BAY), WALL, 100)
        sheet.window(cell, (16, 50, 24, 40), 1, True)
        shut = sheet.roll(*cell, 1) < 40
        for left in (24, 32) if shut else (13, 43):
            width = 8
            sheet.rectangle(cell, (15, 51, left, left + width), DARK, 150)
            for slat in range(17, 50, 4):
                sheet.rectangle(cell, (slat, slat + 1, left + 1, left + width - 1), DARK, 112)
    return sheet.done()


def ribbon(wall: Ints) -> Sheet:
    """Continuous bands of glass between concrete parapets."""
    sheet = _Sheet(wall)
    for cell in sheet.cells():
        sheet.window(cell, (24, 54, 2, 30), 0, False)
        sheet.window(cell, (24, 54, 34, 62), 1, False, 2)
        sheet.rectangle(cell, (19, 22, 0, BAY), TRIM, 134)
        sheet.rectangle(cell, (57, 59, 0, BAY), WALL, 92)
    return sheet.done()


def curtain_wall(wall: Ints) -> Sheet:
    """Glass from floor to floor with thin mullions and spandrels."""
    sheet = _Sheet(wall)
    for cell in sheet.cells():
        for half in (0, 32):
            sheet.window(cell, (14, 62, half + 2, half + 30), 0, False, half)
        sheet.rectangle(cell, (0, 12, 0, BAY), WALL, 118 + sheet.roll(*cell, 3) % 20)
    return sheet.done()


def balconies(wall: Ints) -> Sheet:
    """Flats: a balcony with a parapet in every other bay, plain windows between."""
    sheet = _Sheet(wall)
    for cell in sheet.cells():
        if cell[1] % 2:
            sheet.window(cell, (20, 48, 18, 46), 1, False)
            sheet.rectangle(cell, (15, 18, 15, 49), TRIM, 138)
            continue
        sheet.rectangle(cell, (6, 54, 6, 58), WALL, 84)
        sheet.window(cell, (8, 50, 12, 38), 1, False)
        sheet.rectangle(cell, (4, 24, 3, 61), TRIM, 124 + sheet.roll(*cell, 4) % 16)
        for post in range(5, 60, 6):
            sheet.rectangle(cell, (6, 22, post, post + 1), TRIM, 96)
        sheet.rectangle(cell, (2, 4, 3, 61), WALL, 76)
    return sheet.done()


def sparse(wall: Ints) -> Sheet:
    """Mostly blank wall with the odd small window: gable ends and sheds."""
    sheet = _Sheet(wall)
    for cell in sheet.cells():
        if sheet.roll(*cell, 5) < 90:
            sheet.window(cell, (26, 46, 26, 42), 0, True)
        if cell[1] == 3:
            sheet.rectangle(cell, (0, BAY, 58, 60), DARK, 110)
    return sheet.done()


def shops(wall: Ints) -> Sheet:
    """Four alternative ground floors: display windows, doors, fascias and awnings."""
    sheet = _Sheet(wall)
    for cell in sheet.cells():
        roll = sheet.roll(*cell, 6)
        sheet.rectangle(cell, (0, 5, 0, BAY), TRIM, 100)
        if roll < 70:
            sheet.rectangle(cell, (0, 44, 22, 44), FRAME, 118)
            sheet.rectangle(cell, (0, 42, 24, 42), DARK, 122)
            sheet.rectangle(cell, (24, 38, 27, 39), GLASS, 120)
            sheet.window(cell, (12, 40, 4, 18), 0, False)
            sheet.window(cell, (12, 40, 48, 60), 0, False)
            continue
        sheet.window(cell, (7, 42, 4, 42), roll % 3, False)
        for item in range(5):
            left = 6 + 7 * item
            tall = 6 + sheet.roll(*cell, 8 + item) % 16
            sheet.rectangle(cell, (8, 8 + tall, left, left + 5), item % 6, 96 + 9 * item)
        sheet.rectangle(cell, (0, 42, 46, 60), DARK, 130)
        sheet.rectangle(cell, (6, 38, 48, 58), GLASS, 112)
        sheet.rectangle(cell, (46, 60, 0, BAY), LIT if roll % 2 else DARK, 126)
        for letter in range(10, 50, 5):
            if sheet.roll(*cell, 20 + letter) < 190:
                sheet.rectangle(cell, (50, 56, letter, letter + 3), FRAME, 140)
        if roll > 170:
            for stripe in range(0, BAY, 8):
                part = LIT if stripe % 16 else FRAME
                sheet.rectangle(cell, (36, 46, stripe, stripe + 8), part, 132 - roll % 16)
            sheet.rectangle(cell, (34, 36, 0, BAY), DARK, 80)
    return sheet.done()
