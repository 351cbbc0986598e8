"""Colors for the classes of datasets that define none."""

import colorsys

from .sample import Palette


def distinct_colors(count: int) -> Palette:
    """Return `count` different colors; more classes do not change the first ones.

    Hue, saturation and brightness follow sequences with irrational steps, which fill their ranges
    evenly.

    >>> distinct_colors(2)
    ((140, 77, 77), (35, 85, 206))
    """
    colors: dict[tuple[int, int, int], None] = {}  # a set that keeps the order
    step = 0
    while len(colors) < count:
        hue, saturation, value = (step * a % 1 for a in (0.6180340, 0.7548777, 0.5698403))
        color = colorsys.hsv_to_rgb(hue, 0.45 + 0.5 * saturation, 0.55 + 0.45 * value)
        red, green, blue = (round(255 * part) for part in color)
        colors[red, green, blue] = None
        step += 1
    return tuple(colors)
