"""Cast shadows: the scene's own faces, flattened onto the ground along the sun's rays."""

import numpy as np
import numpy.typing as npt

from .camera import NEAREST, Camera
from .classes import Class
from .geometry import FARTHEST, Faces, Placements, place_faces
from .light import Light
from .raster import paint, polygon_runs

Mask = npt.NDArray[np.bool_]


def cast_shadows(
    placements: Placements, faces: Faces, camera: Camera, light: Light
) -> tuple[Mask, Mask]:
    """Pixels whose ground lies in shadow, and faces whose foot lies in a building's shadow."""
    cast = place_faces(placements, camera, light.shear)
    runs = polygon_runs(cast, camera.rows, camera.columns)
    large = (cast.label == Class.BUILDING) | (cast.label == Class.WALL)
    canvas = np.zeros(camera.rows * camera.columns + 1, dtype=np.int32)
    paint(canvas, runs.where(large[runs.owner]), cast, 1, camera.columns, camera.focal)

    x, z = faces.foot[:, 0], np.minimum(np.maximum(faces.foot[:, 1], NEAREST), FARTHEST)
    u, v = camera.project(x, np.zeros_like(x), z)
    row = np.minimum(np.maximum(v, 0.0), camera.rows - 1.0).astype(np.int64)
    column = np.minimum(np.maximum(u, 0.0), camera.columns - 1.0).astype(np.int64)
    shaded = canvas[row * camera.columns + column] > 0
    shaded &= (faces.label != Class.BUILDING) & (faces.label != Class.WALL)

    paint(canvas, runs.where(~large[runs.owner]), cast, 1, camera.columns, camera.focal)
    return canvas[:-1] > 0, shaded
