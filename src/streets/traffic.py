"""Traffic: moving and parked vehicles, riders, pedestrians."""

import math

from . import colors
from .colors import Color
from .figures import BACKS, FRONTS, WALKERS
from .street import VOID, Class, Side, Site

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
    """Add a palette with the slots of streets.figures."""
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
