"""The sensor: lens blur, vignette, grain and tone curve turn planes of light into bytes."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .noise import sensor_grain
from .randomness import Dice
from .shading import Plane

_CURVES = 8
_STEPS = 512


@lru_cache(maxsize=1)
def _curves() -> npt.NDArray[np.uint8]:
    """Tone curves of growing contrast, from light in 0..511 to bytes; all roll off softly."""
    light = np.arange(_STEPS, dtype=np.float64)
    rows = []
    for number in range(_CURVES):
        contrast = 0.25 * number / (_CURVES - 1)
        # Straight up to 190, then bending toward 255.
        over = np.maximum(light - 190.0, 0.0)
        soft = np.minimum(light, 190.0) + over * 65.0 / (over + 65.0)
        x = soft / 255.0
        curved = x + contrast * x * (1.0 - x) * (2.0 * x - 1.0) * 2.0
        rows.append(np.floor(np.minimum(np.maximum(curved * 255.0, 0.0), 255.0) + 0.5))
    return np.array(rows).astype(np.uint8)


@lru_cache(maxsize=4)
def _vignette(rows: int, columns: int) -> Plane:
    """Squared distance from the center of the image, 1 in the corners."""
    v = (np.arange(rows) + 0.5) / rows * 2.0 - 1.0
    u = (np.arange(columns) + 0.5) / columns * 2.0 - 1.0
    return ((v * v)[:, None] + (u * u)[None, :]).astype(np.float32) * np.float32(0.5)


def _blur(plane: Plane, side: float) -> Plane:
    """Blur with the weight `side` on each of the four neighbors; the border stays."""
    inner = plane[1:-1, 1:-1]
    around = plane[:-2, 1:-1] + plane[2:, 1:-1]
    around += plane[1:-1, :-2]
    around += plane[1:-1, 2:]
    around *= np.float32(side)
    inner *= np.float32(1.0 - 4.0 * side)
    inner += around
    return plane


def expose(planes: list[Plane], rows: int, columns: int, dice: Dice) -> npt.NDArray[np.uint8]:
    """The image a small camera makes of the light."""
    side = dice.between(0.08, 0.17)
    falloff = np.float32(1.0) - _vignette(rows, columns) * np.float32(dice.between(0.06, 0.26))
    grain = sensor_grain()
    needed = rows * columns + (1 << 16)
    if needed > len(grain):
        grain = np.resize(grain, needed)
    strength = np.float32(dice.between(1.2, 5.0))
    curve = _curves()[dice.below(_CURVES)]
    image = np.empty((rows, columns, 3), dtype=np.uint8)
    for channel, plane in enumerate(planes):
        light = _blur(plane.reshape(rows, columns), side)
        light *= falloff
        start = dice.below(1 << 16)
        light += grain[start : start + rows * columns].reshape(rows, columns) * strength
        image[:, :, channel] = curve.take(light.astype(np.int32), mode="clip")
    return image
