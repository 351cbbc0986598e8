"""What all vehicles share: palette slots, flanks, ends, lamps in pairs, tires.

Forward is +z. Slots: 0 paint, 1 glass, 2 tire, 3 metal, 4 tail lamp, 5 head lamp, 6 dark trim,
7 second paint or number plate.
"""

from collections.abc import Sequence

from .shape import Point, Shape, patch
from .texture import Texture

PAINT, GLASS, TIRE, METAL, TAIL, HEAD, TRIM, SECOND = range(8)


def end(half_width: float, low: float, high: float, z: float, lean: float = 0.0) -> list[Point]:
    """A face across the vehicle; its top is `lean` further forward than its bottom."""
    return [
        (-half_width, low, z),
        (half_width, low, z),
        (half_width, high, z + lean),
        (-half_width, high, z + lean),
    ]


def flank(half_width: float, low: float, high: float, rear: float, front: float) -> list[Point]:
    """A face along the vehicle's right side."""
    return [
        (half_width, low, rear),
        (half_width, low, front),
        (half_width, high, front),
        (half_width, high, rear),
    ]


def pair(
    shape: Shape,
    quad: Sequence[Point],
    across: tuple[float, float],
    up: tuple[float, float],
    slot: int,
) -> None:
    """The same patch at the left and at the right of an end face."""
    shape.face(patch(quad, *across, *up), slot)
    shape.face(patch(quad, 1 - across[1], 1 - across[0], *up), slot)


def tire_ends(shape: Shape, half_width: float, places: Sequence[float], radius: float) -> None:
    """Tires as seen from behind or before, below the body."""
    for z in places:
        for side in (-1.0, 1.0):
            a, b = side * (half_width - 0.22), side * half_width
            shape.face(
                [(a, 0.0, z), (b, 0.0, z), (b, radius, z), (a, radius, z)], TIRE, two_sided=True
            )


def chassis(shape: Shape, half_width: float, rear: float, front: float, top: float) -> None:
    """The dark underside that keeps daylight from showing beneath the body."""
    low = top * 0.42
    profile = [
        (rear, low, half_width),
        (rear, top, half_width),
        (front, top, half_width),
        (front, low, half_width),
    ]
    shape.loft(profile, TRIM, Texture.PLAIN)
