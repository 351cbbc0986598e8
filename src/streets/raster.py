"""Scan conversion in integers: polygons and ground strips become runs of pixels, runs an id map.

All runs of a scene are computed together, then written in painting order with one scatter; where
runs overlap, the later one stays.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .camera import Camera
from .geometry import SUBPIXELS, Faces, Ints, Strips, ragged
from .noise import SIDE
from .texture import OPAQUE, Texture, atlas

Int32s = npt.NDArray[np.int32]

_HALF = SUBPIXELS // 2
_SHIFT = SUBPIXELS.bit_length() - 1


@dataclass(frozen=True)
class Runs:
    """Horizontal runs of pixels in painting order, each with the id it paints."""

    row: Ints
    left: Ints
    width: Ints
    owner: Ints

    def where(self, keep: npt.NDArray[np.bool_]) -> "Runs":
        """Some of the runs, in the same order."""
        return Runs(self.row[keep], self.left[keep], self.width[keep], self.owner[keep])


def _first_center(position: Ints) -> Ints:
    """The first pixel whose center is at or after a sub-pixel position."""
    return (position + (_HALF - 1)) >> _SHIFT


def polygon_runs(faces: Faces, rows: int, columns: int) -> "Runs":
    """One run for each row of each face, from where its outline goes down to where it goes up."""
    if len(faces.first) == 0:
        empty = np.zeros(0, dtype=np.int64)
        return Runs(empty, empty, empty, empty)
    following = np.arange(len(faces.u)) + 1
    following[faces.first + faces.count - 1] = faces.first
    x0, y0, x1, y1 = faces.u, faces.v, faces.u[following], faces.v[following]
    row0 = np.minimum(np.maximum(_first_center(y0), 0), rows)
    row1 = np.minimum(np.maximum(_first_center(y1), 0), rows)
    top, bottom = np.minimum(row0, row1), np.maximum(row0, row1)

    face_top = np.minimum.reduceat(top, faces.first)
    face_rows = np.maximum.reduceat(bottom, faces.first) - face_top
    base = np.cumsum(face_rows) - face_rows - face_top

    edge = np.repeat(np.arange(len(x0)), bottom - top)
    row = ragged(top, bottom - top)
    fall = (y1 - y0)[edge]
    # The quotients are too small for rounding to carry a fraction up to the next integer, so the
    # floor of the float quotient is the integer quotient.
    run = (row * SUBPIXELS + _HALF - y0[edge]) * (x1 - x0)[edge] / fall
    cut = x0[edge] + np.floor(run).astype(np.int64)
    face = np.repeat(np.arange(len(faces.first)), faces.count)
    position = base[face][edge] + row
    downward = np.zeros(int(face_rows.sum()), dtype=np.int64)
    upward = np.zeros_like(downward)
    down = fall > 0
    downward[position[down]] = cut[down]
    upward[position[~down]] = cut[~down]
    left = np.maximum(_first_center(np.minimum(downward, upward)), 0)
    right = np.minimum(_first_center(np.maximum(downward, upward)), columns)
    owner = np.repeat(np.arange(len(faces.first)), face_rows)
    row = ragged(face_top, face_rows)
    keep = right > left
    return Runs(row[keep], left[keep], (right - left)[keep], owner[keep])


def strip_runs(strips: Strips, camera: Camera) -> "Runs":
    """Runs of ground strips row by row, so that they follow the bend of the road."""
    table = strips.table
    bounds = []
    for edge in ("far", "near"):
        row = np.ceil(camera.ground_row(table[edge]) - 0.5)
        bounds.append(np.minimum(np.maximum(row, 0), camera.rows).astype(np.int64))
    count = np.maximum(bounds[1] - bounds[0], 0)
    row = ragged(bounds[0], count)
    owner = np.repeat(np.arange(len(count)), count)
    depth = camera.ground_depth(row.astype(np.float64) + 0.5)
    ground = np.zeros_like(depth)
    u, _ = camera.project(table["left"][owner], ground, depth)
    w, _ = camera.project(table["right"][owner], ground, depth)
    limit = float(camera.columns)
    left = np.minimum(np.maximum(np.ceil(np.minimum(u, w) - 0.5), 0.0), limit).astype(np.int64)
    right = np.minimum(np.maximum(np.ceil(np.maximum(u, w) - 0.5), 0.0), limit).astype(np.int64)
    keep = right > left
    return Runs(row[keep], left[keep], (right - left)[keep], owner[keep])


def _holes(runs: Runs, faces: Faces, focal: float) -> npt.NDArray[np.bool_]:
    """Which pixels of runs of faces with holes fall into a hole.

    Texture coordinates are exact at both ends of a run and step evenly between them, in 1/1024
    texels: the outline of a leaf needs no more.
    """
    planes = faces.planes[runs.owner]
    v = runs.row + 0.5
    ends = []
    for u in (runs.left + 0.5, runs.left + runs.width - 0.5):
        inverse = np.maximum(planes[:, 0] * u + planes[:, 1] * v + planes[:, 2], 1e-3)
        for k in (3, 6):
            value = (planes[:, k] * u + planes[:, k + 1] * v + planes[:, k + 2]) / inverse
            limited = np.minimum(np.maximum(value, -1e5), 1e5)
            ends.append(np.floor(limited * 1024.0).astype(np.int32))
    steps = np.maximum(runs.width - 1, 1).astype(np.int32)
    across = _even_steps(ends[0], (ends[2] - ends[0]) // steps, runs.width)
    upwards = _even_steps(ends[1], (ends[3] - ends[1]) // steps, runs.width)
    packed = 96.0 * faces.depth / focal
    level = (packed > 2.0).astype(np.int64) + (packed > 4.0) + (packed > 8.0)
    tile = (level * len(Texture) + faces.texture) * (SIDE * SIDE)
    index = np.repeat(tile[runs.owner], runs.width)
    index += ((upwards >> 10) & (SIDE - 1)) << 8
    index += (across >> 10) & (SIDE - 1)
    return (atlas().take(index) & OPAQUE) == 0


def _even_steps(start: Int32s, step: Int32s, width: Ints) -> Int32s:
    """start[i], start[i] + step[i], ... for the pixels of every run, as one running sum."""
    value = np.repeat(step, width)
    first = np.cumsum(width) - width
    value[first] = start
    value[first[1:]] -= start[:-1] + step[:-1] * (width[:-1] - 1).astype(np.int32)
    return np.cumsum(value, dtype=np.int32)


def paint(
    canvas: npt.NDArray[np.int32],
    runs: Runs,
    faces: Faces | None,
    offset: int,
    columns: int,
    focal: float,
) -> None:
    """Write owner + offset into the flat canvas; its one spare last element takes the holes."""
    start = runs.row * columns + runs.left
    pixel = ragged(start, runs.width)
    if faces is not None:
        holed = (faces.texture >= Texture.CROWN)[runs.owner]
        if holed.any():
            spots = ragged((np.cumsum(runs.width) - runs.width)[holed], runs.width[holed])
            spots = spots[_holes(runs.where(holed), faces, focal)]
            pixel[spots] = len(canvas) - 1
    canvas[pixel] = np.repeat((runs.owner + offset).astype(np.int32), runs.width)


def visible_runs(canvas: npt.NDArray[np.int32], columns: int) -> "Runs":
    """The finished canvas as runs of one id, none longer than a row."""
    ids = canvas[:-1]
    fresh = np.ones(len(ids), dtype=np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=fresh[1:])
    fresh[::columns] = True
    start = np.flatnonzero(fresh)
    width = np.diff(start, append=len(ids))
    row = start // columns
    return Runs(row, start - row * columns, width, ids[start].astype(np.int64))
