"""An image cut into tiles: cores that don't overlap, each inside a window with a halo around it.

The halo is as wide as the network can see, so that what a tile's border does to the maps never
reaches its core. Cores and windows begin on multiples of the network's unit (its deepest stride),
so that poolings fall on the same pixels as in the whole image.
"""

from dataclasses import dataclass

from ..data import Size

Span = tuple[int, int]  # from and up to, in pixels


@dataclass(frozen=True)
class Tile:
    """A part of an image: `core` is what it stands for, `window` what the network is shown."""

    core: tuple[Span, Span]  # rows, columns
    window: tuple[Span, Span]

    @property
    def size(self) -> Size:
        (top, bottom), (left, right) = self.window
        return bottom - top, right - left

    @property
    def interior(self) -> tuple[Span, Span]:
        """The core, counted from the window's corner."""
        rows, columns = (
            (start - whole[0], stop - whole[0])
            for (start, stop), whole in zip(self.core, self.window, strict=True)
        )
        return rows, columns


def cut(image: Size, core: Size, unit: int, halo: int) -> list[Tile]:
    """Tiles whose cores, of about this size, make up the image; row by row.

    >>> [tile.window[1] for tile in cut((64, 300), core=(64, 128), unit=32, halo=32)]
    [(0, 160), (96, 288), (224, 300)]
    """
    if halo % unit:
        raise ValueError(f"a halo of {halo} pixels is no multiple of the network's unit, {unit}")
    rows, columns = (_spans(*a, unit, halo) for a in zip(image, core, strict=True))
    return [Tile((r[0], c[0]), (r[1], c[1])) for r in rows for c in columns]


def _spans(length: int, core: int, unit: int, halo: int) -> list[tuple[Span, Span]]:
    """Cores of equal length, a multiple of `unit` but for the last one, and their windows."""
    count = -(-length // core)
    step = up_to_multiple(-(-length // count), unit)
    cores = [(start, min(start + step, length)) for start in range(0, length, step)]
    return [((a, b), (max(0, a - halo), min(length, b + halo))) for a, b in cores]


def up_to_multiple(length: int, unit: int) -> int:
    """
    >>> up_to_multiple(211, 32)
    224
    """
    return -(-length // unit) * unit
