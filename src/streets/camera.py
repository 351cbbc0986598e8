"""The camera of the ego car: its random position and projection, and its sensor."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .randomness import Dice, key, random_bytes

Floats = npt.NDArray[np.float64]
Plane = npt.NDArray[np.float32]  # one color channel of an image

NEAREST = 0.6  # objects closer than this many meters are not drawn

_GRAIN_KEY = key(0x57EE7, 3)
_CURVES = 8


@dataclass(frozen=True)
class Camera:
    """A pinhole camera that looks along the road.

    The road may bend: the bend moves every point sideways by a quadratic in z, so a curved
    street needs no separate geometry.
    """

    rows: int
    columns: int
    focal: float  # in pixels
    center: float  # column of the optical axis
    horizon: float  # row of the horizon
    eye: float  # height in meters
    offset: float  # x in meters
    heading: float
    bend: float
    mirror: bool  # mirrored images show traffic that drives on the left

    def project(self, x: Floats, y: Floats, z: Floats) -> tuple[Floats, Floats]:
        """Return pixel coordinates (u right, v down) of points in front of the camera."""
        u = self.center + self.focal * ((x - self.offset) / z + self.heading + self.bend * z)
        v = self.horizon + self.focal * (self.eye - y) / z
        if self.mirror:
            u = self.columns - u
        return u, v

    def ground_depth(self, row: Floats) -> Floats:
        """Return the z of the ground at pixel rows below the horizon."""
        return self.focal * self.eye / (row - self.horizon)

    def ground_row(self, z: Floats) -> Floats:
        """Return the pixel row of the ground at z."""
        return self.horizon + self.focal * self.eye / z


def choose_camera(dice: Dice, rows: int, columns: int, offset: float) -> Camera:
    """Draw a random field of view, height, pitch and bend of the road."""
    unit = rows + columns / 2.0
    bend = dice.bell(0.0, 0.0019) if dice.chance(0.6) else 0.0
    return Camera(
        rows=rows,
        columns=columns,
        focal=unit * dice.between(0.78, 1.15),
        center=columns * (0.5 + dice.bell(0.0, 0.03)),
        horizon=rows * dice.between(0.35, 0.48) + 0.0137,
        eye=dice.between(1.15, 1.65),
        offset=offset,
        heading=dice.bell(0.0, 0.035) - bend * 22.0,
        bend=bend,
        mirror=dice.chance(0.2),
    )


def expose(planes: list[Plane], camera: Camera, dice: Dice) -> npt.NDArray[np.uint8]:
    """Apply lens blur, vignette, grain and a tone curve; return the image (H, W, 3)."""
    rows, columns = camera.rows, camera.columns
    side = dice.between(0.08, 0.17)
    falloff = np.float32(1.0) - _vignette(rows, columns) * np.float32(dice.between(0.06, 0.26))
    grain = _grain()
    needed = rows * columns + (1 << 16)
    if needed > len(grain):
        grain = np.resize(grain, needed)
    strength = np.float32(dice.between(1.2, 5.0))
    curve = _tone_curves()[dice.below(_CURVES)]
    image = np.empty((rows, columns, 3), dtype=np.uint8)
    for channel, plane in enumerate(planes):
        light = plane.reshape(rows, columns)
        _blur(light, side)
        light *= falloff
        start = dice.below(1 << 16)
        light += grain[start : start + rows * columns].reshape(rows, columns) * strength
        image[:, :, channel] = curve.take(light.astype(np.int32), mode="clip")
    return image


def _blur(plane: Plane, side: float) -> None:
    """Blur in place, with the weight `side` for each of four neighbors; the border stays."""
    inner = plane[1:-1, 1:-1]
    around = plane[:-2, 1:-1] + plane[2:, 1:-1]
    around += plane[1:-1, :-2]
    around += plane[1:-1, 2:]
    around *= np.float32(side)
    inner *= np.float32(1.0 - 4.0 * side)
    inner += around


@lru_cache(maxsize=4)
def _vignette(rows: int, columns: int) -> Plane:
    """Return the squared distance from the center of the image, 1 in the corners."""
    v = (np.arange(rows) + 0.5) / rows * 2.0 - 1.0
    u = (np.arange(columns) + 0.5) / columns * 2.0 - 1.0
    return ((v * v)[:, None] + (u * u)[None, :]).astype(np.float32) * np.float32(0.5)


@lru_cache(maxsize=1)
def _grain() -> Plane:
    """Return bell-shaped noise with a standard deviation of 1: sums of four random bytes."""
    count = 1 << 19
    raw = random_bytes(_GRAIN_KEY, 4 * count).reshape(4, count).astype(np.int32)
    centered = raw[0] + raw[1] + raw[2] + raw[3] - 510
    return centered.astype(np.float32) * np.float32(1.0 / 148.0)


@lru_cache(maxsize=1)
def _tone_curves() -> npt.NDArray[np.uint8]:
    """Return tone curves of growing contrast, from light in 0..511 to bytes."""
    light = np.arange(512, dtype=np.float64)
    rows = []
    for number in range(_CURVES):
        contrast = 0.25 * number / (_CURVES - 1)
        # Linear up to 190, then bending toward 255.
        over = np.maximum(light - 190.0, 0.0)
        soft = np.minimum(light, 190.0) + over * 65.0 / (over + 65.0)
        x = soft / 255.0
        curved = x + contrast * x * (1.0 - x) * (2.0 * x - 1.0) * 2.0
        rows.append(np.floor(np.minimum(np.maximum(curved * 255.0, 0.0), 255.0) + 0.5))
    return np.array(rows).astype(np.uint8)
