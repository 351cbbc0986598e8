"""Shapes of motor vehicles and trams: cars, vans, trucks, buses.

Forward is +z. Palette slots: 0 paint, 1 glass, 2 tire, 3 metal, 4 taillight, 5 headlight,
6 dark trim, 7 second paint or license plate. Trucks and trams consist of several solids, and the
nearer solid depends on the direction of travel. Each comes in an `ahead` and an `oncoming`
version that differ only in painting order.
"""

from collections.abc import Sequence

from .geometry import Point, Shape, ellipse, patch, rectangle
from .textures import Texture

PAINT, GLASS, TIRE, METAL, TAIL, HEAD, TRIM, SECOND = range(8)


def _end(half_width: float, low: float, high: float, z: float, lean: float = 0.0) -> list[Point]:
    """Return a face across the vehicle, its top `lean` meters further forward."""
    return [
        (-half_width, low, z),
        (half_width, low, z),
        (half_width, high, z + lean),
        (-half_width, high, z + lean),
    ]


def _flank(half_width: float, low: float, high: float, rear: float, front: float) -> list[Point]:
    """Return a face along the right side of the vehicle."""
    return [
        (half_width, low, rear),
        (half_width, low, front),
        (half_width, high, front),
        (half_width, high, rear),
    ]


def _pair(
    shape: Shape,
    quad: Sequence[Point],
    across: tuple[float, float],
    up: tuple[float, float],
    slot: int,
) -> None:
    """Add the same patch at the left and at the right of an end face."""
    shape.face(patch(quad, *across, *up), slot)
    shape.face(patch(quad, 1 - across[1], 1 - across[0], *up), slot)


def _tire_ends(shape: Shape, half_width: float, places: Sequence[float], radius: float) -> None:
    """Add the ends of the tires, visible below the body from the front and the rear."""
    for z in places:
        for side in (-1.0, 1.0):
            a, b = side * (half_width - 0.22), side * half_width
            shape.face(
                [(a, 0.0, z), (b, 0.0, z), (b, radius, z), (a, radius, z)], TIRE, two_sided=True
            )


def _chassis(shape: Shape, half_width: float, rear: float, front: float, top: float) -> None:
    """Add the dark underside, which hides the daylight beneath the body."""
    low = top * 0.42
    profile = [
        (rear, low, half_width),
        (rear, top, half_width),
        (front, top, half_width),
        (front, low, half_width),
    ]
    shape.loft(profile, TRIM, Texture.PLAIN)


def _wheels(shape: Shape, half_width: float, axles: Sequence[float], radius: float) -> None:
    """Add wheels on both sides at every axle."""
    for axle in axles:
        for slot, size in ((TIRE, 1.0), (METAL, 0.62), (TIRE, 0.16)):
            disc = ellipse(axle, radius, radius * size, radius * size, 12)
            shape.both_sides([(half_width + 0.01, y, z) for z, y in disc], slot)


def _lower_body(
    shape: Shape, w: float, rear: float, front: float, deck: float, hood: float
) -> None:
    """Add the body below the windows with door seams, handles and wheel arches."""
    nose = deck - 0.2
    profile = [
        (rear + 0.1, 0.24, w - 0.12),
        (rear, 0.46, w - 0.08),
        (rear + 0.02, 0.72, w - 0.07),
        (rear + 0.12, deck, w - 0.1),
        (front - hood - 0.2, deck + 0.03, w - 0.03),
        (front - 0.5, deck - 0.06, w - 0.07),
        (front - 0.12, nose, w - 0.13),
        (front, 0.48, w - 0.1),
        (front - 0.08, 0.22, w - 0.13),
    ]
    shape.loft(profile, PAINT, Texture.BODYWORK)
    shape.both_sides(_flank(w - 0.05, 0.2, 0.31, rear + 0.2, front - 0.2), TRIM)
    for seam in (-0.32, 0.6):
        shape.both_sides(_flank(w - 0.05, 0.34, deck - 0.03, seam, seam + 0.025), TRIM)
    shape.both_sides(_flank(w - 0.05, deck - 0.2, deck - 0.16, -0.18, 0.04), METAL)
    for axle in (rear + 0.8, front - 0.85):
        shape.both_sides([(w - 0.04, y, z) for z, y in _arch(axle)], TRIM)


def _arch(axle: float) -> list[tuple[float, float]]:
    """Return the (z, y) outline of a wheel arch."""
    return [
        (axle - 0.42, 0.24),
        (axle - 0.36, 0.52),
        (axle - 0.16, 0.7),
        (axle + 0.16, 0.7),
        (axle + 0.36, 0.52),
        (axle + 0.42, 0.24),
    ]


def _ends(shape: Shape, w: float, rear: float, front: float, deck: float) -> None:
    """Add bumpers, lamps, license plates and grille."""
    back = _end(w - 0.09, 0.26, deck, rear - 0.01, 0.08)
    shape.face(patch(back, 0.02, 0.98, 0.0, 0.22), TRIM)
    shape.face(patch(back, 0.35, 0.65, 0.42, 0.57), SECOND)
    _pair(shape, back, (0.0, 0.19), (0.6, 0.9), TAIL)
    _pair(shape, back, (0.04, 0.15), (0.64, 0.72), HEAD)
    shape.face(patch(back, 0.22, 0.78, 0.72, 0.75), METAL)
    face = _end(w - 0.12, 0.24, deck - 0.2, front + 0.01, -0.08)
    shape.face(patch(face, 0.03, 0.97, 0.0, 0.24), TRIM)
    shape.face(patch(face, 0.28, 0.72, 0.62, 0.86), TRIM)
    shape.face(patch(face, 0.36, 0.64, 0.3, 0.46), SECOND)
    _pair(shape, face, (0.0, 0.22), (0.62, 0.94), HEAD)
    _pair(shape, face, (0.05, 0.14), (0.14, 0.28), METAL)


def _car(length: float, width: float, deck: float, roof: float, trunk: float, hood: float) -> Shape:
    """Build a car.

    `trunk` and `hood` are the lengths of its ends behind and before the cabin.
    """
    shape = Shape()
    w, rear, front = width / 2, -length / 2, length / 2
    _chassis(shape, w - 0.16, rear + 0.25, front - 0.25, 0.34)
    _tire_ends(shape, w - 0.06, [rear + 0.45, front - 0.5], 0.4)
    _lower_body(shape, w, rear, front, deck, hood)
    _wheels(shape, w - 0.03, [rear + 0.8, front - 0.85], 0.33)
    _ends(shape, w, rear, front, deck)

    b0, b1 = rear + trunk, rear + trunk + (0.62 if trunk > 0.5 else 0.34)
    f0, f1 = front - hood, front - hood - 0.85
    low, high = deck - 0.02, roof
    wl, wh = w - 0.1, w - 0.28
    profile = [
        (b0, low, wl),
        (b1, high - 0.03, wh),
        (b1 + 0.4, high, wh),
        (f1 - 0.2, high, wh),
        (f1, high - 0.03, wh),
        (f0, low, wl),
    ]
    shape.loft(profile, PAINT, Texture.BODYWORK)
    side = [(wl, low, b0), (wl, low, f0), (wh, high, f1), (wh, high, b1)]
    for left, right in ((0.09, 0.44), (0.47, 0.9)):
        shape.both_sides(patch(side, left, right, 0.1, 0.86), GLASS, Texture.GLASS)
    screen = [(-wl, low, f0), (wl, low, f0), (wh, high, f1), (-wh, high, f1)]
    shape.face(patch(screen, 0.05, 0.95, 0.05, 0.92), GLASS, Texture.GLASS)
    window = [(-wl, low, b0), (wl, low, b0), (wh, high, b1), (-wh, high, b1)]
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


def _van() -> Shape:
    """Build a delivery van: a tall box with a short nose."""
    shape = Shape()
    w, rear, front, top = 1.0, -2.6, 2.6, 2.3
    _chassis(shape, w - 0.12, rear + 0.25, front - 0.25, 0.42)
    _tire_ends(shape, w - 0.02, [rear + 0.5, front - 0.6], 0.42)
    profile = [
        (rear, 0.32, w - 0.03),
        (rear + 0.02, top - 0.1, w - 0.1),
        (rear + 0.2, top, w - 0.14),
        (front - 1.7, top, w - 0.14),
        (front - 0.9, 1.25, w - 0.06),
        (front - 0.1, 1.0, w - 0.1),
        (front, 0.32, w - 0.06),
    ]
    shape.loft(profile, PAINT, Texture.BODYWORK)
    shape.both_sides(_flank(w - 0.02, 0.28, 0.46, rear + 0.1, front - 0.1), TRIM)
    shape.both_sides(_flank(w - 0.06, 0.5, top - 0.3, -0.4, -0.36), TRIM)
    shape.both_sides(_flank(w - 0.06, 1.25, 1.85, 0.5, 1.35), GLASS, Texture.GLASS)
    _wheels(shape, w - 0.01, [rear + 0.95, front - 0.95], 0.36)
    back = _end(w - 0.08, 0.34, top - 0.1, rear)
    shape.face(patch(back, 0.0, 1.0, 0.0, 0.09), TRIM)
    shape.face(patch(back, 0.49, 0.51, 0.1, 0.98), TRIM)
    _pair(shape, back, (0.09, 0.45), (0.54, 0.84), GLASS)
    _pair(shape, back, (0.0, 0.07), (0.2, 0.48), TAIL)
    shape.face(patch(back, 0.36, 0.64, 0.14, 0.21), SECOND)
    screen = [
        (-w + 0.06, 1.25, front - 0.9),
        (w - 0.06, 1.25, front - 0.9),
        (w - 0.14, top, front - 1.7),
        (-w + 0.14, top, front - 1.7),
    ]
    shape.face(patch(screen, 0.05, 0.95, 0.05, 0.85), GLASS, Texture.GLASS)
    nose = _end(w - 0.08, 0.32, 1.0, front)
    shape.face(patch(nose, 0.0, 1.0, 0.0, 0.28), TRIM)
    shape.face(patch(nose, 0.3, 0.7, 0.45, 0.8), TRIM)
    _pair(shape, nose, (0.02, 0.22), (0.5, 0.9), HEAD)
    return shape


def _hood() -> Shape:
    """Build the hood of the ego car, seen through its windshield from 1.6 m."""
    shape = Shape()
    right = [(1.7, -1.0), (1.7, 0.62), (1.3, 0.74), (0.9, 0.81), (0.4, 0.85)]
    left = [(-x, y) for x, y in reversed(right)]
    shape.flat(right + left, PAINT, Texture.GLASS, casts=False)
    for sign in (-1.0, 1.0):
        crease = [(0.62, -1.0), (0.59, -1.0), (0.48, 0.84), (0.5, 0.84)]
        shape.flat([(sign * x, y) for x, y in crease], TRIM, casts=False)
    return shape


def _cab(shape: Shape, w: float, rear: float, front: float) -> None:
    """Add the driver's cab of a truck."""
    profile = [
        (rear, 0.5, w - 0.06),
        (rear, 2.75, w - 0.1),
        (front - 0.35, 2.8, w - 0.1),
        (front - 0.02, 1.6, w - 0.06),
        (front, 0.45, w - 0.06),
    ]
    shape.loft(profile, PAINT, Texture.BODYWORK)
    shape.both_sides(_flank(w - 0.05, 1.6, 2.4, rear + 0.45, front - 0.35), GLASS, Texture.GLASS)
    shape.both_sides(_flank(w - 0.05, 0.7, 2.5, rear + 0.38, rear + 0.42), TRIM)
    screen = _end(w - 0.08, 1.6, 2.8, front - 0.02, -0.33)
    shape.face(patch(screen, 0.04, 0.96, 0.05, 0.75), GLASS, Texture.GLASS)
    grille = _end(w - 0.06, 0.45, 1.6, front)
    shape.face(patch(grille, 0.25, 0.75, 0.35, 0.85), TRIM)
    shape.face(patch(grille, 0.0, 1.0, 0.0, 0.2), TRIM)
    _pair(shape, grille, (0.03, 0.2), (0.22, 0.42), HEAD)
    _wheels(shape, w - 0.03, [front - 1.0], 0.5)


def _box(shape: Shape, w: float, rear: float, front: float, height: float, cargo: Texture) -> None:
    """Add the cargo body of a truck: bed, box, rear doors and lamps."""
    bed = [(rear + 0.2, 0.5, 0.6), (rear + 0.2, 1.0, 0.6), (front, 1.0, 0.6), (front, 0.5, 0.6)]
    shape.loft(bed, TRIM, Texture.PLAIN)
    box = [(rear, 1.0, w), (rear, height, w), (front, height, w), (front, 1.0, w)]
    shape.loft(box, SECOND, cargo)
    shape.both_sides(_flank(w, 0.98, 1.1, rear, front), TRIM)
    shape.both_sides(_flank(w, height - 0.08, height, rear, front), METAL)
    axles = [rear + 1.4, rear + 2.5] if front - rear > 5.5 else [rear + 1.4]
    _wheels(shape, w - 0.03, axles, 0.5)
    back = _end(w, 1.0, height, rear)
    for left, right in ((0.0, 0.03), (0.485, 0.515), (0.97, 1.0)):
        shape.face(patch(back, left, right, 0.0, 1.0), METAL)
    shape.face(patch(back, 0.0, 1.0, 0.96, 1.0), METAL)
    _pair(shape, back, (0.4, 0.43), (0.05, 0.92), METAL)
    bumper = _end(w - 0.05, 0.55, 1.0, rear)
    shape.face(bumper, TRIM)
    _pair(shape, bumper, (0.02, 0.18), (0.3, 0.8), TAIL)
    shape.face(patch(bumper, 0.38, 0.62, 0.25, 0.75), HEAD)


def _truck(length: float, height: float, cargo: Texture, ahead: bool) -> Shape:
    """Build a truck with a cab in the first paint and a cargo body in the second."""
    shape = Shape()
    w, rear, front = 1.24, -length / 2, length / 2
    cab = front - 1.9
    _tire_ends(shape, w - 0.04, [rear + 0.8, front - 0.5], 0.9)
    if ahead:
        _cab(shape, w, cab, front)
    _box(shape, w, rear, cab - 0.25, height, cargo)
    if not ahead:
        _cab(shape, w, cab, front)
    return shape


def _bus(length: float, height: float) -> Shape:
    """Build a bus. It is one solid, so it needs only one painting order."""
    shape = Shape()
    w, rear, front = 1.27, -length / 2, length / 2
    _chassis(shape, w - 0.15, rear + 0.3, front - 0.3, 0.4)
    _tire_ends(shape, w, [rear + 2.2, front - 2.2], 0.5)
    profile = [
        (rear, 0.32, w - 0.05),
        (rear, height - 0.2, w - 0.07),
        (rear + 0.25, height, w - 0.12),
        (front - 0.3, height, w - 0.12),
        (front, height - 0.3, w - 0.07),
        (front, 0.32, w - 0.05),
    ]
    shape.loft(profile, PAINT, Texture.BODYWORK)
    shape.both_sides(_flank(w - 0.04, 0.3, 0.55, rear, front), TRIM)
    shape.both_sides(_flank(w - 0.05, height - 0.62, height - 0.42, rear, front), SECOND)
    panes = round(length / 1.5)
    decks = [(1.35, 2.0), (2.6, height - 0.68)] if height > 3.5 else [(1.35, height - 0.68)]
    for pane in range(panes):
        a = rear + 0.3 + (length - 0.6) * pane / panes
        b = rear + 0.3 + (length - 0.6) * (pane + 0.93) / panes
        door = pane in (panes - 1, panes // 2)
        for deck, (low, high) in enumerate(decks):
            sill = 0.5 if door and deck == 0 else low
            shape.both_sides(_flank(w - 0.04, sill, high, a, b), GLASS, Texture.GLASS)
        if door:
            middle = (a + b) / 2
            shape.both_sides(_flank(w - 0.04, 0.5, decks[0][1], middle, middle + 0.06), TRIM)
    _wheels(shape, w - 0.02, [rear + 2.6, front - 2.7], 0.5)
    back = _end(w - 0.06, 0.32, height - 0.2, rear)
    shape.face(patch(back, 0.08, 0.92, 0.55, 0.88), GLASS, Texture.GLASS)
    shape.face(patch(back, 0.2, 0.8, 0.12, 0.42), TRIM)
    shape.face(patch(back, 0.0, 1.0, 0.0, 0.07), TRIM)
    shape.face(patch(back, 0.38, 0.62, 0.44, 0.5), HEAD)
    _pair(shape, back, (0.02, 0.1), (0.16, 0.5), TAIL)
    face = _end(w - 0.06, 0.32, height - 0.2, front)
    shape.face(patch(face, 0.04, 0.96, 0.3, 0.84), GLASS, Texture.GLASS)
    shape.face(patch(face, 0.1, 0.9, 0.86, 0.99), TRIM)
    shape.face(patch(face, 0.3, 0.8, 0.885, 0.96), TAIL)
    shape.face(patch(face, 0.0, 1.0, 0.0, 0.07), TRIM)
    _pair(shape, face, (0.03, 0.18), (0.1, 0.2), HEAD)
    return shape


def _tram_end(shape: Shape, w: float, z: float, lean: float, height: float, lamp: int) -> None:
    """Add windshield, destination sign and lamps at one end of a tram."""
    screen = _end(w - 0.22, 1.2, height, z, lean)
    shape.face(patch(screen, 0.02, 0.98, 0.06, 0.74), GLASS, Texture.GLASS)
    shape.face(patch(screen, 0.25, 0.75, 0.8, 0.95), HEAD)
    skirt = _end(w - 0.35, 0.25, 1.2, z)
    shape.face(patch(skirt, 0.0, 1.0, 0.0, 0.25), TRIM)
    shape.face(patch(skirt, 0.0, 1.0, 0.8, 0.92), SECOND)
    _pair(shape, skirt, (0.04, 0.22), (0.48, 0.72), lamp)


def _tram_car(shape: Shape, rear: float, front: float, tail: bool, nose: bool) -> None:
    """Add one car of a tram, with a bellows behind it unless it is the last."""
    w, height = 1.28, 3.35
    back, fore = (0.35 if tail else 0.0), (0.35 if nose else 0.0)
    joint = [
        (rear - 0.4, 0.5, w - 0.2),
        (rear - 0.4, height - 0.1, w - 0.2),
        (rear, height - 0.1, w - 0.2),
        (rear, 0.5, w - 0.2),
    ]
    if not tail:
        shape.loft(joint, TRIM, Texture.PLAIN)
    profile = [
        (rear, 0.22, w - back),
        (rear, 1.2, w - back),
        (rear + 2 * back, height, w - 0.12),
        (front - 2 * fore, height, w - 0.12),
        (front, 1.2, w - fore),
        (front, 0.22, w - fore),
    ]
    shape.loft(profile, PAINT, Texture.BODYWORK)
    a, b = rear + 0.3 + back * 2, front - 0.3 - fore * 2
    shape.both_sides(_flank(w - 0.02, 0.2, 0.5, a, b), TRIM)
    shape.both_sides(_flank(w - 0.02, 0.95, 1.15, a, b), SECOND)
    for pane in range(4):
        at = a + (b - a) * pane / 4
        low = 0.5 if pane == 1 else 1.3
        window = _flank(w - 0.04, low, 2.65, at, at + (b - a) * 0.23)
        shape.both_sides(window, GLASS, Texture.GLASS)
    if tail:
        _tram_end(shape, w, rear, 0.7, height, TAIL)
    if nose:
        _tram_end(shape, w, front, -0.7, height, HEAD)


def _tram(cars: int, ahead: bool) -> Shape:
    """Build a tram of several articulated cars with a pantograph."""
    shape = Shape()
    each = 7.4
    rear = -cars * each / 2
    numbers = range(cars)
    for number in reversed(numbers) if ahead else numbers:
        start = rear + number * each
        _tram_car(shape, start + 0.2, start + each - 0.2, number == 0, number == cars - 1)
    shape.flat(rectangle(-0.8, 0.8, 4.1, 4.17), TRIM)
    shape.flat(rectangle(-0.05, 0.05, 3.35, 4.1), TRIM)
    return shape


def shapes() -> dict[str, Shape]:
    """Return the shapes by name."""
    named = {
        "car sedan": _car(4.5, 1.8, 0.92, 1.44, 0.75, 1.15),
        "car wagon": _car(4.6, 1.82, 0.93, 1.48, 0.1, 1.15),
        "car hatchback": _car(3.9, 1.72, 0.94, 1.5, 0.08, 0.9),
        "car compact": _car(3.4, 1.64, 0.98, 1.54, 0.05, 0.6),
        "car suv": _car(4.5, 1.9, 1.05, 1.7, 0.1, 1.05),
        "car coupe": _car(4.4, 1.84, 0.86, 1.32, 0.6, 1.35),
        "car van": _van(),
        "hood": _hood(),
        "bus city": _bus(12.0, 3.1),
        "bus short": _bus(9.0, 2.9),
        "bus double": _bus(11.0, 4.2),
    }
    for direction, ahead in (("ahead", True), ("oncoming", False)):
        named[f"truck box {direction}"] = _truck(7.2, 3.4, Texture.CARGO, ahead)
        named[f"truck long {direction}"] = _truck(9.6, 3.8, Texture.CARGO, ahead)
        named[f"truck canvas {direction}"] = _truck(8.6, 3.6, Texture.CLOTH, ahead)
        named[f"truck tipper {direction}"] = _truck(6.8, 2.5, Texture.CONCRETE, ahead)
        named[f"tram short {direction}"] = _tram(2, ahead)
        named[f"tram long {direction}"] = _tram(4, ahead)
    return named
