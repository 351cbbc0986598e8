"""Plants: trees and bushes of the scene's species and season, hedges."""

from . import colors
from .classes import Class
from .furniture import TREES
from .site import Site
from .street import Side


def leaf_palette(site: Site) -> int:
    """Leaves and bark of one species."""
    leaf = colors.leafy(site.dice, site.street.season)
    bark = colors.hsv(site.dice.between(0.04, 0.1), 0.3, site.dice.between(0.18, 0.45))
    return site.stage.palette(leaf, bark)


def tree(site: Site, x: float, z: float, height: float) -> None:
    """One tree of the scene's species and season."""
    dice = site.dice
    name: str = dice.pick(TREES)
    if site.street.season > 0.8 and dice.chance(0.6):
        name = "tree bare"
    elif dice.chance(0.1):
        name = "conifer"
    scale = height / 10.0
    width = scale * dice.between(0.85, 1.35) * dice.pick((-1.0, 1.0))
    site.stage.place(
        name, Class.VEGETATION, dice.pick(site.leaves), (x, 0.0, z), size=(width, scale, 1.0)
    )


def bush(site: Site, x: float, z: float, width: float, height: float) -> None:
    """A bush or a clump of shrubs."""
    site.stage.place(
        site.dice.pick(("bush", "bush", "shrub")),
        Class.VEGETATION,
        site.dice.pick(site.leaves),
        (x, -0.1, z),
        size=(width, height, 1.0),
    )


def hedge(site: Site, side: Side, z: float, length: float) -> None:
    """A clipped hedge along the sidewalk, in pieces so that depth sorts them."""
    dice = site.dice
    palette, height = dice.pick(site.leaves), dice.between(0.8, 2.0)
    at = z
    while at < z + length - 0.5:
        piece = min(5.0, z + length - at)
        site.stage.place(
            "box",
            Class.VEGETATION,
            palette,
            (side.x(side.front + 0.6), 0.0, at),
            size=(1.0, height * dice.between(0.94, 1.06), piece),
            depth=at + piece,
            tiling=(piece, height, 0.0, 0.0),
        )
        at += piece
