"""Bicycles and motorcycles as flat figures that face the camera.

Slots: 0 frame, 1 seat, 2 tire, 3 metal, 4 tail lamp, 5 head lamp, 6 dark trim, 7 second paint.
"""

from .bodywork import HEAD, METAL, SECOND, TAIL, TIRE, TRIM
from .shape import Shape, limb, ring
from .texture import Texture

FRAME, SEAT = 0, 1


def _bicycle_side() -> Shape:
    """A bicycle in profile."""
    shape = Shape()
    for x in (-0.52, 0.52):
        shape.sprite(Texture.WHEEL, x - 0.34, x + 0.34, 0.0, 0.68, METAL)
    crank, seat, head, rear = (-0.05, 0.3), (-0.2, 0.82), (0.36, 0.85), (-0.52, 0.34)
    for start, end, width in (
        (crank, seat, 0.06),
        (crank, head, 0.065),
        (seat, head, 0.06),
        (rear, crank, 0.05),
        (rear, seat, 0.045),
        ((0.52, 0.34), (0.34, 0.95), 0.05),
    ):
        shape.flat(limb(start, width, end, width), FRAME)
    shape.flat(limb((0.3, 0.97), 0.05, (0.46, 1.04), 0.05), TRIM)
    shape.flat(limb((-0.34, 0.9), 0.08, (-0.08, 0.9), 0.05), SEAT)
    shape.flat(ring(crank[0], crank[1], 0.09, 0.09, 8), METAL)
    return shape


def _bicycle_end() -> Shape:
    """A bicycle from the front or from behind."""
    shape = Shape()
    shape.flat([(-0.03, 0.0), (0.03, 0.0), (0.03, 0.68), (-0.03, 0.68)], TIRE)
    shape.flat([(-0.04, 0.5), (0.04, 0.5), (0.03, 0.95), (-0.03, 0.95)], FRAME)
    shape.flat([(-0.3, 1.0), (0.3, 1.0), (0.3, 1.05), (-0.3, 1.05)], TRIM)
    shape.flat([(-0.12, 0.88), (0.12, 0.88), (0.06, 0.96), (-0.06, 0.96)], SEAT)
    shape.flat([(-0.16, 0.27), (0.16, 0.27), (0.16, 0.31), (-0.16, 0.31)], METAL)
    shape.flat(ring(0.0, 0.72, 0.05, 0.05, 6), TAIL)
    return shape


def _motorcycle_side() -> Shape:
    """A motorcycle in profile."""
    shape = Shape()
    for x in (-0.68, 0.68):
        shape.flat(ring(x, 0.32, 0.32, 0.32, 12), TIRE)
        shape.flat(ring(x, 0.32, 0.19, 0.19, 10), METAL)
        shape.flat(ring(x, 0.32, 0.05, 0.05, 6), TIRE)
    shape.flat(limb((0.68, 0.32), 0.09, (0.42, 1.0), 0.08), METAL)
    shape.flat([(-0.35, 0.22), (0.3, 0.2), (0.4, 0.6), (-0.4, 0.62)], TRIM)
    shape.flat(ring(-0.02, 0.38, 0.2, 0.16, 8), METAL)
    shape.flat(limb((-0.8, 0.3), 0.1, (0.0, 0.26), 0.08), METAL)
    shape.flat(
        [(-0.2, 0.62), (0.38, 0.6), (0.45, 0.86), (0.2, 0.95), (-0.12, 0.82)],
        FRAME,
        Texture.BODYWORK,
    )
    shape.flat([(-0.95, 0.72), (-0.3, 0.6), (-0.12, 0.8), (-0.5, 0.84), (-0.98, 0.9)], SEAT)
    shape.flat([(-1.0, 0.66), (-0.55, 0.6), (-0.5, 0.72), (-0.98, 0.8)], FRAME, Texture.BODYWORK)
    shape.flat(
        [(0.42, 0.78), (0.62, 0.82), (0.6, 1.0), (0.46, 1.12), (0.36, 1.0)], FRAME, Texture.BODYWORK
    )
    shape.flat(ring(0.62, 0.88, 0.06, 0.08, 8), HEAD)
    shape.flat(ring(-1.0, 0.78, 0.04, 0.05, 6), TAIL)
    shape.flat(limb((0.26, 1.06), 0.05, (0.44, 1.04), 0.05), TRIM)
    return shape


def _motorcycle_end(view: str) -> Shape:
    """A motorcycle from the front or from behind."""
    shape = Shape()
    shape.flat([(-0.09, 0.0), (0.09, 0.0), (0.09, 0.64), (-0.09, 0.64)], TIRE)
    shape.flat([(-0.24, 0.25), (0.24, 0.25), (0.2, 0.6), (-0.2, 0.6)], TRIM)
    shape.flat(
        [(-0.16, 0.55), (0.16, 0.55), (0.22, 0.85), (0.12, 1.0), (-0.12, 1.0), (-0.22, 0.85)],
        FRAME,
        Texture.BODYWORK,
    )
    shape.flat([(-0.4, 1.02), (0.4, 1.02), (0.4, 1.07), (-0.4, 1.07)], TRIM)
    for side in (-1.0, 1.0):
        shape.flat(ring(side * 0.42, 1.2, 0.07, 0.05, 6), TRIM)
    if view == "back":
        shape.flat([(-0.12, 0.72), (0.12, 0.72), (0.12, 0.8), (-0.12, 0.8)], TAIL)
        shape.flat([(-0.1, 0.5), (0.1, 0.5), (0.1, 0.62), (-0.1, 0.62)], SECOND)
    else:
        shape.flat(ring(0.0, 0.86, 0.1, 0.09, 10), HEAD)
    return shape


def shapes() -> dict[str, Shape]:
    """Everything here by name."""
    return {
        "bicycle side": _bicycle_side(),
        "bicycle end": _bicycle_end(),
        "motorcycle side": _motorcycle_side(),
        "motorcycle back": _motorcycle_end("back"),
        "motorcycle front": _motorcycle_end("front"),
    }
