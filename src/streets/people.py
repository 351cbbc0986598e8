"""Pedestrians and riders as flat figures that face the camera.

Figures are 1.75 m tall with their feet at y = 0. Slots: 0 coat, 1 trousers, 2 skin, 3 hair,
4 shoes, 5 bag or helmet, 6 coat in shade, 7 trousers in shade.
"""

from .shape import Point2, Shape, limb, ring
from .texture import Texture

COAT, TROUSERS, SKIN, HAIR, SHOES, BAG, COAT_DARK, TROUSERS_DARK = range(8)


def _leg(shape: Shape, hip: Point2, knee: Point2, foot: Point2, slot: int, toe: float) -> None:
    """Thigh, shin and shoe."""
    shape.flat(limb(hip, 0.19, knee, 0.14), slot, Texture.CLOTH)
    shape.flat(limb((knee[0], knee[1] + 0.05), 0.14, foot, 0.1), slot, Texture.CLOTH)
    x, y = foot
    shape.flat(
        [
            (x - 0.06, y - 0.07),
            (x + 0.06 + toe, y - 0.07),
            (x + 0.05 + toe / 2, y),
            (x - 0.05, y + 0.03),
        ],
        SHOES,
    )


def _arm(shape: Shape, shoulder: Point2, elbow: Point2, hand: Point2, slot: int) -> None:
    """Upper arm, forearm and hand."""
    shape.flat(ring(shoulder[0], shoulder[1], 0.07, 0.07, 8), slot, Texture.CLOTH)
    shape.flat(limb(shoulder, 0.14, elbow, 0.11), slot, Texture.CLOTH)
    shape.flat(ring(elbow[0], elbow[1], 0.055, 0.055, 6), slot, Texture.CLOTH)
    shape.flat(limb(elbow, 0.11, hand, 0.08), slot, Texture.CLOTH)
    shape.flat(ring(hand[0], hand[1], 0.045, 0.055, 6), SKIN)


def _head(shape: Shape, x: float, y: float, view: str) -> None:
    """Seen in profile (looking to +x), from the front, or from behind."""
    shape.flat(
        [(x - 0.05, y - 0.2), (x + 0.05, y - 0.2), (x + 0.05, y - 0.05), (x - 0.05, y - 0.05)], SKIN
    )
    shape.flat(ring(x, y, 0.1, 0.13, 10), HAIR if view == "back" else SKIN)
    if view == "profile":
        shape.flat(
            [
                (x - 0.12, y - 0.1),
                (x - 0.02, y - 0.08),
                (x + 0.0, y + 0.04),
                (x + 0.1, y + 0.07),
                (x + 0.05, y + 0.15),
                (x - 0.06, y + 0.14),
                (x - 0.12, y + 0.06),
            ],
            HAIR,
        )
    elif view == "front":
        shape.flat(
            [
                (x - 0.11, y + 0.02),
                (x - 0.06, y + 0.07),
                (x + 0.06, y + 0.07),
                (x + 0.11, y + 0.02),
                (x + 0.08, y + 0.14),
                (x - 0.08, y + 0.14),
            ],
            HAIR,
        )


def _torso(shape: Shape, lean: float, half: float, low: float, shade_left: bool) -> None:
    """Chest and coat, one flank in shade."""
    top = 1.47
    shape.flat(
        [
            (-half * 0.85, low),
            (half * 0.85, low),
            (half + lean, top - 0.12),
            (half * 0.6 + lean, top),
            (-half * 0.6 + lean, top),
            (-half + lean, top - 0.12),
        ],
        COAT,
        Texture.CLOTH,
    )
    side = -1.0 if shade_left else 1.0
    shape.flat(
        [
            (side * half * 0.85, low),
            (side * half * 0.35, low),
            (side * half * 0.45 + lean, top - 0.05),
            (side * half + lean, top - 0.12),
        ],
        COAT_DARK,
        Texture.CLOTH,
    )


def walker(stride: float, coat_low: float, bag: bool) -> Shape:
    """A pedestrian in profile, mid-stride."""
    shape = Shape()
    _arm(shape, (0.02, 1.38), (stride * 0.45, 1.12), (stride * 0.75, 0.93), COAT_DARK)
    _leg(shape, (0.0, 0.88), (-stride * 0.4, 0.5), (-stride, 0.1), TROUSERS_DARK, 0.1)
    _leg(shape, (0.0, 0.88), (stride * 0.75, 0.5), (stride * 0.85, 0.07), TROUSERS, 0.14)
    if bag:
        shape.flat([(-0.34, 1.0), (-0.1, 0.98), (-0.1, 1.42), (-0.28, 1.4)], BAG, Texture.CLOTH)
    _torso(shape, 0.03, 0.17, coat_low, True)
    _arm(shape, (0.02, 1.38), (-stride * 0.35, 1.13), (-stride * 0.3, 0.9), COAT)
    _head(shape, 0.05, 1.62, "profile")
    return shape


def stander(view: str, spread: float, coat_low: float, bag: bool) -> Shape:
    """A pedestrian seen from the front or from behind."""
    shape = Shape()
    _leg(
        shape,
        (-0.1, 0.88),
        (-0.1 - spread * 0.4, 0.5),
        (-0.1 - spread * 0.3, 0.1),
        TROUSERS_DARK,
        0.02,
    )
    _leg(shape, (0.1, 0.88), (0.1 + spread * 0.4, 0.48), (0.1 + spread * 0.5, 0.05), TROUSERS, 0.02)
    _arm(shape, (-0.22, 1.38), (-0.29, 1.12), (-0.27, 0.87), COAT_DARK)
    _arm(shape, (0.22, 1.38), (0.3, 1.12), (0.26, 0.88), COAT)
    _torso(shape, 0.0, 0.23, coat_low, True)
    if bag:
        shape.flat([(-0.17, 1.0), (0.17, 1.0), (0.15, 1.42), (-0.15, 1.42)], BAG, Texture.CLOTH)
    _head(shape, 0.0, 1.62, view)
    return shape


def _rider_side(seat: float, reach: float, lean: float, pedal: float, helmet: bool) -> Shape:
    """A rider in profile, hands on the bars and feet on the pedals."""
    shape = Shape()
    hip, shoulder = (-0.2, seat), (-0.2 + lean, seat + 0.56)
    _leg(shape, hip, (0.18, seat - 0.22), (0.02, 0.22 + pedal), TROUSERS_DARK, 0.1)
    shape.flat(limb((hip[0], hip[1] - 0.05), 0.32, shoulder, 0.36), COAT, Texture.CLOTH)
    shape.flat(
        limb((hip[0] - 0.1, hip[1]), 0.1, (shoulder[0] - 0.12, shoulder[1]), 0.12),
        COAT_DARK,
        Texture.CLOTH,
    )
    _leg(
        shape,
        hip,
        (0.22, seat - 0.3 + pedal),
        (0.08, 0.2 + (0.0 if pedal else 0.15)),
        TROUSERS,
        0.12,
    )
    _arm(
        shape,
        (shoulder[0] + 0.02, shoulder[1] - 0.06),
        (shoulder[0] + 0.2, shoulder[1] - 0.3),
        (reach, seat + 0.16),
        COAT,
    )
    x, y = shoulder[0] + 0.1, shoulder[1] + 0.2
    _head(shape, x, y, "profile")
    if helmet:
        shape.flat(
            [
                (x - 0.14, y + 0.02),
                (x + 0.13, y + 0.04),
                (x + 0.08, y + 0.16),
                (x - 0.06, y + 0.17),
            ],
            BAG,
        )
    return shape


def _rider_end(seat: float, width: float, view: str, helmet: bool) -> Shape:
    """A rider from the front or from behind."""
    shape = Shape()
    for side, slot, lift in ((-1.0, TROUSERS_DARK, 0.0), (1.0, TROUSERS, 0.16)):
        _leg(
            shape,
            (side * 0.1, seat),
            (side * 0.19, seat - 0.34 + lift),
            (side * 0.14, 0.16 + lift),
            slot,
            0.0,
        )
    for side, slot in ((-1.0, COAT_DARK), (1.0, COAT)):
        _arm(
            shape,
            (side * 0.2, seat + 0.5),
            (side * (width + 0.04), seat + 0.28),
            (side * width, seat + 0.12),
            slot,
        )
    shape.flat(
        [
            (-0.17, seat - 0.08),
            (0.17, seat - 0.08),
            (0.23, seat + 0.46),
            (0.13, seat + 0.58),
            (-0.13, seat + 0.58),
            (-0.23, seat + 0.46),
        ],
        COAT,
        Texture.CLOTH,
    )
    shape.flat(
        [(-0.17, seat - 0.08), (-0.07, seat - 0.08), (-0.1, seat + 0.54), (-0.23, seat + 0.46)],
        COAT_DARK,
        Texture.CLOTH,
    )
    y = seat + 0.74
    _head(shape, 0.0, y, view)
    if helmet:
        shape.flat([(-0.13, y), (0.13, y), (0.1, y + 0.13), (0.0, y + 0.17), (-0.1, y + 0.13)], BAG)
    return shape


WALKERS = ("walker wide", "walker short", "walker coat", "walker bag")
FRONTS = ("stander front", "stander front coat", "stander front wide")
BACKS = ("stander back", "stander back coat", "stander back bag")


def shapes() -> dict[str, Shape]:
    """Every figure by name."""
    named = {
        "walker wide": walker(0.36, 0.84, False),
        "walker short": walker(0.2, 0.84, False),
        "walker coat": walker(0.28, 0.6, False),
        "walker bag": walker(0.3, 0.82, True),
        "stander front": stander("front", 0.02, 0.82, False),
        "stander front coat": stander("front", 0.0, 0.55, False),
        "stander front wide": stander("front", 0.14, 0.84, False),
        "stander back": stander("back", 0.05, 0.84, False),
        "stander back coat": stander("back", 0.0, 0.5, False),
        "stander back bag": stander("back", 0.1, 0.84, True),
        "cyclist side": _rider_side(0.95, 0.4, 0.26, 0.12, False),
        "cyclist side helmet": _rider_side(0.95, 0.42, 0.34, 0.0, True),
        "motorcyclist side": _rider_side(0.86, 0.36, 0.2, 0.1, True),
    }
    for view in ("front", "back"):
        named[f"cyclist {view}"] = _rider_end(0.95, 0.28, view, False)
        named[f"cyclist {view} helmet"] = _rider_end(0.95, 0.28, view, True)
        named[f"motorcyclist {view}"] = _rider_end(0.86, 0.36, view, True)
    return named
