"""Tileable integer noise, the raw material of every texture."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .randomness import key, octets

Ints = npt.NDArray[np.int32]

SIDE = 256
_SALT = 0x57EE7


def white(name: int) -> Ints:
    """Independent bytes, one for each texel."""
    return octets(key(_SALT, 1, name), SIDE * SIDE).astype(np.int32).reshape(SIDE, SIDE)


def smooth(name: int, cells: int) -> Ints:
    """Value noise in 0..255 with `cells` lattice cells a side (a power of two)."""
    lattice = octets(key(_SALT, 2, name, cells), cells * cells).astype(np.int32)
    lattice = lattice.reshape(cells, cells)
    step = SIDE // cells
    position = np.arange(SIDE, dtype=np.int32)
    cell = position // step
    ramp = (position % step) * 256 // step
    ease = ramp * ramp * (768 - 2 * ramp) >> 16
    following = (cell + 1) % cells
    rows = (lattice[cell] * (256 - ease[:, None]) + lattice[following] * ease[:, None]) >> 8
    mixed = rows[:, cell] * (256 - ease) + rows[:, following] * ease
    return (mixed >> 8).astype(np.int32)


def fractal(name: int, cells: int, octaves: int) -> Ints:
    """Octaves of value noise about 0, each half as strong as the one before, within +-255."""
    total = np.zeros((SIDE, SIDE), dtype=np.int32)
    for octave in range(octaves):
        total += (smooth(name + octave, min(cells << octave, SIDE)) - 128) >> octave
    return total


def soften(field: Ints) -> Ints:
    """Wrap-around 4x4 box average, which takes a texture one octave down."""
    wide = field + np.roll(field, 1, 0)
    wide = wide + np.roll(wide, 2, 0)
    wide = wide + np.roll(wide, 1, 1)
    wide = wide + np.roll(wide, 2, 1)
    return np.roll(wide >> 4, (-1, -1), (0, 1))


@lru_cache(maxsize=1)
def sensor_grain() -> npt.NDArray[np.float32]:
    """A long strip of bell-shaped noise of unit spread (a sum of four hashed bytes)."""
    count = 1 << 19
    raw = octets(key(_SALT, 3), 4 * count).reshape(4, count).astype(np.int32)
    centered = raw[0] + raw[1] + raw[2] + raw[3] - 510
    return centered.astype(np.float32) * np.float32(1.0 / 148.0)
