"""Pigments. Ranges overlap between classes on purpose: color alone must not give the class."""

import colorsys

from .randomness import Dice
from .stage import Color


def hsv(hue: float, saturation: float, value: float) -> Color:
    """Color in 0..255 from hue, saturation and value in 0..1."""
    red, green, blue = colorsys.hsv_to_rgb(hue - int(hue), saturation, value)
    return (red * 255.0, green * 255.0, blue * 255.0)


def darker(color: Color, factor: float) -> Color:
    """The color times a factor."""
    return (color[0] * factor, color[1] * factor, color[2] * factor)


def gray(dice: Dice, low: float, high: float, tint: float = 0.06) -> Color:
    """A gray with a slight random cast."""
    return hsv(dice.unit(), dice.between(0.0, tint), dice.between(low, high))


def muted(dice: Dice, low: float = 0.25, high: float = 0.85) -> Color:
    """Any hue, weakly saturated: the range that all man-made surfaces share."""
    return hsv(dice.unit(), dice.between(0.08, 0.42), dice.between(low, high))


def strong(dice: Dice) -> Color:
    """Any hue, saturated: signs, sports cars, shop fronts, raincoats."""
    return hsv(dice.unit(), dice.between(0.55, 0.95), dice.between(0.3, 0.9))


def earthy(dice: Dice) -> Color:
    """Brick, sandstone, timber, rust, autumn leaves."""
    return hsv(dice.between(0.01, 0.13), dice.between(0.2, 0.62), dice.between(0.28, 0.85))


def leafy(dice: Dice, season: float) -> Color:
    """Leaves; `season` from 0 (spring) to 1 (autumn and drought)."""
    hue = dice.bell(0.25 - 0.15 * season, 0.05)
    return hsv(max(hue, 0.02), dice.between(0.22, 0.62) - 0.1 * season, dice.between(0.28, 0.68))


def asphalt(dice: Dice) -> Color:
    """Road surfaces from fresh tar to bleached concrete."""
    if dice.chance(0.15):
        return hsv(dice.between(0.02, 0.12), dice.between(0.05, 0.25), dice.between(0.3, 0.62))
    return gray(dice, 0.22, 0.62, 0.12)


def paving(dice: Dice) -> Color:
    """Sidewalk surfaces."""
    if dice.chance(0.35):
        return earthy(dice)
    return gray(dice, 0.3, 0.78, 0.14)


def facade(dice: Dice) -> Color:
    """Facades: brick, render, stone, cladding of any color."""
    return dice.weighted(
        [(earthy, 0.34), (_pale, 0.24), (muted, 0.26), (_stone, 0.12), (_green, 0.04)]
    )(dice)


def paint(dice: Dice) -> Color:
    """Vehicle paint, mostly grays, then anything."""
    return dice.weighted(
        [(_silver, 0.36), (_black, 0.16), (_white, 0.14), (strong, 0.18), (muted, 0.16)]
    )(dice)


def cloth(dice: Dice) -> Color:
    """Clothes."""
    return dice.weighted(
        [(_black, 0.28), (muted, 0.28), (strong, 0.16), (earthy, 0.14), (_silver, 0.14)]
    )(dice)


def skin(dice: Dice) -> Color:
    """Skin tones."""
    return hsv(dice.between(0.04, 0.08), dice.between(0.3, 0.55), dice.between(0.3, 0.88))


def _pale(dice: Dice) -> Color:
    return hsv(dice.between(0.05, 0.2), dice.between(0.03, 0.3), dice.between(0.62, 0.92))


def _stone(dice: Dice) -> Color:
    return gray(dice, 0.3, 0.8, 0.12)


def _green(dice: Dice) -> Color:
    return hsv(dice.between(0.2, 0.4), dice.between(0.15, 0.5), dice.between(0.25, 0.6))


def _silver(dice: Dice) -> Color:
    return gray(dice, 0.28, 0.78, 0.1)


def _black(dice: Dice) -> Color:
    return hsv(dice.unit(), dice.between(0.0, 0.35), dice.between(0.07, 0.26))


def _white(dice: Dice) -> Color:
    return gray(dice, 0.8, 0.95, 0.04)
