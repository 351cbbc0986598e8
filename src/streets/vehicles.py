"""Vehicles: driving in the lanes, crossing, parked, and the ego car's own bonnet."""

import math

from . import colors
from .classes import VOID, Class
from .outfits import vehicle_palette
from .riders import cyclist, motorcyclist, two_wheeler
from .site import Site
from .stage import Color
from .street import Side

CARS = (
    ("car saloon", 0.24),
    ("car estate", 0.16),
    ("car hatch", 0.22),
    ("car city", 0.1),
    ("car suv", 0.16),
    ("car coupe", 0.06),
    ("car van", 0.06),
)
TRUCKS = ("truck box", "truck long", "truck canvas", "truck tipper")
BUSES = ("bus city", "bus midi", "bus double")
AHEAD, ONCOMING = (1.0, 0.0), (-1.0, 0.0)


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
    """Place a vehicle; its near end decides when it is painted."""
    scale = site.dice.between(0.95, 1.05)
    if label in (Class.TRUCK, Class.TRAIN):
        name += " ahead" if turn[0] > 0 else " oncoming"
    site.stage.place(
        name,
        label,
        vehicle_palette(site, second),
        (x, 0.0, z),
        turn=turn,
        size=(scale, scale * site.dice.between(0.97, 1.03), scale),
        depth=z - abs(turn[0]) * length / 2,
    )


def _any_vehicle(site: Site, x: float, z: float, turn: tuple[float, float]) -> float:
    """A car, now and then a bus, truck or motorcycle; returns the road length it takes."""
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
        motorcyclist(site, x + dice.bell(0.0, 0.4), z, "back" if turn[0] > 0 else "front")
        return 4.0
    _vehicle(site, dice.weighted(CARS), Class.CAR, x + dice.bell(0.0, 0.15), z, turn)
    return 6.0


def lanes(site: Site) -> None:
    """Traffic in every lane, trams on their rails, cyclists at the edge."""
    dice, street = site.dice, site.street
    busy = dice.between(0.15, 1.0)
    for lane in street.lanes:
        ahead = lane > 0
        own = abs(lane - street.ego) < street.lane_width / 2
        z = dice.between(11.0, 26.0) if own else dice.between(6.0, 22.0)
        on_rails = street.rails == lane
        if on_rails and dice.chance(0.85):
            long = dice.chance(0.5)
            half = 15.0 if long else 7.5
            _vehicle(
                site,
                "tram long" if long else "tram short",
                Class.TRAIN,
                lane,
                z + half + (6.0 if own else 0.0),
                AHEAD if ahead else ONCOMING,
                colors.strong(dice),
                2 * half,
            )
            z += 2 * half + 14.0
        while z < 95.0:
            if dice.chance(busy):
                z += _any_vehicle(site, lane, z, AHEAD if ahead else ONCOMING)
            z += dice.between(3.0, 24.0)
        if dice.chance(0.2):
            edge = street.lanes[-1] + street.lane_width * 0.3
            cyclist(
                site,
                math.copysign(edge, lane),
                dice.between(7.0, 28.0),
                "back" if ahead else "front",
            )


def cross_traffic(site: Site) -> None:
    """Vehicles and riders in the cross street, seen from the side."""
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
            cyclist(site, x, z, "side")
        else:
            motorcyclist(site, x, z, "side")


def parked(site: Site, side: Side) -> None:
    """A row of parked vehicles along the curb."""
    dice = site.dice
    z = dice.between(4.0, 14.0)
    if not side.parking:
        return
    density = dice.between(0.2, 0.9)
    turn = AHEAD if side.sign > 0 or dice.chance(0.2) else ONCOMING
    while z < 80.0:
        free = site.street.open_at(z - 4.0, z + 4.0)
        if free and dice.chance(density):
            x = side.x(side.curb - 1.05)
            kind = dice.weighted([("car", 0.9), ("motorcycle", 0.06), ("truck", 0.04)])
            if kind == "motorcycle":
                two_wheeler(site, "motorcycle side", Class.MOTORCYCLE, x, z)
                z -= 2.5
            elif kind == "truck":
                _vehicle(site, "truck box", Class.TRUCK, x, z + 2.0, turn, colors.paint(dice), 7.2)
                z += 4.0
            else:
                _vehicle(site, dice.weighted(CARS), Class.CAR, x, z, turn)
        z += dice.between(5.4, 7.0)


def bonnet(site: Site) -> None:
    """The ego car's own bonnet along the bottom of the image, in some scenes."""
    camera = site.camera
    if site.dice.chance(0.3):
        edge = camera.rows * site.dice.between(0.88, 0.97) - camera.horizon
        top = camera.eye - edge * 1.6 / camera.focal
        site.stage.place(
            "bonnet",
            VOID,
            vehicle_palette(site),
            (camera.offset, top - 0.85, 1.6),
            depth=0.0,
            casts=False,
        )
