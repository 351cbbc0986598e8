"""From the stage to faces on the image plane: placement, perspective, back faces, texture planes.

On the image of a plane, 1/z and every texture coordinate over z are linear in the pixel position.
Each face therefore carries nine numbers, from which shading recovers depth and texture exactly.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .camera import NEAREST, Camera
from .stage import PLACEMENT_FIELDS, STRIP_FIELDS, Stage, bank
from .texture import texels_per_unit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Placements = dict[str, Floats]

FARTHEST = 400.0
SUBPIXELS = 16
SHADOW_REACH = 50.0
# Fittings such as lamps and door seams are left out beyond this many meters for a pixel of focal
# length; what is left are the faces that also cast shadows.
METERS_OF_DETAIL = 0.16


@dataclass(frozen=True)
class Faces:
    """Faces in painting order. Corners of face i are first[i] .. first[i] + count[i]."""

    first: Ints
    count: Ints
    u: Ints
    v: Ints
    label: Ints
    instance: Ints
    palette: Ints
    slot: Ints
    texture: Ints
    planes: Floats
    normal: Floats
    depth: Floats
    foot: Floats


@dataclass(frozen=True)
class Strips:
    """Ground strips in painting order, with the same nine numbers for each."""

    table: dict[str, Floats]
    planes: Floats


def ragged(first: Ints, count: Ints) -> Ints:
    """The concatenation of the ranges first[i] .. first[i] + count[i]."""
    past = np.cumsum(count)
    result = np.repeat(first - past + count, count)
    result += _naturals(len(result))
    return result


@lru_cache(maxsize=1)
def _many_naturals() -> Ints:
    return np.arange(1 << 20, dtype=np.int64)


def _naturals(count: int) -> Ints:
    many = _many_naturals()
    return many[:count] if count <= len(many) else np.arange(count, dtype=np.int64)


def _fixed(value: Floats) -> Ints:
    """Pixels to sub-pixel integers, far-off points held at a safe distance."""
    limited = np.minimum(np.maximum(value, -8192.0), 16384.0)
    return np.floor(limited * SUBPIXELS + 0.5).astype(np.int64)


def _spread(first: Ints, count: Ints) -> tuple[Ints, Ints, Ints]:
    """Three corners well apart: neighboring ones may lie almost on a line."""
    return first, first + count // 3, first + 2 * count // 3


def _texture_planes(
    u: Floats, v: Floats, z: Floats, s: Floats, t: Floats, trio: tuple[Ints, Ints, Ints]
) -> Floats:
    """Coefficients of u, v and 1 for 1/z, s/z and t/z, from three corners of each face."""
    a, b, c = trio
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


def lay_strips(stage: Stage, camera: Camera) -> Strips:
    """Texture planes of the ground: all strips share one plane and differ in texel size."""
    table = np.array(stage.strips)
    columns = {name: table[:, i] for i, name in enumerate(STRIP_FIELDS)}
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


def arrange(stage: Stage) -> Placements:
    """The columns of the stage's placements, far ones first."""
    table = np.array(stage.placements)
    table = table[np.argsort(-table[:, PLACEMENT_FIELDS.index("depth")], kind="stable")]
    return {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(PLACEMENT_FIELDS)}


def _in_view(column: Placements, camera: Camera) -> npt.NDArray[np.bool_]:
    """A quick test that drops most placements beside the view."""
    reach = bank().reach[column["shape"].astype(np.int64)]
    radius = reach[:, 0] * np.abs(column["width"]) + reach[:, 1] * np.abs(column["length"])
    z = np.maximum(column["z"], NEAREST)
    lateral = column["x"] - camera.offset + (camera.heading + camera.bend * z) * z
    slope = max(camera.center, camera.columns - camera.center) / camera.focal
    return np.abs(lateral) - 1.2 * radius < slope * (z + radius)


def place_faces(column: Placements, camera: Camera, shear: tuple[float, float] | None) -> Faces:
    """All visible faces in painting order, or, given the sun's shear, their shadows' outlines."""
    shapes = bank()
    if shear is None:
        kept = _in_view(column, camera)
    else:
        kept = (column["casts"] > 0) & (column["z"] < SHADOW_REACH)
    column = {name: values[kept] for name, values in column.items()}
    shape = column["shape"].astype(np.int64)
    face = ragged(shapes.first_face[shape], shapes.face_count[shape])
    owner = np.repeat(np.arange(len(shape)), shapes.face_count[shape])
    keep = shapes.casts[face]
    if shear is None:
        keep |= column["z"][owner] < camera.focal * METERS_OF_DETAIL
    face, owner = face[keep], owner[keep]
    count = shapes.corner_count[face]
    corner = ragged(shapes.first_corner[face], count)
    at = np.repeat(owner, count)

    local = shapes.corners[corner]
    across = local[:, 0] * column["width"][at]
    along = local[:, 2] * column["length"][at]
    cosine, sine = column["cosine"][at], column["sine"][at]
    x = column["x"][at] + cosine * across + sine * along
    y = column["y"][at] + local[:, 1] * column["height"][at]
    z = column["z"][at] - sine * across + cosine * along
    first = np.cumsum(count) - count
    depth = np.minimum.reduceat(z, first)
    if shear is not None:
        x, z = x + y * shear[0], z + y * shear[1]
        y = np.zeros_like(y)
        z = np.minimum(z, FARTHEST)
    z = np.maximum(z, NEAREST)
    u, v = camera.project(x, y, z)
    fixed_u, fixed_v = _fixed(u), _fixed(v)

    # Twice the signed area, in integers: exact, hence the same decision everywhere.
    following = np.arange(len(corner)) + 1
    following[first + count - 1] = first
    turn = fixed_u * fixed_v[following] - fixed_u[following] * fixed_v
    area = np.add.reduceat(turn, first)
    flipped = (column["width"][owner] < 0) != camera.mirror
    seen = np.where(shapes.two_sided[face], area != 0, np.where(flipped, -area, area) > 0)
    if shear is not None:
        seen = area != 0
    seen &= depth >= NEAREST
    seen &= np.maximum.reduceat(fixed_u, first) > 0
    seen &= np.minimum.reduceat(fixed_u, first) < camera.columns * SUBPIXELS
    seen &= np.maximum.reduceat(fixed_v, first) > 0
    seen &= np.minimum.reduceat(fixed_v, first) < camera.rows * SUBPIXELS
    face, owner, first, count = face[seen], owner[seen], first[seen], count[seen]

    own = shapes.texture[face]
    override = column["texture"][owner].astype(np.int64)
    texture = np.where(override >= 0, override, own)
    texels = np.repeat(texels_per_unit()[texture], count)
    inner = ragged(first, count)
    at = np.repeat(owner, count)
    st = shapes.coordinates[corner[inner]]
    s = (st[:, 0] * column["s_scale"][at] + column["s_shift"][at]) * texels
    t = (st[:, 1] * column["t_scale"][at] + column["t_shift"][at]) * texels
    start = np.cumsum(count) - count
    planes = _texture_planes(u[inner], v[inner], z[inner], s, t, _spread(start, count))

    a, b, c = _spread(first, count)
    edge1 = (x[b] - x[a], y[b] - y[a], z[b] - z[a])
    edge2 = (x[c] - x[a], y[c] - y[a], z[c] - z[a])
    nx = edge1[1] * edge2[2] - edge1[2] * edge2[1]
    ny = edge1[2] * edge2[0] - edge1[0] * edge2[2]
    nz = edge1[0] * edge2[1] - edge1[1] * edge2[0]
    length = np.sqrt(nx * nx + ny * ny + nz * nz)
    toward = nx * (x[a] - camera.offset) + ny * (y[a] - camera.eye) + nz * z[a]
    sign = np.where(toward > 0, -1.0, 1.0) / np.maximum(length, 1e-9)
    return Faces(
        first=start,
        count=count,
        u=fixed_u[inner],
        v=fixed_v[inner],
        label=column["label"][owner].astype(np.int64),
        instance=column["instance"][owner].astype(np.int64),
        palette=column["palette"][owner].astype(np.int64),
        slot=shapes.slot[face],
        texture=texture,
        planes=planes,
        normal=np.stack((nx * sign, ny * sign, nz * sign), axis=1),
        depth=depth[seen],
        foot=np.stack((column["x"][owner], column["z"][owner]), axis=1),
    )
