"""Cars, delivery vans, and the ego car's bonnet."""

from .bodywork import (
    GLASS,
    HEAD,
    METAL,
    PAINT,
    SECOND,
    TAIL,
    TIRE,
    TRIM,
    chassis,
    end,
    flank,
    pair,
    tire_ends,
)
from .shape import Point, Shape, patch
from .texture import Texture


def _lower_body(
    shape: Shape, w: float, rear: float, front: float, deck: float, bonnet: float
) -> None:
    """Sills, wings and bonnet, with seams and wheel arches."""
    nose = deck - 0.2
    shape.loft(
        [
            (rear + 0.1, 0.24, w - 0.12),
            (rear, 0.46, w - 0.08),
            (rear + 0.02, 0.72, w - 0.07),
            (rear + 0.12, deck, w - 0.1),
            (front - bonnet - 0.2, deck + 0.03, w - 0.03),
            (front - 0.5, deck - 0.06, w - 0.07),
            (front - 0.12, nose, w - 0.13),
            (front, 0.48, w - 0.1),
            (front - 0.08, 0.22, w - 0.13),
        ],
        PAINT,
        Texture.BODYWORK,
    )
    shape.both_sides(flank(w - 0.05, 0.2, 0.31, rear + 0.2, front - 0.2), TRIM)
    for seam in (-0.32, 0.6):
        shape.both_sides(flank(w - 0.05, 0.34, deck - 0.03, seam, seam + 0.025), TRIM)
    shape.both_sides(flank(w - 0.05, deck - 0.2, deck - 0.16, -0.18, 0.04), METAL)
    for axle in (rear + 0.8, front - 0.85):
        shape.both_sides([(w - 0.04, y, z) for z, y in _arch(axle)], TRIM)


def _arch(axle: float) -> list[tuple[float, float]]:
    """The outline of a wheel arch."""
    return [
        (axle - 0.42, 0.24),
        (axle - 0.36, 0.52),
        (axle - 0.16, 0.7),
        (axle + 0.16, 0.7),
        (axle + 0.36, 0.52),
        (axle + 0.42, 0.24),
    ]


def _ends(shape: Shape, w: float, rear: float, front: float, deck: float) -> None:
    """Bumpers, lamps, plate and grille."""
    back = end(w - 0.09, 0.26, deck, rear - 0.01, 0.08)
    shape.face(patch(back, 0.02, 0.98, 0.0, 0.22), TRIM)
    shape.face(patch(back, 0.35, 0.65, 0.42, 0.57), SECOND)
    pair(shape, back, (0.0, 0.19), (0.6, 0.9), TAIL)
    pair(shape, back, (0.04, 0.15), (0.64, 0.72), HEAD)
    shape.face(patch(back, 0.22, 0.78, 0.72, 0.75), METAL)
    face = end(w - 0.12, 0.24, deck - 0.2, front + 0.01, -0.08)
    shape.face(patch(face, 0.03, 0.97, 0.0, 0.24), TRIM)
    shape.face(patch(face, 0.28, 0.72, 0.62, 0.86), TRIM)
    shape.face(patch(face, 0.36, 0.64, 0.3, 0.46), SECOND)
    pair(shape, face, (0.0, 0.22), (0.62, 0.94), HEAD)
    pair(shape, face, (0.05, 0.14), (0.14, 0.28), METAL)


def car(length: float, width: float, deck: float, roof: float, boot: float, bonnet: float) -> Shape:
    """A car; `boot` and `bonnet` are the lengths of the low ends behind and before the cabin."""
    shape = Shape()
    w, rear, front = width / 2, -length / 2, length / 2
    chassis(shape, w - 0.16, rear + 0.25, front - 0.25, 0.34)
    tire_ends(shape, w - 0.06, [rear + 0.45, front - 0.5], 0.4)
    _lower_body(shape, w, rear, front, deck, bonnet)
    shape.wheels(w - 0.03, [rear + 0.8, front - 0.85], 0.33, TIRE, METAL)
    _ends(shape, w, rear, front, deck)

    b0, b1 = rear + boot, rear + boot + (0.62 if boot > 0.5 else 0.34)
    f0, f1 = front - bonnet, front - bonnet - 0.85
    low, high = deck - 0.02, roof
    wl, wh = w - 0.1, w - 0.28
    shape.loft(
        [
            (b0, low, wl),
            (b1, high - 0.03, wh),
            (b1 + 0.4, high, wh),
            (f1 - 0.2, high, wh),
            (f1, high - 0.03, wh),
            (f0, low, wl),
        ],
        PAINT,
        Texture.BODYWORK,
    )
    side: list[Point] = [(wl, low, b0), (wl, low, f0), (wh, high, f1), (wh, high, b1)]
    for left, right in ((0.09, 0.44), (0.47, 0.9)):
        shape.both_sides(patch(side, left, right, 0.1, 0.86), GLASS, Texture.GLASS)
    screen: list[Point] = [(-wl, low, f0), (wl, low, f0), (wh, high, f1), (-wh, high, f1)]
    shape.face(patch(screen, 0.05, 0.95, 0.05, 0.92), GLASS, Texture.GLASS)
    window: list[Point] = [(-wl, low, b0), (wl, low, b0), (wh, high, b1), (-wh, high, b1)]
    shape.face(patch(window, 0.07, 0.93, 0.12, 0.88), GLASS, Texture.GLASS)
    shape.face(patch(window, 0.38, 0.62, 0.9, 0.96), TAIL)
    for sign in (-1.0, 1.0):
        x0, x1, z = sign * (w - 0.1), sign * (w + 0.1), f0 - 0.3
        mirror: list[Point] = [
            (x0, deck, z),
            (x1, deck + 0.02, z),
            (x1, deck + 0.14, z),
            (x0, deck + 0.1, z),
        ]
        shape.face(mirror, TRIM, two_sided=True)
    return shape


def van() -> Shape:
    """A delivery van: tall box, short nose."""
    shape = Shape()
    w, rear, front, top = 1.0, -2.6, 2.6, 2.3
    chassis(shape, w - 0.12, rear + 0.25, front - 0.25, 0.42)
    tire_ends(shape, w - 0.02, [rear + 0.5, front - 0.6], 0.42)
    shape.loft(
        [
            (rear, 0.32, w - 0.03),
            (rear + 0.02, top - 0.1, w - 0.1),
            (rear + 0.2, top, w - 0.14),
            (front - 1.7, top, w - 0.14),
            (front - 0.9, 1.25, w - 0.06),
            (front - 0.1, 1.0, w - 0.1),
            (front, 0.32, w - 0.06),
        ],
        PAINT,
        Texture.BODYWORK,
    )
    shape.both_sides(flank(w - 0.02, 0.28, 0.46, rear + 0.1, front - 0.1), TRIM)
    shape.both_sides(flank(w - 0.06, 0.5, top - 0.3, -0.4, -0.36), TRIM)
    shape.both_sides(flank(w - 0.06, 1.25, 1.85, 0.5, 1.35), GLASS, Texture.GLASS)
    shape.wheels(w - 0.01, [rear + 0.95, front - 0.95], 0.36, TIRE, METAL)
    back = end(w - 0.08, 0.34, top - 0.1, rear)
    shape.face(patch(back, 0.0, 1.0, 0.0, 0.09), TRIM)
    shape.face(patch(back, 0.49, 0.51, 0.1, 0.98), TRIM)
    pair(shape, back, (0.09, 0.45), (0.54, 0.84), GLASS)
    pair(shape, back, (0.0, 0.07), (0.2, 0.48), TAIL)
    shape.face(patch(back, 0.36, 0.64, 0.14, 0.21), SECOND)
    screen: list[Point] = [
        (-w + 0.06, 1.25, front - 0.9),
        (w - 0.06, 1.25, front - 0.9),
        (w - 0.14, top, front - 1.7),
        (-w + 0.14, top, front - 1.7),
    ]
    shape.face(patch(screen, 0.05, 0.95, 0.05, 0.85), GLASS, Texture.GLASS)
    nose = end(w - 0.08, 0.32, 1.0, front)
    shape.face(patch(nose, 0.0, 1.0, 0.0, 0.28), TRIM)
    shape.face(patch(nose, 0.3, 0.7, 0.45, 0.8), TRIM)
    pair(shape, nose, (0.02, 0.22), (0.5, 0.9), HEAD)
    return shape


def bonnet() -> Shape:
    """The ego car's own bonnet, seen from behind the windscreen (1.6 m ahead of the camera)."""
    shape = Shape()
    right = [(1.7, -1.0), (1.7, 0.62), (1.3, 0.74), (0.9, 0.81), (0.4, 0.85)]
    left = [(-x, y) for x, y in reversed(right)]
    shape.flat(right + left, PAINT, Texture.GLASS, casts=False)
    for sign in (-1.0, 1.0):
        crease = [(0.62, -1.0), (0.59, -1.0), (0.48, 0.84), (0.5, 0.84)]
        shape.flat([(sign * x, y) for x, y in crease], TRIM, casts=False)
    return shape


def shapes() -> dict[str, Shape]:
    """Everything here by name."""
    return {
        "car saloon": car(4.5, 1.8, 0.92, 1.44, 0.75, 1.15),
        "car estate": car(4.6, 1.82, 0.93, 1.48, 0.1, 1.15),
        "car hatch": car(3.9, 1.72, 0.94, 1.5, 0.08, 0.9),
        "car city": car(3.4, 1.64, 0.98, 1.54, 0.05, 0.6),
        "car suv": car(4.5, 1.9, 1.05, 1.7, 0.1, 1.05),
        "car coupe": car(4.4, 1.84, 0.86, 1.32, 0.6, 1.35),
        "car van": van(),
        "bonnet": bonnet(),
    }
