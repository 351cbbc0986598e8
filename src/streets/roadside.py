"""Along the curb: street trees, lamps, bollards, signs, traffic lights."""

from . import colors
from .classes import Class
from .furniture import SIGN_SHAPES
from .plants import tree
from .site import Site
from .stage import Color
from .street import Side


def trees(site: Site, side: Side) -> None:
    """A row of street trees in the verge or the sidewalk."""
    dice = site.dice
    if not dice.chance(0.85 if side.verge else 0.4):
        return
    x = (side.verge[0] + side.verge[1]) / 2 if side.verge else side.walk[0] + 0.5
    height, spacing = dice.between(5.0, 13.0), dice.between(7.0, 14.0)
    z = dice.between(4.0, 14.0)
    while z < 110.0:
        if dice.chance(0.85) and site.street.open_at(z - 3.0, z + 3.0):
            tree(site, side.x(x), z, height * dice.between(0.85, 1.15))
        z += spacing


def _pole(site: Site, x: float, z: float, height: float, width: float) -> None:
    """A plain upright pole."""
    metal = colors.gray(site.dice, 0.2, 0.72, 0.15)
    site.stage.place(
        "post",
        Class.POLE,
        site.stage.palette(metal, colors.darker(metal, 0.7)),
        (x, 0.0, z),
        size=(width, height, 1.0),
        depth=z + 0.02,
    )


def lamps(site: Site, side: Side) -> None:
    """Street lamps, sometimes also a row of bollards."""
    dice = site.dice
    metal = colors.gray(dice, 0.2, 0.65, 0.2)
    palette = site.stage.palette(metal, colors.darker(metal, 0.75))
    x = side.x(side.curb + 0.45)
    if dice.chance(0.75):
        z, spacing = dice.between(6.0, 26.0), dice.between(18.0, 32.0)
        while z < 110.0:
            name = "lamp left" if side.sign > 0 else "lamp right"
            site.stage.place(
                name, Class.POLE, palette, (x, 0.0, z), size=(1.0, dice.between(0.9, 0.95), 1.0)
            )
            z += spacing
    if dice.chance(0.25):
        z = dice.between(5.0, 12.0)
        for _ in range(4 + dice.below(8)):
            _pole(site, side.x(side.curb + 0.3), z, 0.95, 0.13)
            z += 1.6


def signs(site: Site, side: Side) -> None:
    """Sign posts with one or two signs each."""
    dice = site.dice
    for _ in range(dice.below(4)):
        x, z = side.x(side.curb + dice.between(0.25, 0.8)), dice.between(7.0, 45.0)
        kind = dice.pick(SIGN_SHAPES)
        height = dice.between(2.1, 2.7)
        _pole(site, x, z, height + 0.2, 0.09)
        _sign(site, kind, x, height, z)
        if dice.chance(0.3):
            _sign(site, "square", x, height - 0.75, z)


def _sign(site: Site, kind: str, x: float, y: float, z: float) -> None:
    """One sign face in one of the usual color schemes."""
    dice = site.dice
    red, blue = colors.hsv(0.99, 0.85, 0.75), colors.hsv(0.6, 0.8, 0.65)
    white, yellow = colors.gray(dice, 0.8, 0.95), colors.hsv(0.13, 0.8, 0.9)
    dark = colors.gray(dice, 0.1, 0.2)
    scheme = dice.pick(
        (
            (white, red, dark),
            (blue, white, white),
            (red, white, white),
            (yellow, dark, dark),
            (white, dark, dark),
            (colors.muted(dice), white, dark),
            (colors.hsv(0.4, 0.6, 0.45), white, white),
        )
    )
    scale = dice.between(0.85, 1.2)
    site.stage.place(
        f"sign {kind}",
        Class.TRAFFIC_SIGN,
        site.stage.palette(*scheme),
        (x, y, z),
        size=(scale, scale, 1.0),
        depth=z - 0.02,
    )


def _light(site: Site, x: float, y: float, z: float, state: int) -> None:
    """One signal head; `state` is the lamp that is lit."""
    dice = site.dice
    case = colors.gray(dice, 0.1, 0.3) if dice.chance(0.7) else colors.hsv(0.13, 0.8, 0.75)
    lamps: list[Color] = [(70.0, 16.0, 16.0), (75.0, 55.0, 12.0), (14.0, 60.0, 40.0)]
    lit: list[Color] = [(460.0, 60.0, 45.0), (460.0, 300.0, 40.0), (60.0, 420.0, 260.0)]
    lamps[state] = lit[state]
    site.stage.place(
        "light",
        Class.TRAFFIC_LIGHT,
        site.stage.palette(case, *lamps, colors.darker(case, 0.6)),
        (x, y, z),
        depth=z - 0.02,
    )


def traffic_lights(site: Site) -> None:
    """Signals at the crossing, some of them on an arm over the road."""
    dice, street = site.dice, site.street
    place = street.crossing or street.zebra
    if place is None or not dice.chance(0.75):
        if not dice.chance(0.15):
            return
        place = (dice.between(14.0, 40.0), 50.0)
    state = dice.below(3)
    for z in (place[0] - 1.5, place[1] + 1.5):
        if z < 6.0:
            continue
        for side in street.sides:
            x = side.x(side.curb + 0.5)
            _pole(site, x, z, 3.6, 0.14)
            _light(site, x, 2.5, z, state)
            if side.sign > 0 and dice.chance(0.4):
                metal = colors.gray(dice, 0.25, 0.6)
                palette = site.stage.palette(metal, colors.darker(metal, 0.8))
                _pole(site, x, z, 6.2, 0.18)
                reach = dice.between(2.5, 4.5)
                site.stage.place(
                    "post",
                    Class.POLE,
                    palette,
                    (x - reach / 2, 6.0, z),
                    size=(reach, 0.14, 1.0),
                    depth=z + 0.01,
                )
                _light(site, x - reach, 5.3, z, state)
