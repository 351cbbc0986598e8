"""Geometry: shapes made of polygons, and the camera that projects them.

A shape is a list of polygons in an object's own meters, painted in the order of the list. Each
polygon is planar and convex or nearly so: every pixel row crosses it in one run. The faces of
solids point outward, so that faces that point away from the camera can be dropped. Flat faces are
visible from both sides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .randomness import Dice, total
from .textures import Texture

Point = tuple[float, float, float]
Point2 = tuple[float, float]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NEAREST = 0.6  # objects closer than this many meters are not drawn


@dataclass(frozen=True)
class Face:
    """One polygon: `slot` is its palette color, `casts` whether it casts a shadow."""

    corners: tuple[Point, ...]
    coordinates: tuple[Point2, ...]
    slot: int
    texture: Texture
    two_sided: bool
    casts: bool


@dataclass
class Shape:
    """Faces in painting order. `center` is an inner point of the current solid."""

    faces: list[Face] = field(default_factory=list)
    center: Point = (0.0, 0.0, 0.0)

    def face(
        self,
        corners: Sequence[Point],
        slot: int,
        texture: Texture = Texture.PLAIN,
        *,
        two_sided: bool = False,
        casts: bool = False,
        coordinates: Sequence[Point2] | None = None,
    ) -> None:
        """Add a polygon. A one-sided polygon is turned to point away from `center`."""
        points = list(corners)
        normal = _cross(_minus(points[1], points[0]), _minus(points[2], points[0]))
        if not two_sided and _dot(normal, _minus(_middle(points), self.center)) < 0:
            points.reverse()
        if coordinates is None:
            coordinates = _unwrap(points, normal)
        self.faces.append(Face(tuple(points), tuple(coordinates), slot, texture, two_sided, casts))

    def flat(
        self,
        outline: Sequence[Point2],
        slot: int,
        texture: Texture = Texture.PLAIN,
        *,
        casts: bool = True,
    ) -> None:
        """Add an outline in the plane z = 0, which faces the camera."""
        self.face([(x, y, 0.0) for x, y in outline], slot, texture, two_sided=True, casts=casts)

    def sprite(
        self, texture: Texture, left: float, right: float, low: float, high: float, slot: int = 0
    ) -> None:
        """Add a tile with holes, stretched over a rectangle in the plane z = 0."""
        # Round sprites leave the corners of the tile empty, so the outline omits them.
        cut = 0.0 if texture == Texture.BUSH else 0.25
        outline = [
            (cut, 0.0),
            (1.0 - cut, 0.0),
            (1.0, cut),
            (1.0, 1.0 - cut),
            (1.0 - cut, 1.0),
            (cut, 1.0),
            (0.0, 1.0 - cut),
            (0.0, cut),
        ]
        if texture == Texture.CONIFER:
            outline = [(0.0, 0.0), (1.0, 0.0), (0.62, 1.0), (0.38, 1.0)]
        corners = [(left + (right - left) * s, low + (high - low) * t, 0.0) for s, t in outline]
        self.face(corners, slot, texture, two_sided=True, casts=True, coordinates=outline)

    def loft(self, profile: Sequence[Point], slot: int, texture: Texture) -> None:
        """Add a solid symmetric about x = 0, from (z, y, half width) points."""
        count = len(profile)
        self.center = (
            0.0,
            total(y for _, y, _ in profile) / count,
            total(z for z, _, _ in profile) / count,
        )
        for (z0, y0, w0), (z1, y1, w1) in zip(profile, [*profile[1:], profile[0]], strict=True):
            corners = [(-w0, y0, z0), (w0, y0, z0), (w1, y1, z1), (-w1, y1, z1)]
            self.face(corners, slot, texture, casts=True)
        for side in (-1.0, 1.0):
            self.face([(side * w, y, z) for z, y, w in profile], slot, texture, casts=True)

    def both_sides(
        self, corners: Sequence[Point], slot: int, texture: Texture = Texture.PLAIN
    ) -> None:
        """Add a face and its mirror image in x."""
        self.face(corners, slot, texture)
        self.face([(-x, y, z) for x, y, z in corners], slot, texture)

    def reach(self) -> Point2:
        """Return the largest distances from the origin across (x) and along (z)."""
        corners = [corner for face in self.faces for corner in face.corners]
        return max(abs(x) for x, _, _ in corners), max(abs(z) for _, _, z in corners)


@dataclass(frozen=True)
class Bank:
    """Many shapes as flat arrays: shapes index faces, faces index corners."""

    index: dict[str, int]
    first_face: Ints
    face_count: Ints
    first_corner: Ints
    corner_count: Ints
    slot: Ints
    texture: Ints
    two_sided: Bools
    casts: Bools
    corners: Floats
    coordinates: Floats
    reach: Floats


def pack(shapes: dict[str, Shape]) -> Bank:
    """Pack named shapes into flat arrays."""
    faces = [face for shape in shapes.values() for face in shape.faces]
    face_count = np.array([len(shape.faces) for shape in shapes.values()])
    corner_count = np.array([len(face.corners) for face in faces])
    return Bank(
        index={name: index for index, name in enumerate(shapes)},
        first_face=np.cumsum(face_count) - face_count,
        face_count=face_count,
        first_corner=np.cumsum(corner_count) - corner_count,
        corner_count=corner_count,
        slot=np.array([face.slot for face in faces]),
        texture=np.array([int(face.texture) for face in faces]),
        two_sided=np.array([face.two_sided for face in faces]),
        casts=np.array([face.casts for face in faces]),
        corners=np.array([corner for face in faces for corner in face.corners]),
        coordinates=np.array([st for face in faces for st in face.coordinates]),
        reach=np.array([shape.reach() for shape in shapes.values()]),
    )


def rectangle(left: float, right: float, low: float, high: float) -> list[Point2]:
    """Return the corners of a rectangle."""
    return [(left, low), (right, low), (right, high), (left, high)]


def ellipse(x: float, y: float, half_width: float, half_height: float, sides: int) -> list[Point2]:
    """Return a polygon inscribed in an ellipse."""
    return [
        (
            round(x + half_width * math.cos(2 * math.pi * (i + 0.5) / sides), 6),
            round(y + half_height * math.sin(2 * math.pi * (i + 0.5) / sides), 6),
        )
        for i in range(sides)
    ]


def bar(start: Point2, start_width: float, end: Point2, end_width: float) -> list[Point2]:
    """Return the outline of a tapering bar between two points."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.sqrt(dx * dx + dy * dy)
    nx, ny = -dy / length / 2, dx / length / 2
    return [
        (start[0] + nx * start_width, start[1] + ny * start_width),
        (end[0] + nx * end_width, end[1] + ny * end_width),
        (end[0] - nx * end_width, end[1] - ny * end_width),
        (start[0] - nx * start_width, start[1] - ny * start_width),
    ]


def patch(quad: Sequence[Point], left: float, right: float, low: float, high: float) -> list[Point]:
    """Return the part of a quad between fractions of its width and height.

    The corners of the quad run counterclockwise from the lower left.
    """

    def at(a: float, b: float) -> Point:
        weights = ((1 - a) * (1 - b), a * (1 - b), a * b, (1 - a) * b)
        return (
            total(w * p[0] for w, p in zip(weights, quad, strict=True)),
            total(w * p[1] for w, p in zip(weights, quad, strict=True)),
            total(w * p[2] for w, p in zip(weights, quad, strict=True)),
        )

    return [at(left, low), at(right, low), at(right, high), at(left, high)]


def _minus(a: Point, b: Point) -> Point:
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2])


def _cross(a: Point, b: Point) -> Point:
    return (a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0])


def _dot(a: Point, b: Point) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _middle(corners: Sequence[Point]) -> Point:
    count = len(corners)
    return (
        total(p[0] for p in corners) / count,
        total(p[1] for p in corners) / count,
        total(p[2] for p in corners) / count,
    )


def _unwrap(corners: Sequence[Point], normal: Point) -> tuple[Point2, ...]:
    """Return texture coordinates in meters, along two axes most parallel to the face."""
    size = [abs(n) for n in normal]
    if size[0] >= max(size[1], size[2]):
        return tuple((p[2], p[1]) for p in corners)
    if size[2] >= size[1]:
        return tuple((p[0], p[1]) for p in corners)
    return tuple((p[0], p[2]) for p in corners)


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
