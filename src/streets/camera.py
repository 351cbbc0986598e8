"""The pinhole camera on the ego car, and the bend of the road it looks along.

World axes: x to the right of the road's center line, y up from the ground, z forward along the
road, in meters. A bend moves every point sideways by a quadratic in z, so that a curved street
needs no geometry of its own.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .randomness import Dice

Floats = npt.NDArray[np.float64]

NEAREST = 0.6


@dataclass(frozen=True)
class Camera:
    """Where the camera is and how it maps meters to pixels."""

    rows: int
    columns: int
    focal: float
    center: float
    horizon: float
    eye: float
    offset: float
    heading: float
    bend: float
    mirror: bool

    def project(self, x: Floats, y: Floats, z: Floats) -> tuple[Floats, Floats]:
        """Pixel coordinates (u right, v down) of world points in front of the camera."""
        u = self.center + self.focal * ((x - self.offset) / z + self.heading + self.bend * z)
        v = self.horizon + self.focal * (self.eye - y) / z
        if self.mirror:
            u = self.columns - u
        return u, v

    def ground_depth(self, row: Floats) -> Floats:
        """Distance along the road of the ground seen at pixel rows below the horizon."""
        return self.focal * self.eye / (row - self.horizon)

    def ground_row(self, z: Floats) -> Floats:
        """Pixel row at which ground at distance z appears."""
        return self.horizon + self.focal * self.eye / z


def choose_camera(dice: Dice, rows: int, columns: int, offset: float) -> Camera:
    """A plausible windscreen camera: field of view, height, pitch and road bend all vary."""
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
