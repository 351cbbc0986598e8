"""What separates gardens and parks from the sidewalk: fences, walls, hedges."""

from . import colors
from .buildings import panel
from .classes import Class
from .plants import hedge
from .site import Site
from .street import Side
from .texture import Texture


def boundary(site: Site, side: Side, z: float, length: float) -> None:
    """A fence, hedge or low wall, rarely nothing."""
    kind = site.dice.weighted([("fence", 0.62), ("hedge", 0.2), ("wall", 0.13), ("none", 0.05)])
    if kind == "fence":
        _fence(site, side, z, length)
    elif kind == "wall":
        wall(site, side, z, length, site.dice.between(0.7, 1.6))
    elif kind == "hedge":
        hedge(site, side, z, length)


def _fence(site: Site, side: Side, z: float, length: float) -> None:
    """Railings, pickets or wire, with gaps one can see through."""
    dice = site.dice
    texture = dice.pick((Texture.RAILINGS, Texture.PICKETS, Texture.MESH))
    color = colors.paint(dice) if dice.chance(0.6) else colors.earthy(dice)
    palette = site.stage.palette(color)
    height = 2.0 if texture == Texture.MESH else dice.between(1.0, 1.9)
    rows = 2.0 if texture == Texture.MESH else 1.0
    at = z
    while at < z + length - 0.1:
        piece = min(6.0, z + length - at)
        panel(
            site,
            (side.x(side.front + 0.1), 0.0, at),
            piece,
            height,
            palette,
            texture,
            depth=at + piece,
            label=Class.FENCE,
            tiling=(piece, rows, 0.0, 0.0),
        )
        at += piece


def wall(site: Site, side: Side, z: float, length: float, height: float) -> None:
    """A wall with a coping, in pieces so that depth sorts them."""
    dice = site.dice
    texture = dice.pick((Texture.BRICK, Texture.CONCRETE, Texture.PLASTER, Texture.COBBLES))
    color = colors.facade(dice)
    palette = site.stage.palette(color)
    coping = site.stage.palette(colors.darker(color, dice.between(0.8, 1.25)))
    at = z
    while at < z + length - 0.1:
        piece = min(7.0, z + length - at)
        x = side.x(side.front + 0.1)
        panel(
            site, (x, 0.0, at), piece, height, palette, texture, depth=at + piece, label=Class.WALL
        )
        panel(
            site,
            (x - side.sign * 0.06, height - 0.05, at),
            piece,
            0.16,
            coping,
            Texture.CONCRETE,
            depth=at + piece - 0.01,
            label=Class.WALL,
        )
        at += piece
    end = side.across(side.front + 0.1, side.front + 0.45)
    panel(
        site,
        (end[0], 0.0, z),
        0.35,
        height,
        palette,
        texture,
        depth=z,
        facing=True,
        label=Class.WALL,
    )
