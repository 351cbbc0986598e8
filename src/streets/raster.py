"""Projection and rasterization: from placed shapes to a map of face ids.

On the image of a plane, 1/z and every texture coordinate divided by z are linear in the pixel
position. Each face therefore carries nine coefficients, and shading recovers depth and texture
coordinates exactly from them. Polygons are scan-converted in integers. All runs of pixels are
computed together and written in painting order with one scatter; later runs overwrite earlier
ones.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .geometry import NEAREST, Bank, Bools, Camera, Floats, Ints
from .randomness import SIDE
from .street import Placement, Site, Strip
from .textures import OPAQUE, Texture, atlas, texels_per_unit

Int32s = npt.NDArray[np.int32]
Columns = dict[str, Floats]  # a table by column

FARTHEST = 400.0
SUBPIXELS = 16
SHADOW_REACH = 50.0  # objects beyond this z cast no shadow
# Small faces such as lamps and door seams are dropped beyond this many meters per pixel of focal
# length. The remaining faces are the ones that cast shadows.
METERS_OF_DETAIL = 0.16

_HALF = SUBPIXELS // 2
_SHIFT = SUBPIXELS.bit_length() - 1


@dataclass(frozen=True)
class Strips:
    """Ground strips in painting order, with nine coefficients (see `_planes`) each."""

    table: Columns
    planes: Floats


@dataclass(frozen=True)
class Faces:
    """Faces in painting order.

    The corners of face i are first[i] .. first[i] + count[i].
    """

    first: Ints
    count: Ints
    u: Ints  # coordinates of each corner, in subpixels
    v: Ints
    label: Ints
    instance: Ints
    palette: Ints
    slot: Ints
    texture: Ints
    planes: Floats  # nine coefficients of each face, see `_planes`
    normal: Floats
    depth: Floats  # smallest z
    foot: Floats  # (x, z) of the shape's origin


@dataclass(frozen=True)
class Runs:
    """Horizontal runs of pixels in painting order, each with the id that it paints."""

    row: Ints
    left: Ints
    width: Ints
    owner: Ints

    def select(self, keep: Bools) -> "Runs":
        """Return the runs where `keep` is true."""
        return Runs(self.row[keep], self.left[keep], self.width[keep], self.owner[keep])


def ragged(first: Ints, count: Ints) -> Ints:
    """Concatenate the ranges first[i] .. first[i] + count[i]."""
    end = np.cumsum(count)
    result = np.repeat(first - end + count, count)
    result += np.arange(len(result))
    return result


def project_strips(site: Site) -> Strips:
    """Project the ground. All strips lie in one plane and differ in texel size."""
    camera = site.camera
    table = np.array(site.strips)
    columns = {name: table[:, i] for i, name in enumerate(Strip._fields)}
    texels = texels_per_unit()[columns["texture"].astype(np.int64)]
    planes = np.zeros((len(table), 9))
    depth = camera.focal * camera.eye
    planes[:, 1] = 1.0 / depth
    planes[:, 2] = -camera.horizon / depth
    direction = -1.0 if camera.mirror else 1.0
    edge = float(camera.columns) if camera.mirror else 0.0
    planes[:, 3] = direction * texels / camera.focal
    planes[:, 5] = texels * ((edge - camera.center) / camera.focal - camera.heading)
    planes[:, 8] = texels
    return Strips(columns, planes)


def sort_placements(site: Site, bank: Bank) -> Columns:
    """Return the columns of the site's placements, the far ones first."""
    table = np.array(site.placements, dtype=np.float64)
    order = np.argsort(-table[:, Placement._fields.index("depth")], kind="stable")
    table = table[order]
    columns = {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(Placement._fields)}
    shape = np.array([bank.index[name] for name in site.shapes], dtype=np.float64)
    return columns | {"shape": shape[order]}


def project_faces(
    column: Columns, bank: Bank, camera: Camera, shear: tuple[float, float] | None = None
) -> Faces:
    """Project all visible faces, in painting order.

    Args:
        column: The placements.
        bank: The shapes.
        camera: The camera.
        shear: Meters of shadow in x and z per meter of height. If given, the faces of objects
            that cast shadows are first flattened onto the ground along the rays of the sun.
    """
    if shear is None:
        kept = _in_view(column, bank, camera)
    else:
        kept = (column["casts"] > 0) & (column["z"] < SHADOW_REACH)
    column = {name: values[kept] for name, values in column.items()}
    shape = column["shape"].astype(np.int64)
    face = ragged(bank.first_face[shape], bank.face_count[shape])
    owner = np.repeat(np.arange(len(shape)), bank.face_count[shape])
    keep = bank.casts[face]
    if shear is None:
        keep |= column["z"][owner] < camera.focal * METERS_OF_DETAIL
    face, owner = face[keep], owner[keep]
    count = bank.corner_count[face]
    corner = ragged(bank.first_corner[face], count)

    x, y, z = _world(column, np.repeat(owner, count), bank.corners[corner])
    first = np.cumsum(count) - count
    depth = np.minimum.reduceat(z, first)
    if shear is not None:
        x, z = x + y * shear[0], z + y * shear[1]
        y = np.zeros_like(y)
        z = np.minimum(z, FARTHEST)
    z = np.maximum(z, NEAREST)
    u, v = camera.project(x, y, z)
    fixed_u, fixed_v = _subpixels(u), _subpixels(v)

    # Twice the signed area, in integers: exact, hence the same decision on every machine.
    following = _following(first, count)
    area = np.add.reduceat(fixed_u * fixed_v[following] - fixed_u[following] * fixed_v, first)
    if shear is None:
        flipped = (column["width"][owner] < 0) != camera.mirror
        seen = np.where(bank.two_sided[face], area != 0, np.where(flipped, -area, area) > 0)
    else:
        seen = area != 0
    seen &= depth >= NEAREST
    for position, size in ((fixed_u, camera.columns), (fixed_v, camera.rows)):
        seen &= np.maximum.reduceat(position, first) > 0
        seen &= np.minimum.reduceat(position, first) < size * SUBPIXELS
    face, owner, first, count = face[seen], owner[seen], first[seen], count[seen]

    override = column["texture"][owner].astype(np.int64)
    texture = np.where(override >= 0, override, bank.texture[face])
    texels = np.repeat(texels_per_unit()[texture], count)
    inner = ragged(first, count)
    at = np.repeat(owner, count)
    st = bank.coordinates[corner[inner]]
    s = (st[:, 0] * column["s_scale"][at] + column["s_shift"][at]) * texels
    t = (st[:, 1] * column["t_scale"][at] + column["t_shift"][at]) * texels
    start = np.cumsum(count) - count
    return Faces(
        first=start,
        count=count,
        u=fixed_u[inner],
        v=fixed_v[inner],
        label=column["label"][owner].astype(np.int64),
        instance=column["instance"][owner].astype(np.int64),
        palette=column["palette"][owner].astype(np.int64),
        slot=bank.slot[face],
        texture=texture,
        planes=_planes(u[inner], v[inner], z[inner], s, t, _three_corners(start, count)),
        normal=_normals(x, y, z, _three_corners(first, count), camera),
        depth=depth[seen],
        foot=np.stack((column["x"][owner], column["z"][owner]), axis=1),
    )


def _in_view(column: Columns, bank: Bank, camera: Camera) -> Bools:
    """Return False for placements that are certainly outside the image."""
    reach = bank.reach[column["shape"].astype(np.int64)]
    radius = reach[:, 0] * np.abs(column["width"]) + reach[:, 1] * np.abs(column["length"])
    z = np.maximum(column["z"], NEAREST)
    lateral = column["x"] - camera.offset + (camera.heading + camera.bend * z) * z
    slope = max(camera.center, camera.columns - camera.center) / camera.focal
    return np.abs(lateral) - 1.2 * radius < slope * (z + radius)


def _world(column: Columns, at: Ints, local: Floats) -> tuple[Floats, Floats, Floats]:
    """Scale, turn and move local corners to world coordinates."""
    across = local[:, 0] * column["width"][at]
    along = local[:, 2] * column["length"][at]
    cosine, sine = column["cosine"][at], column["sine"][at]
    x = column["x"][at] + cosine * across + sine * along
    y = column["y"][at] + local[:, 1] * column["height"][at]
    z = column["z"][at] - sine * across + cosine * along
    return x, y, z


def _subpixels(value: Floats) -> Ints:
    """Round pixel coordinates to subpixels, clamped far outside the image."""
    limited = np.minimum(np.maximum(value, -8192.0), 16384.0)
    return np.floor(limited * SUBPIXELS + 0.5).astype(np.int64)


def _following(first: Ints, count: Ints) -> Ints:
    """Return the index of the next corner around each polygon."""
    following = np.arange(int(count.sum())) + 1
    following[first + count - 1] = first
    return following


def _three_corners(first: Ints, count: Ints) -> tuple[Ints, Ints, Ints]:
    """Pick three corners far apart: adjacent corners may lie almost on a line."""
    return first, first + count // 3, first + 2 * count // 3


def _planes(
    u: Floats, v: Floats, z: Floats, s: Floats, t: Floats, corners: tuple[Ints, Ints, Ints]
) -> Floats:
    """Return the coefficients of u, v and 1 in 1/z, s/z and t/z: (faces, 9)."""
    a, b, c = corners
    du1, dv1 = u[b] - u[a], v[b] - v[a]
    du2, dv2 = u[c] - u[a], v[c] - v[a]
    det = du1 * dv2 - du2 * dv1
    thin = np.abs(det) < 0.05
    scale = np.where(thin, 0.0, 1.0 / np.where(thin, 1.0, det))
    planes = np.empty((len(a), 9))
    for k, value in enumerate((1.0 / z, s / z, t / z)):
        d1, d2 = value[b] - value[a], value[c] - value[a]
        along_u = (d1 * dv2 - d2 * dv1) * scale
        along_v = (d2 * du1 - d1 * du2) * scale
        planes[:, 3 * k] = along_u
        planes[:, 3 * k + 1] = along_v
        planes[:, 3 * k + 2] = value[a] - along_u * u[a] - along_v * v[a]
    return planes


def _normals(
    x: Floats, y: Floats, z: Floats, corners: tuple[Ints, Ints, Ints], camera: Camera
) -> Floats:
    """Return unit normals that point toward the camera."""
    a, b, c = corners
    edge1 = (x[b] - x[a], y[b] - y[a], z[b] - z[a])
    edge2 = (x[c] - x[a], y[c] - y[a], z[c] - z[a])
    nx = edge1[1] * edge2[2] - edge1[2] * edge2[1]
    ny = edge1[2] * edge2[0] - edge1[0] * edge2[2]
    nz = edge1[0] * edge2[1] - edge1[1] * edge2[0]
    length = np.sqrt(nx * nx + ny * ny + nz * nz)
    toward = nx * (x[a] - camera.offset) + ny * (y[a] - camera.eye) + nz * z[a]
    sign = np.where(toward > 0, -1.0, 1.0) / np.maximum(length, 1e-9)
    return np.stack((nx * sign, ny * sign, nz * sign), axis=1)


def strip_runs(strips: Strips, camera: Camera) -> Runs:
    """Rasterize ground strips row by row, so that they follow the bend of the road."""
    table = strips.table
    top, bottom = (
        np.ceil(camera.ground_row(table[edge]) - 0.5).clip(0, camera.rows).astype(np.int64)
        for edge in ("far", "near")
    )
    count = np.maximum(bottom - top, 0)
    row = ragged(top, count)
    owner = np.repeat(np.arange(len(count)), count)
    depth = camera.ground_depth(row.astype(np.float64) + 0.5)
    ground = np.zeros_like(depth)
    u, _ = camera.project(table["left"][owner], ground, depth)
    w, _ = camera.project(table["right"][owner], ground, depth)
    left, right = (
        np.ceil(edge - 0.5).clip(0, camera.columns).astype(np.int64)
        for edge in (np.minimum(u, w), np.maximum(u, w))
    )
    return Runs(row, left, right - left, owner).select(right > left)


def polygon_runs(faces: Faces, camera: Camera) -> Runs:
    """Rasterize faces: one run per row, between a downward and an upward edge."""
    if len(faces.first) == 0:
        empty = np.zeros(0, dtype=np.int64)
        return Runs(empty, empty, empty, empty)
    following = _following(faces.first, faces.count)
    x0, y0, x1, y1 = faces.u, faces.v, faces.u[following], faces.v[following]
    row0 = np.minimum(np.maximum(_first_center(y0), 0), camera.rows)
    row1 = np.minimum(np.maximum(_first_center(y1), 0), camera.rows)
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
    right = np.minimum(_first_center(np.maximum(downward, upward)), camera.columns)
    owner = np.repeat(np.arange(len(faces.first)), face_rows)
    return Runs(ragged(face_top, face_rows), left, right - left, owner).select(right > left)


def _first_center(position: Ints) -> Ints:
    """Return the first pixel with its center at or after a subpixel position."""
    return (position + (_HALF - 1)) >> _SHIFT


def paint(
    canvas: Int32s, runs: Runs, first_id: int, camera: Camera, faces: Faces | None = None
) -> None:
    """Write the ids first_id + owner into the flat canvas.

    The canvas has one spare element at the end, which receives the pixels in holes of `faces`.
    """
    start = runs.row * camera.columns + runs.left
    pixel = ragged(start, runs.width)
    if faces is not None:
        holed = (faces.texture >= Texture.CROWN)[runs.owner]
        if holed.any():
            spots = ragged((np.cumsum(runs.width) - runs.width)[holed], runs.width[holed])
            pixel[spots[_holes(runs.select(holed), faces, camera.focal)]] = len(canvas) - 1
    canvas[pixel] = np.repeat((runs.owner + first_id).astype(np.int32), runs.width)


def _holes(runs: Runs, faces: Faces, focal: float) -> Bools:
    """Return a mask of the pixels of the runs that fall into holes of their texture.

    Texture coordinates are exact at both ends of a run and step evenly between them, in 1/1024
    texels. That is enough for the outline of a leaf.
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
    s = _even_steps(ends[0], (ends[2] - ends[0]) // steps, runs.width)
    t = _even_steps(ends[1], (ends[3] - ends[1]) // steps, runs.width)
    texels = 96.0 * faces.depth / focal  # per pixel
    level = (texels > 2.0).astype(np.int64) + (texels > 4.0) + (texels > 8.0)
    tile = (level * len(Texture) + faces.texture) * (SIDE * SIDE)
    index = np.repeat(tile[runs.owner], runs.width)
    index += ((t >> 10) & (SIDE - 1)) << 8
    index += (s >> 10) & (SIDE - 1)
    return (atlas().take(index) & OPAQUE) == 0


def _even_steps(start: Int32s, step: Int32s, width: Ints) -> Int32s:
    """Return start[i], start[i] + step[i], ... for the pixels of every run."""
    value = np.repeat(step, width)
    first = np.cumsum(width) - width
    value[first] = start
    value[first[1:]] -= start[:-1] + step[:-1] * (width[:-1] - 1).astype(np.int32)
    return np.cumsum(value, dtype=np.int32)


def visible_runs(canvas: Int32s, columns: int) -> Runs:
    """Split the finished canvas into runs of one id within one row."""
    ids = canvas[:-1]
    fresh = np.ones(len(ids), dtype=np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=fresh[1:])
    fresh[::columns] = True
    start = np.flatnonzero(fresh)
    width = np.diff(start, append=len(ids))
    row = start // columns
    return Runs(row, start - row * columns, width, ids[start].astype(np.int64))
