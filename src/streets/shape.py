"""Shapes: lists of faces in an object's own meters, drawn in the order they are listed.

A face is a planar polygon whose every pixel row is one run (convex, or nearly). Faces of solids
are turned to look outwards, so that those turned away from the camera can be dropped; flat faces
are seen from both sides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .randomness import total
from .texture import Texture

Point = tuple[float, float, float]
Point2 = tuple[float, float]


@dataclass(frozen=True)
class Face:
    """One polygon: corners, texture coordinates, palette slot and texture."""

    corners: tuple[Point, ...]
    coordinates: tuple[Point2, ...]
    slot: int
    texture: Texture
    two_sided: bool
    casts: bool


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
    """Texture coordinates in meters, along the two axes the face is most parallel to."""
    size = [abs(n) for n in normal]
    if size[0] >= max(size[1], size[2]):
        return tuple((p[2], p[1]) for p in corners)
    if size[2] >= size[1]:
        return tuple((p[0], p[1]) for p in corners)
    return tuple((p[0], p[2]) for p in corners)


def patch(quad: Sequence[Point], left: float, right: float, low: float, high: float) -> list[Point]:
    """The part of a quad (corners anticlockwise from the lower left) between two fractions."""

    def at(a: float, b: float) -> Point:
        weights = ((1 - a) * (1 - b), a * (1 - b), a * b, (1 - a) * b)
        return (
            total(w * p[0] for w, p in zip(weights, quad, strict=True)),
            total(w * p[1] for w, p in zip(weights, quad, strict=True)),
            total(w * p[2] for w, p in zip(weights, quad, strict=True)),
        )

    return [at(left, low), at(right, low), at(right, high), at(left, high)]


def ring(x: float, y: float, half_width: float, half_height: float, sides: int) -> list[Point2]:
    """A polygon inscribed in an ellipse."""
    return [
        (
            round(x + half_width * math.cos(2 * math.pi * (i + 0.5) / sides), 6),
            round(y + half_height * math.sin(2 * math.pi * (i + 0.5) / sides), 6),
        )
        for i in range(sides)
    ]


def limb(start: Point2, start_width: float, end: Point2, end_width: float) -> list[Point2]:
    """A tapering bar between two points."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.sqrt(dx * dx + dy * dy)
    nx, ny = -dy / length / 2, dx / length / 2
    return [
        (start[0] + nx * start_width, start[1] + ny * start_width),
        (end[0] + nx * end_width, end[1] + ny * end_width),
        (end[0] - nx * end_width, end[1] - ny * end_width),
        (start[0] - nx * start_width, start[1] - ny * start_width),
    ]


@dataclass
class Shape:
    """Faces in painting order; `center` is an inner point of the solid being built."""

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
        """Add a polygon, turned away from `center` unless it is seen from both sides."""
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
        z: float = 0.0,
        casts: bool = True,
    ) -> None:
        """Add an outline in the plane that faces along the road."""
        self.face([(x, y, z) for x, y in outline], slot, texture, two_sided=True, casts=casts)

    def sprite(
        self, texture: Texture, left: float, right: float, low: float, high: float, slot: int = 0
    ) -> None:
        """Add a tile with holes, stretched once over a rectangle facing along the road."""
        # The corners are cut off: the round sprites leave them empty.
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
        self.face(
            [(left + (right - left) * s, low + (high - low) * t, 0.0) for s, t in outline],
            slot,
            texture,
            two_sided=True,
            casts=True,
            coordinates=outline,
        )

    def reach(self) -> Point2:
        """The largest distances across and along from the shape's origin."""
        corners = [corner for face in self.faces for corner in face.corners]
        return max(abs(x) for x, _, _ in corners), max(abs(z) for _, _, z in corners)

    def loft(
        self, profile: Sequence[Point], slot: int, texture: Texture, *, casts: bool = True
    ) -> None:
        """Add a solid symmetric about x = 0: side outline of (z, y, half-width) points."""
        count = len(profile)
        self.center = (
            0.0,
            total(y for _, y, _ in profile) / count,
            total(z for z, _, _ in profile) / count,
        )
        for (z0, y0, w0), (z1, y1, w1) in zip(profile, [*profile[1:], profile[0]], strict=True):
            self.face(
                [(-w0, y0, z0), (w0, y0, z0), (w1, y1, z1), (-w1, y1, z1)],
                slot,
                texture,
                casts=casts,
            )
        for side in (-1.0, 1.0):
            self.face([(side * w, y, z) for z, y, w in profile], slot, texture, casts=casts)

    def both_sides(
        self, corners: Sequence[Point], slot: int, texture: Texture = Texture.PLAIN
    ) -> None:
        """Add a face and its mirror image in x."""
        self.face(corners, slot, texture)
        self.face([(-x, y, z) for x, y, z in corners], slot, texture)

    def wheels(
        self, half_width: float, axles: Sequence[float], radius: float, tire: int, rim: int
    ) -> None:
        """Discs on both flanks at every axle."""
        for axle in axles:
            for slot, size in ((tire, 1.0), (rim, 0.62), (tire, 0.16)):
                disc = ring(axle, radius, radius * size, radius * size, 12)
                self.both_sides([(half_width + 0.01, y, z) for z, y in disc], slot)
