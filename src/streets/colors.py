"""Random colors of surfaces, as (red, green, blue) in 0..255.

The ranges of different classes overlap on purpose: color alone must not reveal the class.
"""

import colorsys

from .randomness import Dice

Color = tuple[float, float, float]


def hsv(hue: float, saturation: float, value: float) -> Color:
    """Convert hue, saturation and value in 0..1 to a color."""
    red, green, blue = colorsys.hsv_to_rgb(hue - int(hue), saturation, value)
    return (red * 255.0, green * 255.0, blue * 255.0)


def scaled(color: Color, factor: float) -> Color:
    """Multiply a color by a factor."""
    return (color[0] * factor, color[1] * factor, color[2] * factor)


def gray(dice: Dice, low: float, high: float, tint: float = 0.06) -> Color:
    """Draw a gray of brightness `low` to `high` with saturation up to `tint`."""
    return hsv(dice.unit(), dice.between(0.0, tint), dice.between(low, high))


def muted(dice: Dice) -> Color:
    """Draw a weakly saturated color of any hue."""
    return hsv(dice.unit(), dice.between(0.08, 0.42), dice.between(0.25, 0.85))


def strong(dice: Dice) -> Color:
    """Draw a saturated color of any hue: signs, sports cars, storefronts, raincoats."""
    return hsv(dice.unit(), dice.between(0.55, 0.95), dice.between(0.3, 0.9))


def earthy(dice: Dice) -> Color:
    """Draw a color of brick, sandstone, timber, rust or autumn leaves."""
    return hsv(dice.between(0.01, 0.13), dice.between(0.2, 0.62), dice.between(0.28, 0.85))


def leafy(dice: Dice, season: float) -> Color:
    """Draw a leaf color; `season` runs from 0 (spring) to 1 (autumn and drought)."""
    hue = dice.bell(0.25 - 0.15 * season, 0.05)
    return hsv(max(hue, 0.02), dice.between(0.22, 0.62) - 0.1 * season, dice.between(0.28, 0.68))


def asphalt(dice: Dice) -> Color:
    """Draw a road color, from fresh tar to bleached concrete."""
    if dice.chance(0.15):
        return hsv(dice.between(0.02, 0.12), dice.between(0.05, 0.25), dice.between(0.3, 0.62))
    return gray(dice, 0.22, 0.62, 0.12)


def paving(dice: Dice) -> Color:
    """Draw a sidewalk color."""
    return earthy(dice) if dice.chance(0.35) else gray(dice, 0.3, 0.78, 0.14)


def glass(dice: Dice, tint: float, low: float, high: float) -> Color:
    """Draw a bluish glass of saturation up to `tint` and brightness `low` to `high`."""
    return hsv(dice.between(0.5, 0.65), dice.between(0.05, tint), dice.between(low, high))


def facade(dice: Dice) -> Color:
    """Draw a facade color: brick, stucco, stone or siding."""
    return dice.weighted(
        [(earthy, 0.34), (_pale, 0.24), (muted, 0.26), (_stone, 0.12), (_green, 0.04)]
    )(dice)


def paint(dice: Dice) -> Color:
    """Draw a vehicle color, most often a gray."""
    return dice.weighted(
        [(_silver, 0.36), (_black, 0.16), (_white, 0.14), (strong, 0.18), (muted, 0.16)]
    )(dice)


def cloth(dice: Dice) -> Color:
    """Draw a color of clothes."""
    return dice.weighted(
        [(_black, 0.28), (muted, 0.28), (strong, 0.16), (earthy, 0.14), (_silver, 0.14)]
    )(dice)


def skin(dice: Dice) -> Color:
    """Draw a skin tone."""
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
