"""Palettes of vehicles and of clothes."""

from . import colors
from .site import Site
from .stage import Color


def vehicle_palette(site: Site, second: Color | None = None) -> int:
    """Paint, glass and lamps of one vehicle."""
    dice = site.dice
    glass = colors.hsv(dice.between(0.5, 0.65), dice.between(0.05, 0.3), dice.between(0.1, 0.42))
    braking = dice.chance(0.3)
    tail: Color = (235.0, 40.0, 35.0) if braking else (150.0, 22.0, 24.0)
    head: Color = (215.0, 218.0, 222.0)
    if site.lamps:
        tail, head = (520.0, 70.0, 50.0), (520.0, 500.0, 430.0)
    return site.stage.palette(
        colors.paint(dice),
        glass,
        colors.gray(dice, 0.08, 0.16),
        colors.gray(dice, 0.4, 0.75),
        tail,
        head,
        colors.gray(dice, 0.1, 0.2),
        second or colors.gray(dice, 0.6, 0.9),
    )


def clothes(site: Site) -> int:
    """Clothes, skin and hair of one person."""
    dice = site.dice
    coat, trousers = colors.cloth(dice), colors.cloth(dice)
    hair = colors.hsv(dice.between(0.04, 0.1), dice.between(0.1, 0.6), dice.between(0.06, 0.55))
    return site.stage.palette(
        coat,
        trousers,
        colors.skin(dice),
        hair,
        colors.gray(dice, 0.08, 0.5),
        colors.strong(dice),
        colors.darker(coat, 0.72),
        colors.darker(trousers, 0.72),
    )
