"""Counter-based randomness: every number is a pure integer function of a key and a counter.

The library generators may change their streams between versions; this one cannot.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def total(values: Iterable[float]) -> float:
    """Plain left-to-right sum; the built-in rounds differently from Python 3.12 on."""
    result = 0.0
    for value in values:
        result += value
    return result


def key(*parts: int) -> int:
    """Fold integers into one 64-bit key (the SplitMix64 finalizer, chained)."""
    state = 0
    for part in parts:
        state = (state + part + _GAMMA) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state


def words(stream: int, count: int, start: int = 0) -> npt.NDArray[np.uint64]:
    """`count` hashed 64-bit words of the stream, from counter `start` on."""
    counter = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    state = counter * np.uint64(_GAMMA) + np.uint64(stream)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
    return state ^ (state >> np.uint64(31))


def octets(stream: int, count: int) -> npt.NDArray[np.uint8]:
    """`count` hashed bytes, the same on machines of either byte order."""
    packed = words(stream, (count + 7) // 8).astype("<u8")
    return packed.view(np.uint8)[:count]


class Dice:
    """A stream of scalar draws; words are hashed in blocks, because single draws are many."""

    _BLOCK = 1024

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._used = 0
        self._pool: list[float] = []

    def _refill(self) -> list[float]:
        block = words(self._stream, self._BLOCK, self._used)
        self._used += self._BLOCK
        self._pool = ((block >> np.uint64(11)).astype(np.float64) * 2.0**-53).tolist()
        return self._pool

    def unit(self) -> float:
        """Uniform in [0, 1), a multiple of 2**-53."""
        return (self._pool or self._refill()).pop()

    def between(self, low: float, high: float) -> float:
        """Uniform in [low, high)."""
        return low + (high - low) * (self._pool or self._refill()).pop()

    def bell(self, center: float, spread: float) -> float:
        """Bell-shaped about `center`, never further than 2 `spread` from it."""
        return center + spread * (self.unit() + self.unit() + self.unit() + self.unit() - 2.0)

    def below(self, count: int) -> int:
        """An integer in [0, count)."""
        return int(self.unit() * count)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.unit() < probability

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, all equally likely."""
        return options[self.below(len(options))]

    def weighted(self, options: Sequence[tuple[T, float]]) -> T:
        """One of the (option, weight) pairs' options."""
        left = self.unit() * total(weight for _, weight in options)
        for option, weight in options:
            left -= weight
            if left < 0.0:
                return option
        return options[-1][0]
