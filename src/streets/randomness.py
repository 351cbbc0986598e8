"""Counter-based random numbers and noise.

Every number is a pure integer function of a key and a counter. The generators of Python and
NumPy may change their streams between versions; this one cannot.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Noise = npt.NDArray[np.int32]

SIDE = 256  # texels per side of a noise tile
_NOISE_KEY = 0x57EE7
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def total(values: Iterable[float]) -> float:
    """Sum from left to right. The built-in `sum` differs since Python 3.12."""
    result = 0.0
    for value in values:
        result += value
    return result


def key(*parts: int) -> int:
    """Hash integers into one 64-bit key (the SplitMix64 finalizer, chained)."""
    state = 0
    for part in parts:
        state = (state + part + _GAMMA) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state


def words(stream: int, count: int, start: int = 0) -> npt.NDArray[np.uint64]:
    """Return `count` random 64-bit words of a stream, starting at counter `start`."""
    counter = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    state = counter * np.uint64(_GAMMA) + np.uint64(stream)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
    return state ^ (state >> np.uint64(31))


def random_bytes(stream: int, count: int) -> npt.NDArray[np.uint8]:
    """Return `count` random bytes, equal on big-endian and little-endian machines."""
    packed = words(stream, (count + 7) // 8).astype("<u8")
    return packed.view(np.uint8)[:count]


class Dice:
    """A stream of scalar random numbers, hashed in blocks for speed."""

    _BLOCK = 1024

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._used = 0
        self._pool: list[float] = []

    def unit(self) -> float:
        """Draw from [0, 1), a multiple of 2**-53."""
        if not self._pool:
            block = words(self._stream, self._BLOCK, self._used)
            self._used += self._BLOCK
            self._pool = ((block >> np.uint64(11)).astype(np.float64) * 2.0**-53).tolist()
        return self._pool.pop()

    def between(self, low: float, high: float) -> float:
        """Draw uniformly from [low, high)."""
        return low + (high - low) * self.unit()

    def bell(self, center: float, spread: float) -> float:
        """Draw from a bell curve around `center` that ends at 2 `spread` on either side."""
        return center + spread * (self.unit() + self.unit() + self.unit() + self.unit() - 2.0)

    def below(self, count: int) -> int:
        """Draw an integer from [0, count)."""
        return int(self.unit() * count)

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.unit() < probability

    def pick(self, options: Sequence[T]) -> T:
        """Pick one of the options with equal probability."""
        return options[self.below(len(options))]

    def weighted(self, options: Sequence[tuple[T, float]]) -> T:
        """Pick one of the (option, weight) pairs and return its option."""
        left = self.unit() * total(weight for _, weight in options)
        for option, weight in options:
            left -= weight
            if left < 0.0:
                return option
        return options[-1][0]


def white(name: int) -> Noise:
    """Return a tile of independent bytes (SIDE, SIDE)."""
    return random_bytes(key(_NOISE_KEY, 1, name), SIDE * SIDE).astype(np.int32).reshape(SIDE, SIDE)


def smooth(name: int, cells: int) -> Noise:
    """Return a tile of value noise in 0..255 with `cells` lattice cells per side.

    `cells` is a power of two. The tile repeats without a seam.
    """
    lattice = random_bytes(key(_NOISE_KEY, 2, name, cells), cells * cells).astype(np.int32)
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


def fractal(name: int, cells: int, octaves: int) -> Noise:
    """Sum octaves of value noise within +-255, each half as strong as the last."""
    result = np.zeros((SIDE, SIDE), dtype=np.int32)
    for octave in range(octaves):
        result += (smooth(name + octave, min(cells << octave, SIDE)) - 128) >> octave
    return result
