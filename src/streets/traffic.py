"""People, bicycles and motorcycles as flat figures, and where all traffic goes.

Figures face the camera. People are 1.75 m tall with their feet at y = 0. Their palette slots: 0
coat, 1 pants, 2 skin, 3 hair, 4 shoes, 5 bag or helmet, 6 shaded coat, 7 shaded pants. Bicycles and
motorcycles use the slots of vehicles, with the frame in slot 0 and the seat in slot 1.
"""

import math

from . import colors
from .colors import Color
from .geometry import Point2, Shape, bar, ellipse, rectangle
from .street import VOID, Class, Side, Site
from .textures import Texture
from .vehicles import HEAD, METAL, SECOND, TAIL, TIRE, TRIM

COAT, PANTS, SKIN, HAIR, SHOES, BAG, COAT_DARK, PANTS_DARK = range(8)
FRAME, SEAT = 0, 1

WALKERS = ("walker wide", "walker short", "walker coat", "walker bag")
FRONTS = ("stander front", "stander front coat", "stander front wide")
BACKS = ("stander back", "stander back coat", "stander back bag")


def _leg(shape: Shape, hip: Point2, knee: Point2, foot: Point2, slot: int, toe: float) -> None:
    """Add thigh, shin and shoe."""
    shape.flat(bar(hip, 0.19, knee, 0.14), slot, Texture.CLOTH)
    shape.flat(bar((knee[0], knee[1] + 0.05), 0.14, foot, 0.1), slot, Texture.CLOTH)
    x, y = foot
    outline = [
        (x - 0.06, y - 0.07),
        (x + 0.06 + toe, y - 0.07),
        (x + 0.05 + toe / 2, y),
        (x - 0.05, y + 0.03),
    ]
    shape.flat(outline, SHOES)


def _arm(shape: Shape, shoulder: Point2, elbow: Point2, hand: Point2, slot: int) -> None:
    """Add upper arm, forearm and hand."""
    shape.flat(ellipse(shoulder[0], shoulder[1], 0.07, 0.07, 8), slot, Texture.CLOTH)
    shape.flat(bar(shoulder, 0.14, elbow, 0.11), slot, Texture.CLOTH)
    shape.flat(ellipse(elbow[0], elbow[1], 0.055, 0.055, 6), slot, Texture.CLOTH)
    shape.flat(bar(elbow, 0.11, hand, 0.08), slot, Texture.CLOTH)
    shape.flat(ellipse(hand[0], hand[1], 0.045, 0.055, 6), SKIN)


def _head(shape: Shape, x: float, y: float, view: str) -> None:
    """Add a head seen in profile (facing +x), from the front or from the back."""
    shape.flat(rectangle(x - 0.05, x + 0.05, y - 0.2, y - 0.05), SKIN)
    shape.flat(ellipse(x, y, 0.1, 0.13, 10), HAIR if view == "back" else SKIN)
    if view == "profile":
        outline = [
            (x - 0.12, y - 0.1),
            (x - 0.02, y - 0.08),
            (x + 0.0, y + 0.04),
            (x + 0.1, y + 0.07),
            (x + 0.05, y + 0.15),
            (x - 0.06, y + 0.14),
            (x - 0.12, y + 0.06),
        ]
        shape.flat(outline, HAIR)
    elif view == "front":
        outline = [
            (x - 0.11, y + 0.02),
            (x - 0.06, y + 0.07),
            (x + 0.06, y + 0.07),
            (x + 0.11, y + 0.02),
            (x + 0.08, y + 0.14),
            (x - 0.08, y + 0.14),
        ]
        shape.flat(outline, HAIR)


def _torso(shape: Shape, lean: float, half: float, low: float) -> None:
    """Add chest and coat with a shaded left side."""
    top = 1.47
    outline = [
        (-half * 0.85, low),
        (half * 0.85, low),
        (half + lean, top - 0.12),
        (half * 0.6 + lean, top),
        (-half * 0.6 + lean, top),
        (-half + lean, top - 0.12),
    ]
    shape.flat(outline, COAT, Texture.CLOTH)
    outline = [
        (-half * 0.85, low),
        (-half * 0.35, low),
        (-half * 0.45 + lean, top - 0.05),
        (-half + lean, top - 0.12),
    ]
    shape.flat(outline, COAT_DARK, Texture.CLOTH)


def _walker(stride: float, coat_low: float, bag: bool) -> Shape:
    """Build a walking pedestrian in profile."""
    shape = Shape()
    _arm(shape, (0.02, 1.38), (stride * 0.45, 1.12), (stride * 0.75, 0.93), COAT_DARK)
    _leg(shape, (0.0, 0.88), (-stride * 0.4, 0.5), (-stride, 0.1), PANTS_DARK, 0.1)
    _leg(shape, (0.0, 0.88), (stride * 0.75, 0.5), (stride * 0.85, 0.07), PANTS, 0.14)
    if bag:
        shape.flat([(-0.34, 1.0), (-0.1, 0.98), (-0.1, 1.42), (-0.28, 1.4)], BAG, Texture.CLOTH)
    _torso(shape, 0.03, 0.17, coat_low)
    _arm(shape, (0.02, 1.38), (-stride * 0.35, 1.13), (-stride * 0.3, 0.9), COAT)
    _head(shape, 0.05, 1.62, "profile")
    return shape


def _stander(view: str, spread: float, coat_low: float, bag: bool) -> Shape:
    """Build a pedestrian seen from the front or the back."""
    shape = Shape()
    knee, foot = (-0.1 - spread * 0.4, 0.5), (-0.1 - spread * 0.3, 0.1)
    _leg(shape, (-0.1, 0.88), knee, foot, PANTS_DARK, 0.02)
    knee, foot = (0.1 + spread * 0.4, 0.48), (0.1 + spread * 0.5, 0.05)
    _leg(shape, (0.1, 0.88), knee, foot, PANTS, 0.02)
    _arm(shape, (-0.22, 1.38), (-0.29, 1.12), (-0.27, 0.87), COAT_DARK)
    _arm(shape, (0.22, 1.38), (0.3, 1.12), (0.26, 0.88), COAT)
    _torso(shape, 0.0, 0.23, coat_low)
    if bag:
        shape.flat([(-0.17, 1.0), (0.17, 1.0), (0.15, 1.42), (-0.15, 1.42)], BAG, Texture.CLOTH)
    _head(shape, 0.0, 1.62, view)
    return shape


def _rider_side(seat: float, reach: float, lean: float, pedal: float, helmet: bool) -> Shape:
    """Build a rider in profile, with hands on the handlebar and feet on the pedals."""
    shape = Shape()
    hip, (x, y) = (-0.2, seat), (-0.2 + lean, seat + 0.56)
    _leg(shape, hip, (0.18, seat - 0.22), (0.02, 0.22 + pedal), PANTS_DARK, 0.1)
    shape.flat(bar((-0.2, seat - 0.05), 0.32, (x, y), 0.36), COAT, Texture.CLOTH)
    shape.flat(bar((-0.2 - 0.1, seat), 0.1, (x - 0.12, y), 0.12), COAT_DARK, Texture.CLOTH)
    foot = (0.08, 0.2 + (0.0 if pedal else 0.15))
    _leg(shape, hip, (0.22, seat - 0.3 + pedal), foot, PANTS, 0.12)
    _arm(shape, (x + 0.02, y - 0.06), (x + 0.2, y - 0.3), (reach, seat + 0.16), COAT)
    x, y = x + 0.1, y + 0.2
    _head(shape, x, y, "profile")
    if helmet:
        outline = [
            (x - 0.14, y + 0.02),
            (x + 0.13, y + 0.04),
            (x + 0.08, y + 0.16),
            (x - 0.06, y + 0.17),
        ]
        shape.flat(outline, BAG)
    return shape


def _rider_end(seat: float, width: float, view: str, helmet: bool) -> Shape:
    """Build a rider seen from the front or the back."""
    shape = Shape()
    for side, slot, lift in ((-1.0, PANTS_DARK, 0.0), (1.0, PANTS, 0.16)):
        knee, foot = (side * 0.19, seat - 0.34 + lift), (side * 0.14, 0.16 + lift)
        _leg(shape, (side * 0.1, seat), knee, foot, slot, 0.0)
    for side, slot in ((-1.0, COAT_DARK), (1.0, COAT)):
        elbow, hand = (side * (width + 0.04), seat + 0.28), (side * width, seat + 0.12)
        _arm(shape, (side * 0.2, seat + 0.5), elbow, hand, slot)
    outline = [
        (-0.17, seat - 0.08),
        (0.17, seat - 0.08),
        (0.23, seat + 0.46),
        (0.13, seat + 0.58),
        (-0.13, seat + 0.58),
        (-0.23, seat + 0.46),
    ]
    shape.flat(outline, COAT, Texture.CLOTH)
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


def _bicycle_side() -> Shape:
    """Build a bicycle in profile."""
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
        shape.flat(bar(start, width, end, width), FRAME)
    shape.flat(bar((0.3, 0.97), 0.05, (0.46, 1.04), 0.05), TRIM)
    shape.flat(bar((-0.34, 0.9), 0.08, (-0.08, 0.9), 0.05), SEAT)
    shape.flat(ellipse(crank[0], crank[1], 0.09, 0.09, 8), METAL)
    return shape


def _bicycle_end() -> Shape:
    """Build a bicycle seen from the front or the back."""
    shape = Shape()
    shape.flat(rectangle(-0.03, 0.03, 0.0, 0.68), TIRE)
    shape.flat([(-0.04, 0.5), (0.04, 0.5), (0.03, 0.95), (-0.03, 0.95)], FRAME)
    shape.flat(rectangle(-0.3, 0.3, 1.0, 1.05), TRIM)
    shape.flat([(-0.12, 0.88), (0.12, 0.88), (0.06, 0.96), (-0.06, 0.96)], SEAT)
    shape.flat(rectangle(-0.16, 0.16, 0.27, 0.31), METAL)
    shape.flat(ellipse(0.0, 0.72, 0.05, 0.05, 6), TAIL)
    return shape


def _motorcycle_side() -> Shape:
    """Build a motorcycle in profile."""
    shape = Shape()
    for x in (-0.68, 0.68):
        shape.flat(ellipse(x, 0.32, 0.32, 0.32, 12), TIRE)
        shape.flat(ellipse(x, 0.32, 0.19, 0.19, 10), METAL)
        shape.flat(ellipse(x, 0.32, 0.05, 0.05, 6), TIRE)
    shape.flat(bar((0.68, 0.32), 0.09, (0.42, 1.0), 0.08), METAL)
    shape.flat([(-0.35, 0.22), (0.3, 0.2), (0.4, 0.6), (-0.4, 0.62)], TRIM)
    shape.flat(ellipse(-0.02, 0.38, 0.2, 0.16, 8), METAL)
    shape.flat(bar((-0.8, 0.3), 0.1, (0.0, 0.26), 0.08), METAL)
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
    shape.flat(ellipse(0.62, 0.88, 0.06, 0.08, 8), HEAD)
    shape.flat(ellipse(-1.0, 0.78, 0.04, 0.05, 6), TAIL)
    shape.flat(bar((0.26, 1.06), 0.05, (0.44, 1.04), 0.05), TRIM)
    return shape


def _motorcycle_end(view: str) -> Shape:
    """Build a motorcycle seen from the front or the back."""
    shape = Shape()
    shape.flat(rectangle(-0.09, 0.09, 0.0, 0.64), TIRE)
    shape.flat([(-0.24, 0.25), (0.24, 0.25), (0.2, 0.6), (-0.2, 0.6)], TRIM)
    shape.flat(
        [(-0.16, 0.55), (0.16, 0.55), (0.22, 0.85), (0.12, 1.0), (-0.12, 1.0), (-0.22, 0.85)],
        FRAME,
        Texture.BODYWORK,
    )
    shape.flat(rectangle(-0.4, 0.4, 1.02, 1.07), TRIM)
    for side in (-1.0, 1.0):
        shape.flat(ellipse(side * 0.42, 1.2, 0.07, 0.05, 6), TRIM)
    if view == "back":
        shape.flat(rectangle(-0.12, 0.12, 0.72, 0.8), TAIL)
        shape.flat(rectangle(-0.1, 0.1, 0.5, 0.62), SECOND)
    else:
        shape.flat(ellipse(0.0, 0.86, 0.1, 0.09, 10), HEAD)
    return shape


def shapes() -> dict[str, Shape]:
    """Return the figures by name."""
    named = {
        "walker wide": _walker(0.36, 0.84, False),
        "walker short": _walker(0.2, 0.84, False),
        "walker coat": _walker(0.28, 0.6, False),
        "walker bag": _walker(0.3, 0.82, True),
        "stander front": _stander("front", 0.02, 0.82, False),
        "stander front coat": _stander("front", 0.0, 0.55, False),
        "stander front wide": _stander("front", 0.14, 0.84, False),
        "stander back": _stander("back", 0.05, 0.84, False),
        "stander back coat": _stander("back", 0.0, 0.5, False),
        "stander back bag": _stander("back", 0.1, 0.84, True),
        "cyclist side": _rider_side(0.95, 0.4, 0.26, 0.12, False),
        "cyclist side helmet": _rider_side(0.95, 0.42, 0.34, 0.0, True),
        "motorcyclist side": _rider_side(0.86, 0.36, 0.2, 0.1, True),
        "bicycle side": _bicycle_side(),
        "bicycle end": _bicycle_end(),
        "motorcycle side": _motorcycle_side(),
    }
    for view in ("front", "back"):
        named[f"cyclist {view}"] = _rider_end(0.95, 0.28, view, False)
        named[f"cyclist {view} helmet"] = _rider_end(0.95, 0.28, view, True)
        named[f"motorcyclist {view}"] = _rider_end(0.86, 0.36, view, True)
        named[f"motorcycle {view}"] = _motorcycle_end(view)
    return named


CARS = (
    ("car sedan", 0.24),
    ("car wagon", 0.16),
    ("car hatchback", 0.22),
    ("car compact", 0.1),
    ("car suv", 0.16),
    ("car coupe", 0.06),
    ("car van", 0.06),
)
TRUCKS = ("truck box", "truck long", "truck canvas", "truck tipper")
BUSES = ("bus city", "bus short", "bus double")
AHEAD, ONCOMING = (1.0, 0.0), (-1.0, 0.0)


def moving_vehicles(site: Site) -> None:
    """Place traffic in every lane, trams on the rails, cyclists at the roadside."""
    dice, street = site.dice, site.street
    density = dice.between(0.15, 1.0)
    for lane in street.lanes:
        ahead = lane > 0
        turn = AHEAD if ahead else ONCOMING
        own = abs(lane - street.ego) < street.lane_width / 2
        z = dice.between(11.0, 26.0) if own else dice.between(6.0, 22.0)
        if street.rails == lane and dice.chance(0.85):
            name, half = ("tram long", 15.0) if dice.chance(0.5) else ("tram short", 7.5)
            at = z + half + (6.0 if own else 0.0)
            _vehicle(site, name, Class.TRAIN, lane, at, turn, colors.strong(dice), 2 * half)
            z += 2 * half + 14.0
        while z < 95.0:
            if dice.chance(density):
                z += _any_vehicle(site, lane, z, turn)
            z += dice.between(3.0, 24.0)
        if dice.chance(0.2):
            edge = math.copysign(street.lanes[-1] + street.lane_width * 0.3, lane)
            _cyclist(site, edge, dice.between(7.0, 28.0), "back" if ahead else "front")


def cross_traffic(site: Site) -> None:
    """Place vehicles and riders on the cross street, seen from the side."""
    crossing = site.street.crossing
    if crossing is None:
        return
    dice = site.dice
    for _ in range(dice.below(4)):
        x = dice.between(-28.0, 28.0)
        near = dice.chance(0.5)
        z = crossing[0] + (crossing[1] - crossing[0]) * (0.3 if near else 0.7)
        turn = (0.0, 1.0) if near else (0.0, -1.0)
        if dice.chance(0.75):
            _vehicle(site, dice.weighted(CARS), Class.CAR, x, z, turn)
        elif dice.chance(0.5):
            _cyclist(site, x, z, "side")
        else:
            _motorcyclist(site, x, z, "side")


def parked_vehicles(site: Site, side: Side) -> None:
    """Place a row of parked vehicles along the curb."""
    dice = site.dice
    z = dice.between(4.0, 14.0)
    if not side.parking:
        return
    density = dice.between(0.2, 0.9)
    turn = AHEAD if side.sign > 0 or dice.chance(0.2) else ONCOMING
    while z < 80.0:
        if site.street.open_at(z - 4.0, z + 4.0) and dice.chance(density):
            x = side.x(side.curb - 1.05)
            kind = dice.weighted([("car", 0.9), ("motorcycle", 0.06), ("truck", 0.04)])
            if kind == "motorcycle":
                _two_wheeler(site, "motorcycle side", Class.MOTORCYCLE, x, z)
                z -= 2.5
            elif kind == "truck":
                _vehicle(site, "truck box", Class.TRUCK, x, z + 2.0, turn, colors.paint(dice), 7.2)
                z += 4.0
            else:
                _vehicle(site, dice.weighted(CARS), Class.CAR, x, z, turn)
        z += dice.between(5.4, 7.0)


def pedestrians(site: Site, side: Side) -> None:
    """Place groups on the sidewalk and sometimes a row of bicycles or motorcycles."""
    dice = site.dice
    inner, outer = side.walk[0] + 0.3, side.walk[1] - 0.2
    for _ in range(1 + dice.below(4 + int(5 * site.street.town))):
        near = dice.unit()
        x, z = dice.between(inner, outer), 6.0 + 42.0 * near * near
        for _ in range(1 + dice.below(3)):
            _person(site, side.x(x), z)
            x, z = x + dice.bell(0.0, 0.4), z + dice.between(0.1, 0.8)
    if dice.chance(0.3):
        x, z = dice.between(inner, outer), dice.between(6.0, 18.0)
        name = dice.pick(("bicycle side", "bicycle side", "motorcycle side"))
        label = Class.BICYCLE if name == "bicycle side" else Class.MOTORCYCLE
        for _ in range(2 + dice.below(6)):
            _two_wheeler(site, name, label, side.x(x), z)
            z += dice.between(0.5, 0.9)


def crosswalk_pedestrians(site: Site) -> None:
    """Place pedestrians on the crosswalk."""
    crosswalk = site.street.crosswalk
    if crosswalk is None:
        return
    for _ in range(site.dice.below(5)):
        x = site.dice.between(-site.street.left.curb, site.street.right.curb)
        _person(site, x, site.dice.between(max(crosswalk[0], 5.0), max(crosswalk[1], 6.0)))


def ego_hood(site: Site) -> None:
    """Place the hood of the ego car at the bottom of the image, in some scenes."""
    camera = site.camera
    if site.dice.chance(0.3):
        edge = camera.rows * site.dice.between(0.88, 0.97) - camera.horizon
        top = camera.eye - edge * 1.6 / camera.focal
        at = (camera.offset, top - 0.85, 1.6)
        site.place("hood", VOID, _vehicle_palette(site), at, depth=0.0, casts=False)


def _any_vehicle(site: Site, x: float, z: float, turn: tuple[float, float]) -> float:
    """Place a car, truck, bus or motorcycle and return the length of road it takes."""
    dice = site.dice
    kind = dice.weighted([("car", 0.84), ("truck", 0.04), ("bus", 0.045), ("motorcycle", 0.075)])
    if kind == "truck":
        second = colors.paint(dice)
        _vehicle(site, dice.pick(TRUCKS), Class.TRUCK, x, z + 2.5, turn, second, 8.0)
        return 12.0
    if kind == "bus":
        _vehicle(site, dice.pick(BUSES), Class.BUS, x, z + 4.5, turn, colors.strong(dice), 11.0)
        return 16.0
    if kind == "motorcycle":
        _motorcyclist(site, x + dice.bell(0.0, 0.4), z, "back" if turn[0] > 0 else "front")
        return 4.0
    _vehicle(site, dice.weighted(CARS), Class.CAR, x + dice.bell(0.0, 0.15), z, turn)
    return 6.0


def _vehicle(
    site: Site,
    name: str,
    label: Class,
    x: float,
    z: float,
    turn: tuple[float, float],
    second: Color | None = None,
    length: float = 4.5,
) -> None:
    """Place a vehicle; the z of its near end is its depth."""
    scale = site.dice.between(0.95, 1.05)
    if label in (Class.TRUCK, Class.TRAIN):
        name += " ahead" if turn[0] > 0 else " oncoming"
    palette = _vehicle_palette(site, second)
    size = (scale, scale * site.dice.between(0.97, 1.03), scale)
    depth = z - abs(turn[0]) * length / 2
    site.place(name, label, palette, (x, 0.0, z), turn=turn, size=size, depth=depth)


def _two_wheeler(site: Site, name: str, label: Class, x: float, z: float) -> None:
    """Place a bicycle or motorcycle without a rider."""
    size = (site.dice.pick((-1.0, 1.0)), 1.0, 1.0)
    palette = _vehicle_palette(site, colors.paint(site.dice))
    site.place(name, label, palette, (x, 0.0, z), size=size)


def _cyclist(site: Site, x: float, z: float, view: str) -> None:
    helmet = " helmet" if site.dice.chance(0.5) else ""
    bicycle = "bicycle side" if view == "side" else "bicycle end"
    _ridden(site, bicycle, f"cyclist {view}{helmet}", Class.BICYCLE, x, z)


def _motorcyclist(site: Site, x: float, z: float, view: str) -> None:
    _ridden(site, f"motorcycle {view}", f"motorcyclist {view}", Class.MOTORCYCLE, x, z)


def _ridden(site: Site, vehicle: str, rider: str, label: Class, x: float, z: float) -> None:
    """Place a vehicle and, in front of it, its rider: two instances."""
    flip = site.dice.pick((-1.0, 1.0))
    size = (flip * 1.05, site.dice.between(0.98, 1.1), 1.0)
    site.place(vehicle, label, _vehicle_palette(site), (x, 0.0, z), size=size)
    site.place(rider, Class.RIDER, _clothes(site), (x, 0.0, z), size=size, depth=z - 0.01)


def _person(site: Site, x: float, z: float) -> None:
    """Place a pedestrian; some are children."""
    dice = site.dice
    name = dice.pick(dice.pick((WALKERS, WALKERS, FRONTS, BACKS)))
    height = dice.between(0.9, 1.08) * (0.65 if dice.chance(0.08) else 1.0)
    width = height * dice.between(0.95, 1.25) * dice.pick((-1.0, 1.0))
    site.place(name, Class.PERSON, _clothes(site), (x, 0.0, z), size=(width, height, 1.0))


def _vehicle_palette(site: Site, second: Color | None = None) -> int:
    """Add a palette with the slots of streets.vehicles."""
    dice = site.dice
    glass = colors.glass(dice, 0.3, 0.1, 0.42)
    braking = dice.chance(0.3)
    tail: Color = (235.0, 40.0, 35.0) if braking else (150.0, 22.0, 24.0)
    head: Color = (215.0, 218.0, 222.0)
    if site.lamps:
        tail, head = (520.0, 70.0, 50.0), (520.0, 500.0, 430.0)
    return site.palette(
        colors.paint(dice),
        glass,
        colors.gray(dice, 0.08, 0.16),
        colors.gray(dice, 0.4, 0.75),
        tail,
        head,
        colors.gray(dice, 0.1, 0.2),
        second or colors.gray(dice, 0.6, 0.9),
    )


def _clothes(site: Site) -> int:
    """Add a palette with the slots of a person."""
    dice = site.dice
    coat, pants = colors.cloth(dice), colors.cloth(dice)
    hair = colors.hsv(dice.between(0.04, 0.1), dice.between(0.1, 0.6), dice.between(0.06, 0.55))
    return site.palette(
        coat,
        pants,
        colors.skin(dice),
        hair,
        colors.gray(dice, 0.08, 0.5),
        colors.strong(dice),
        colors.scaled(coat, 0.72),
        colors.scaled(pants, 0.72),
    )
