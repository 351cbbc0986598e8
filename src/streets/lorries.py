"""Long vehicles: lorries, buses, trams.

They are made of several solids, and which of these is nearer depends on the direction of travel:
each comes in an `ahead` and an `oncoming` version that differ in painting order only.
"""

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
from .shape import Shape, patch
from .texture import Texture


def _cab(shape: Shape, w: float, rear: float, front: float) -> None:
    """The driver's cab of a lorry."""
    shape.loft(
        [
            (rear, 0.5, w - 0.06),
            (rear, 2.75, w - 0.1),
            (front - 0.35, 2.8, w - 0.1),
            (front - 0.02, 1.6, w - 0.06),
            (front, 0.45, w - 0.06),
        ],
        PAINT,
        Texture.BODYWORK,
    )
    shape.both_sides(flank(w - 0.05, 1.6, 2.4, rear + 0.45, front - 0.35), GLASS, Texture.GLASS)
    shape.both_sides(flank(w - 0.05, 0.7, 2.5, rear + 0.38, rear + 0.42), TRIM)
    screen = end(w - 0.08, 1.6, 2.8, front - 0.02, -0.33)
    shape.face(patch(screen, 0.04, 0.96, 0.05, 0.75), GLASS, Texture.GLASS)
    grille = end(w - 0.06, 0.45, 1.6, front)
    shape.face(patch(grille, 0.25, 0.75, 0.35, 0.85), TRIM)
    shape.face(patch(grille, 0.0, 1.0, 0.0, 0.2), TRIM)
    pair(shape, grille, (0.03, 0.2), (0.22, 0.42), HEAD)
    shape.wheels(w - 0.03, [front - 1.0], 0.5, TIRE, METAL)


def _box(shape: Shape, w: float, rear: float, front: float, height: float, cargo: Texture) -> None:
    """The load: bed, box, rear doors and lamps."""
    bed = [(rear + 0.2, 0.5, 0.6), (rear + 0.2, 1.0, 0.6), (front, 1.0, 0.6), (front, 0.5, 0.6)]
    shape.loft(bed, TRIM, Texture.PLAIN)
    box = [(rear, 1.0, w), (rear, height, w), (front, height, w), (front, 1.0, w)]
    shape.loft(box, SECOND, cargo)
    shape.both_sides(flank(w, 0.98, 1.1, rear, front), TRIM)
    shape.both_sides(flank(w, height - 0.08, height, rear, front), METAL)
    axles = [rear + 1.4, rear + 2.5] if front - rear > 5.5 else [rear + 1.4]
    shape.wheels(w - 0.03, axles, 0.5, TIRE, METAL)
    back = end(w, 1.0, height, rear)
    for left, right in ((0.0, 0.03), (0.485, 0.515), (0.97, 1.0)):
        shape.face(patch(back, left, right, 0.0, 1.0), METAL)
    shape.face(patch(back, 0.0, 1.0, 0.96, 1.0), METAL)
    pair(shape, back, (0.4, 0.43), (0.05, 0.92), METAL)
    bumper = end(w - 0.05, 0.55, 1.0, rear)
    shape.face(bumper, TRIM)
    pair(shape, bumper, (0.02, 0.18), (0.3, 0.8), TAIL)
    shape.face(patch(bumper, 0.38, 0.62, 0.25, 0.75), HEAD)


def truck(length: float, height: float, cargo: Texture, ahead: bool) -> Shape:
    """A rigid lorry: a cab in the first paint, a box or canvas body in the second."""
    shape = Shape()
    w, rear, front = 1.24, -length / 2, length / 2
    cab = front - 1.9
    tire_ends(shape, w - 0.04, [rear + 0.8, front - 0.5], 0.9)
    if ahead:
        _cab(shape, w, cab, front)
    _box(shape, w, rear, cab - 0.25, height, cargo)
    if not ahead:
        _cab(shape, w, cab, front)
    return shape


def bus(length: float, height: float) -> Shape:
    """A city bus: glass band, doors, destination blind; one solid, so one order serves."""
    shape = Shape()
    w, rear, front = 1.27, -length / 2, length / 2
    chassis(shape, w - 0.15, rear + 0.3, front - 0.3, 0.4)
    tire_ends(shape, w, [rear + 2.2, front - 2.2], 0.5)
    shape.loft(
        [
            (rear, 0.32, w - 0.05),
            (rear, height - 0.2, w - 0.07),
            (rear + 0.25, height, w - 0.12),
            (front - 0.3, height, w - 0.12),
            (front, height - 0.3, w - 0.07),
            (front, 0.32, w - 0.05),
        ],
        PAINT,
        Texture.BODYWORK,
    )
    shape.both_sides(flank(w - 0.04, 0.3, 0.55, rear, front), TRIM)
    shape.both_sides(flank(w - 0.05, height - 0.62, height - 0.42, rear, front), SECOND)
    panes = round(length / 1.5)
    decks = [(1.35, 2.0), (2.6, height - 0.68)] if height > 3.5 else [(1.35, height - 0.68)]
    for pane in range(panes):
        a = rear + 0.3 + (length - 0.6) * pane / panes
        b = rear + 0.3 + (length - 0.6) * (pane + 0.93) / panes
        door = pane in (panes - 1, panes // 2)
        for deck, (low, high) in enumerate(decks):
            sill = 0.5 if door and deck == 0 else low
            shape.both_sides(flank(w - 0.04, sill, high, a, b), GLASS, Texture.GLASS)
        if door:
            middle = (a + b) / 2
            shape.both_sides(flank(w - 0.04, 0.5, decks[0][1], middle, middle + 0.06), TRIM)
    shape.wheels(w - 0.02, [rear + 2.6, front - 2.7], 0.5, TIRE, METAL)
    back = end(w - 0.06, 0.32, height - 0.2, rear)
    shape.face(patch(back, 0.08, 0.92, 0.55, 0.88), GLASS, Texture.GLASS)
    shape.face(patch(back, 0.2, 0.8, 0.12, 0.42), TRIM)
    shape.face(patch(back, 0.0, 1.0, 0.0, 0.07), TRIM)
    shape.face(patch(back, 0.38, 0.62, 0.44, 0.5), HEAD)
    pair(shape, back, (0.02, 0.1), (0.16, 0.5), TAIL)
    face = end(w - 0.06, 0.32, height - 0.2, front)
    shape.face(patch(face, 0.04, 0.96, 0.3, 0.84), GLASS, Texture.GLASS)
    shape.face(patch(face, 0.1, 0.9, 0.86, 0.99), TRIM)
    shape.face(patch(face, 0.3, 0.8, 0.885, 0.96), TAIL)
    shape.face(patch(face, 0.0, 1.0, 0.0, 0.07), TRIM)
    pair(shape, face, (0.03, 0.18), (0.1, 0.2), HEAD)
    return shape


def _tram_end(shape: Shape, w: float, z: float, lean: float, height: float, lamp: int) -> None:
    """Windscreen, sign and lamps at one end of a tram."""
    screen = end(w - 0.22, 1.2, height, z, lean)
    shape.face(patch(screen, 0.02, 0.98, 0.06, 0.74), GLASS, Texture.GLASS)
    shape.face(patch(screen, 0.25, 0.75, 0.8, 0.95), HEAD)
    skirt = end(w - 0.35, 0.25, 1.2, z)
    shape.face(patch(skirt, 0.0, 1.0, 0.0, 0.25), TRIM)
    shape.face(patch(skirt, 0.0, 1.0, 0.8, 0.92), SECOND)
    pair(shape, skirt, (0.04, 0.22), (0.48, 0.72), lamp)


def _tram_car(shape: Shape, rear: float, front: float, tail: bool, nose: bool) -> None:
    """One car of a tram, with bellows behind it unless it is the last."""
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
    shape.loft(
        [
            (rear, 0.22, w - back),
            (rear, 1.2, w - back),
            (rear + 2 * back, height, w - 0.12),
            (front - 2 * fore, height, w - 0.12),
            (front, 1.2, w - fore),
            (front, 0.22, w - fore),
        ],
        PAINT,
        Texture.BODYWORK,
    )
    a, b = rear + 0.3 + back * 2, front - 0.3 - fore * 2
    shape.both_sides(flank(w - 0.02, 0.2, 0.5, a, b), TRIM)
    shape.both_sides(flank(w - 0.02, 0.95, 1.15, a, b), SECOND)
    for pane in range(4):
        at = a + (b - a) * pane / 4
        low = 0.5 if pane == 1 else 1.3
        window = flank(w - 0.04, low, 2.65, at, at + (b - a) * 0.23)
        shape.both_sides(window, GLASS, Texture.GLASS)
    if tail:
        _tram_end(shape, w, rear, 0.7, height, TAIL)
    if nose:
        _tram_end(shape, w, front, -0.7, height, HEAD)


def tram(cars: int, ahead: bool) -> Shape:
    """A tram of several articulated cars with a pantograph."""
    shape = Shape()
    each = 7.4
    rear = -cars * each / 2
    numbers = range(cars)
    for number in reversed(numbers) if ahead else numbers:
        start = rear + number * each
        _tram_car(shape, start + 0.2, start + each - 0.2, number == 0, number == cars - 1)
    shape.flat([(-0.8, 4.1), (0.8, 4.1), (0.8, 4.17), (-0.8, 4.17)], TRIM)
    shape.flat([(-0.05, 3.35), (0.05, 3.35), (0.05, 4.1), (-0.05, 4.1)], TRIM)
    return shape


def shapes() -> dict[str, Shape]:
    """Everything here by name."""
    named = {
        "bus city": bus(12.0, 3.1),
        "bus midi": bus(9.0, 2.9),
        "bus double": bus(11.0, 4.2),
    }
    for way, ahead in (("ahead", True), ("oncoming", False)):
        named[f"truck box {way}"] = truck(7.2, 3.4, Texture.CARGO, ahead)
        named[f"truck long {way}"] = truck(9.6, 3.8, Texture.CARGO, ahead)
        named[f"truck canvas {way}"] = truck(8.6, 3.6, Texture.CLOTH, ahead)
        named[f"truck tipper {way}"] = truck(6.8, 2.5, Texture.CONCRETE, ahead)
        named[f"tram short {way}"] = tram(2, ahead)
        named[f"tram long {way}"] = tram(4, ahead)
    return named
