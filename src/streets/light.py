"""Light: time of day and weather decide sun, sky, shadows and haze."""

import math
from dataclasses import dataclass

from .randomness import Dice
from .stage import Color


@dataclass(frozen=True)
class Light:
    """Everything shading needs to know about the weather."""

    sun: Color
    ambient: Color
    direction: Color
    shear: tuple[float, float]
    shadow: float
    zenith: Color
    skyline: Color
    cloud: Color
    cloudiness: float
    haze: Color
    visibility: float
    lamps: bool


def _scaled(color: Color, factor: float) -> Color:
    return (color[0] * factor, color[1] * factor, color[2] * factor)


def _direction(dice: Dice, low: float, high: float) -> Color:
    """Unit vector to the sun; never level with the camera's own axis across the street."""
    elevation = math.radians(dice.between(low, high))
    azimuth = math.radians(dice.between(20.0, 70.0))
    across = round(math.cos(elevation) * math.sin(azimuth), 6)
    along = round(math.cos(elevation) * math.cos(azimuth), 6)
    return (
        across if dice.chance(0.5) else -across,
        round(math.sin(elevation), 6),
        along if dice.chance(0.45) else -along,
    )


def choose_light(dice: Dice) -> Light:
    """Clear, hazy, overcast, or dusk."""
    weather = dice.weighted([("clear", 0.42), ("hazy", 0.2), ("overcast", 0.26), ("dusk", 0.12)])
    exposure = dice.between(1.05, 1.5)
    if weather == "clear":
        direction = _direction(dice, 28.0, 64.0)
        sun, ambient, shadow = (0.74, 0.69, 0.58), (0.45, 0.5, 0.59), 1.0
        zenith = (dice.between(70, 120), dice.between(120, 165), dice.between(190, 225))
        skyline = (dice.between(170, 210), dice.between(195, 225), dice.between(220, 240))
        cloud, cloudiness = (240.0, 242.0, 245.0), dice.between(0.0, 0.75)
        visibility = dice.between(250.0, 900.0)
    elif weather == "hazy":
        direction = _direction(dice, 22.0, 50.0)
        sun, ambient, shadow = (0.5, 0.45, 0.36), (0.56, 0.58, 0.6), 0.7
        zenith = (dice.between(150, 195), dice.between(165, 205), dice.between(180, 220))
        skyline = (dice.between(210, 240), dice.between(208, 232), dice.between(200, 228))
        cloud, cloudiness = (235.0, 235.0, 235.0), dice.between(0.2, 0.6)
        visibility = dice.between(90.0, 250.0)
    elif weather == "overcast":
        direction = _direction(dice, 70.0, 80.0)
        sun, ambient, shadow = (0.16, 0.16, 0.15), (0.72, 0.74, 0.77), 0.5
        gray = dice.between(135, 225)
        zenith = (gray, gray + 2, gray + dice.between(2, 10))
        skyline = (gray + 16, gray + 17, gray + 18)
        cloud, cloudiness = (gray - 28, gray - 26, gray - 20), dice.between(0.5, 1.0)
        visibility = dice.between(140.0, 500.0)
    else:
        direction = _direction(dice, 10.0, 20.0)
        sun, ambient, shadow = (0.5, 0.33, 0.19), (0.45, 0.45, 0.55), 0.75
        zenith = (dice.between(60, 110), dice.between(75, 120), dice.between(120, 165))
        skyline = (dice.between(200, 250), dice.between(140, 190), dice.between(100, 150))
        cloud, cloudiness = (225.0, 150.0, 130.0), dice.between(0.2, 0.9)
        visibility = dice.between(140.0, 500.0)
    balance = dice.bell(0.0, 0.045)
    tint = (1.0 + balance, 1.0, 1.0 - balance)
    haze = (
        (skyline[0] + zenith[0]) / 2 * 0.96,
        (skyline[1] + zenith[1]) / 2 * 0.97,
        (skyline[2] + zenith[2]) / 2,
    )

    def seen(color: Color, factor: float) -> Color:
        return (
            color[0] * tint[0] * factor,
            color[1] * tint[1] * factor,
            color[2] * tint[2] * factor,
        )

    brightness = 0.5 + 0.42 * exposure
    return Light(
        sun=seen(sun, exposure),
        ambient=seen(ambient, exposure),
        direction=direction,
        shear=(-direction[0] / direction[1], -direction[2] / direction[1]),
        shadow=shadow,
        zenith=seen(zenith, brightness),
        skyline=seen(skyline, brightness),
        cloud=seen(cloud, brightness),
        cloudiness=cloudiness,
        haze=_scaled(haze, brightness),
        visibility=visibility,
        lamps=weather == "dusk",
    )
