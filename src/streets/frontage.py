"""What stands along the sidewalks, block by block: terraces, gardens, parks, walled plots."""

from .boundaries import boundary, wall
from .buildings import block, face
from .classes import Class
from .plants import bush, tree
from .site import Site
from .street import Side
from .texture import Texture

END = 150.0


def build(site: Site) -> None:
    """Build both sides of the street, then whatever closes the view."""
    for side in site.street.sides:
        _line_side(site, side)
    _backdrop(site)


def _line_side(site: Site, side: Side) -> None:
    """One side of the street, block after block, leaving out the cross street."""
    dice, street = site.dice, site.street
    kinds = dice.pick(
        (
            (("terrace", 0.8), ("garden", 0.1), ("wall", 0.05), ("park", 0.05)),
            (("terrace", 0.45), ("garden", 0.2), ("wall", 0.15), ("park", 0.2)),
            (("garden", 0.55), ("terrace", 0.2), ("park", 0.15), ("wall", 0.1)),
            (("park", 0.6), ("garden", 0.15), ("wall", 0.15), ("terrace", 0.1)),
            (("terrace", 0.92), ("park", 0.08)),
        )
    )
    z = dice.between(1.5, 3.0)
    while z < END:
        kind = dice.weighted(kinds)
        length = dice.between(9.0, 24.0) * (1.0 + z / 150.0)
        if (
            street.crossing
            and z < street.crossing[1] + 2.4
            and z + length > street.crossing[0] - 2.4
        ):
            length = street.crossing[0] - 2.4 - z
            if length < 4.0:
                z = street.crossing[1] + 2.4
                _corner(site, side, z)
                continue
        if kind == "terrace":
            _terrace(site, side, z, length)
        elif kind == "garden":
            _garden(site, side, z, length)
        elif kind == "park":
            _park(site, side, z, length)
        else:
            _walled(site, side, z, length)
        z += length


def _corner(site: Site, side: Side, z: float) -> None:
    """The far side of a cross street, seen face on between nearer buildings."""
    x = side.front + site.dice.between(8.0, 14.0)
    while x < 70.0:
        width = site.dice.between(8.0, 18.0)
        if site.dice.chance(0.75):
            face(site, side.across(x, x + width), z, z + 0.1, site.dice.between(6.0, 16.0))
        else:
            tree(site, side.x(x + width / 2), z + 2.0, site.dice.between(6.0, 12.0))
        x += width


def _terrace(site: Site, side: Side, z: float, length: float) -> None:
    """A building at the edge of the sidewalk."""
    dice = site.dice
    height = dice.between(6.5, 13.0 + 14.0 * site.street.town)
    block(site, side, side.front, z, length, height)


def _garden(site: Site, side: Side, z: float, length: float) -> None:
    """A house set back behind a fence, hedge or low wall."""
    dice = site.dice
    setback = dice.between(3.5, 9.0)
    site.stage.strip(
        side.across(side.front, side.front + setback),
        (z, z + length),
        Class.TERRAIN,
        site.soil,
        Texture.GRASS,
    )
    gap = dice.between(0.0, 3.0)
    if length > 5.0 + gap and dice.chance(0.85):
        block(site, side, side.front + setback, z + gap, length - gap, dice.between(4.5, 9.0))
    for _ in range(dice.below(4)):
        x = side.x(side.front + dice.between(1.2, setback))
        if dice.chance(0.5):
            tree(site, x, z + dice.between(0.0, length), dice.between(4.0, 10.0))
        else:
            bush(
                site,
                x,
                z + dice.between(0.0, length),
                dice.between(1.2, 3.5),
                dice.between(0.8, 2.2),
            )
    boundary(site, side, z, length)


def _park(site: Site, side: Side, z: float, length: float) -> None:
    """Grass, trees and bushes."""
    dice = site.dice
    site.stage.strip(
        side.across(side.front, side.front + 60.0),
        (z, z + length),
        Class.TERRAIN,
        site.soil,
        Texture.GRASS,
    )
    for _ in range(2 + int(length / 4.5)):
        x = side.front + dice.between(0.8, 22.0)
        tree(site, side.x(x), z + dice.between(0.0, length), dice.between(6.0, 15.0))
    for _ in range(1 + int(length / 5.0)):
        x = side.front + dice.between(0.6, 16.0)
        bush(
            site,
            side.x(x),
            z + dice.between(0.0, length),
            dice.between(2.0, 6.0),
            dice.between(1.0, 3.5),
        )
    if dice.chance(0.45):
        boundary(site, side, z, length)


def _walled(site: Site, side: Side, z: float, length: float) -> None:
    """A high wall with trees or a building behind it."""
    dice = site.dice
    wall(site, side, z, length, dice.between(1.8, 4.0))
    for _ in range(1 + dice.below(4)):
        tree(
            site,
            side.x(side.front + dice.between(1.5, 9.0)),
            z + dice.between(0.0, length),
            dice.between(6.0, 13.0),
        )
    if dice.chance(0.5):
        block(site, side, side.front + dice.between(6.0, 12.0), z, length, dice.between(6.0, 14.0))


def _backdrop(site: Site) -> None:
    """Far houses and woods across the whole view, so that the street ends somewhere."""
    dice = site.dice
    x = -150.0
    wooded = dice.chance(0.55)
    while x < 150.0:
        width = dice.between(10.0, 26.0)
        z = dice.between(155.0, 185.0)
        if dice.chance(0.65 if wooded else 0.25):
            tree(site, x, z, dice.between(9.0, 20.0))
            bush(site, x, z - 1.0, 22.0, dice.between(4.0, 9.0))
            x += 7.0
        else:
            face(site, (x, x + width), z, z, dice.between(7.0, 24.0))
            x += width
