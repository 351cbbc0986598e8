"""Light, shading and exposure: from the map of face ids to the image.

Weather and cast shadows, the color of every pixel, then the lens and the sensor of the camera.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .colors import Color, scaled
from .geometry import NEAREST, Bank, Bools, Camera, Floats, Ints
from .randomness import SIDE, Dice, fractal, key, random_bytes, smooth
from .raster import (
    FARTHEST,
    Columns,
    Faces,
    Int32s,
    Runs,
    Strips,
    paint,
    polygon_runs,
    project_faces,
    ragged,
)
from .street import SLOTS, Class, Site
from .textures import PART_SHIFT, Texture, atlas, grime, texels_per_unit

# Ids of the map: the sky, then the ground strips, then the faces.
SKY_ID = 0
FIRST_STRIP = 1

_BIAS = float(1 << 16)
_GRAIN_KEY = key(0x57EE7, 3)
_CURVES = 8

Plane = npt.NDArray[np.float32]  # one color channel of an image


@dataclass(frozen=True)
class Light:
    """Time of day and weather."""

    sun: Color
    ambient: Color
    direction: Color  # unit vector toward the sun
    shear: tuple[float, float]  # meters of shadow in x and z per meter of height
    shadow: float  # strength, 0..1
    zenith: Color
    skyline: Color
    cloud: Color
    cloudiness: float
    haze: Color
    visibility: float  # in meters
    lamps: bool  # lights are switched on


def choose_light(dice: Dice) -> Light:
    """Draw clear, hazy or overcast weather, or dusk."""
    weather = dice.weighted([("clear", 0.42), ("hazy", 0.2), ("overcast", 0.26), ("dusk", 0.12)])
    exposure = dice.between(1.05, 1.5)
    if weather == "clear":
        direction = _sun_direction(dice, 28.0, 64.0)
        sun, ambient, shadow = (0.74, 0.69, 0.58), (0.45, 0.5, 0.59), 1.0
        zenith = (dice.between(70, 120), dice.between(120, 165), dice.between(190, 225))
        skyline = (dice.between(170, 210), dice.between(195, 225), dice.between(220, 240))
        cloud, cloudiness = (240.0, 242.0, 245.0), dice.between(0.0, 0.75)
        visibility = dice.between(250.0, 900.0)
    elif weather == "hazy":
        direction = _sun_direction(dice, 22.0, 50.0)
        sun, ambient, shadow = (0.5, 0.45, 0.36), (0.56, 0.58, 0.6), 0.7
        zenith = (dice.between(150, 195), dice.between(165, 205), dice.between(180, 220))
        skyline = (dice.between(210, 240), dice.between(208, 232), dice.between(200, 228))
        cloud, cloudiness = (235.0, 235.0, 235.0), dice.between(0.2, 0.6)
        visibility = dice.between(90.0, 250.0)
    elif weather == "overcast":
        direction = _sun_direction(dice, 70.0, 80.0)
        sun, ambient, shadow = (0.16, 0.16, 0.15), (0.72, 0.74, 0.77), 0.5
        gray = dice.between(135, 225)
        zenith = (gray, gray + 2, gray + dice.between(2, 10))
        skyline = (gray + 16, gray + 17, gray + 18)
        cloud, cloudiness = (gray - 28, gray - 26, gray - 20), dice.between(0.5, 1.0)
        visibility = dice.between(140.0, 500.0)
    else:
        direction = _sun_direction(dice, 10.0, 20.0)
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

    def tinted(color: Color, factor: float) -> Color:
        return scaled((color[0] * tint[0], color[1] * tint[1], color[2] * tint[2]), factor)

    brightness = 0.5 + 0.42 * exposure
    return Light(
        sun=tinted(sun, exposure),
        ambient=tinted(ambient, exposure),
        direction=direction,
        shear=(-direction[0] / direction[1], -direction[2] / direction[1]),
        shadow=shadow,
        zenith=tinted(zenith, brightness),
        skyline=tinted(skyline, brightness),
        cloud=tinted(cloud, brightness),
        cloudiness=cloudiness,
        haze=scaled(haze, brightness),
        visibility=visibility,
        lamps=weather == "dusk",
    )


def _sun_direction(dice: Dice, low: float, high: float) -> Color:
    """Draw a unit vector toward the sun at `low` to `high` degrees of elevation."""
    elevation = math.radians(dice.between(low, high))
    azimuth = math.radians(dice.between(20.0, 70.0))
    across = round(math.cos(elevation) * math.sin(azimuth), 6)
    along = round(math.cos(elevation) * math.cos(azimuth), 6)
    return (
        across if dice.chance(0.5) else -across,
        round(math.sin(elevation), 6),
        along if dice.chance(0.45) else -along,
    )


def cast_shadows(
    placements: Columns, faces: Faces, bank: Bank, camera: Camera, light: Light
) -> tuple[Bools, Bools]:
    """Flatten the objects onto the ground along the rays of the sun.

    Returns:
        A mask of the pixels with ground in shadow, and a mask of the faces of objects in the
        shadow of a building or wall.
    """
    cast = project_faces(placements, bank, camera, light.shear)
    runs = polygon_runs(cast, camera)
    large = _is_large(cast)[runs.owner]
    canvas = np.zeros(camera.rows * camera.columns + 1, dtype=np.int32)
    paint(canvas, runs.select(large), 1, camera, cast)

    x, z = faces.foot[:, 0], np.minimum(np.maximum(faces.foot[:, 1], NEAREST), FARTHEST)
    u, v = camera.project(x, np.zeros_like(x), z)
    row = np.minimum(np.maximum(v, 0.0), camera.rows - 1.0).astype(np.int64)
    column = np.minimum(np.maximum(u, 0.0), camera.columns - 1.0).astype(np.int64)
    shaded = (canvas[row * camera.columns + column] > 0) & ~_is_large(faces)

    paint(canvas, runs.select(~large), 1, camera, cast)
    return canvas[:-1] > 0, shaded


def _is_large(faces: Faces) -> Bools:
    return (faces.label == Class.BUILDING) | (faces.label == Class.WALL)


def shade(
    site: Site,
    light: Light,
    strips: Strips,
    faces: Faces,
    runs: Runs,
    shadow: Bools,
    shaded: Bools,
) -> list[Plane]:
    """Return the light that reaches the sensor: flat planes of red, green and blue.

    Args:
        site: Source of the palettes, the camera and the random numbers.
        light: Time of day and weather.
        strips: The ground.
        faces: The objects.
        runs: The runs of the id map.
        shadow: Mask of the pixels with ground in shadow.
        shaded: Mask of the faces in the shadow of a building or wall.
    """
    camera = site.camera
    ground = len(strips.planes)
    lit = _lit_colors(site, strips, faces, light, shaded)
    texture = np.concatenate(([0], strips.table["texture"].astype(np.int64), faces.texture))
    slot = np.concatenate(([0], strips.table["slot"].astype(np.int64), faces.slot))
    table = np.concatenate((np.zeros((1, 9)), strips.planes, faces.planes))

    # Along a run everything is linear in u, so faces are looked up once per run.
    face, length = runs.owner, runs.width
    coefficients = table[face]
    center = runs.row + 0.5
    forms = tuple(
        (coefficients[:, k], coefficients[:, k + 1] * center + coefficients[:, k + 2])
        for k in (0, 3, 6)
    )
    inverse, s, t = _texels(forms, runs, _column_centers(camera.rows, camera.columns))

    density = texels_per_unit()[texture[face]] / camera.focal
    middle = runs.left + 0.5 * length
    tile = _blur_level(density, forms[0][0] * middle + forms[0][1]) * len(Texture) + texture[face]
    index = np.repeat((tile * (SIDE * SIDE)).astype(np.int32), length)
    index += ((t & (SIDE - 1)) << 8) + (s & (SIDE - 1))
    texels = atlas().take(index)
    dirt = grime().take(((t & (SIDE - 1) << 4) << 4) + ((s >> 4) & (SIDE - 1)))
    tone = ((texels & 255) * dirt).astype(np.float32)
    tone *= np.float32(1.0 / (128 * 128))

    color = np.repeat((face * SLOTS + slot[face]).astype(np.int32), length)
    color += ((texels >> PART_SHIFT) & 7).astype(np.int32)
    color = color.astype(np.intp)
    on_ground = np.repeat((face >= FIRST_STRIP) & (face < FIRST_STRIP + ground), length)
    dark_spots = np.flatnonzero(shadow & on_ground)
    reach = inverse * np.float32(light.visibility)
    haze = np.float32(1.0) / (
        np.float32(1.0) + reach * (reach * np.float32(0.12) + np.float32(1.0))
    )
    tone *= np.float32(1.0) - haze
    planes = []
    for channel in range(3):
        plane = lit[channel].take(color)
        plane *= tone
        sun = light.sun[channel] * light.direction[1]
        dark = 1.0 - light.shadow * sun / (sun + light.ambient[channel]) - 0.12 * light.shadow
        plane[dark_spots] *= np.float32(dark)
        plane += haze * np.float32(light.haze[channel])
        planes.append(plane)
    _paint_sky(planes, runs.select(runs.owner == SKY_ID), site, light)
    return planes


@lru_cache(maxsize=1)
def _clouds() -> Int32s:
    """Return a tile of clouds in 0..1023 (flat SIDE x SIDE)."""
    field = fractal(400, 4, 6) * 2 + smooth(410, 4) - 128
    return np.clip(field + 512, 0, 1023).reshape(-1).astype(np.int32)


@lru_cache(maxsize=4)
def _column_centers(rows: int, columns: int) -> Plane:
    """Return the u coordinate of every pixel (flat)."""
    return np.tile(np.arange(columns, dtype=np.float32) + np.float32(0.5), rows)


def _texels(
    forms: tuple[tuple[Floats, Floats], ...], runs: Runs, columns: Plane
) -> tuple[Plane, Int32s, Int32s]:
    """Return 1/z and integer texel coordinates of all pixels from their runs' forms.

    Texels are counted from -_BIAS, so that truncation is the floor. A ratio of linear forms is
    monotone along a run: if both ends are in range, no pixel between them overflows the cast.
    """
    (slope, offset), *rest = forms
    left = runs.left + 0.5
    right = left + (runs.width - 1)
    ends = [slope * left + offset, slope * right + offset]
    in_range = (ends[0] > 1e-3) & (ends[1] > 1e-3)
    biased = [(a + _BIAS * slope, b + _BIAS * offset) for a, b in rest]
    for a, b in biased:
        for u, inverse in zip((left, right), ends, strict=True):
            value = a * u + b
            in_range &= (value >= 0.0) & (value <= 2 * _BIAS * inverse)
    planes = []
    for (a, b), default in zip([(slope, offset), *biased], (1e-3, 0.0, 0.0), strict=True):
        plane = np.repeat(np.where(in_range, a, 0.0).astype(np.float32), runs.width)
        plane *= columns
        plane += np.repeat(np.where(in_range, b, default).astype(np.float32), runs.width)
        planes.append(plane)
    planes[1] /= planes[0]
    planes[2] /= planes[0]
    return planes[0], planes[1].astype(np.int32), planes[2].astype(np.int32)


def _blur_level(density: Floats, inverse: Floats) -> Ints:
    """Return the atlas level for density * z texels per pixel."""
    texels = density / np.maximum(inverse, 1e-3)
    return (texels > 1.5).astype(np.int64) + (texels > 3.0) + (texels > 6.0)


def _lit_colors(site: Site, strips: Strips, faces: Faces, light: Light, shaded: Bools) -> Plane:
    """Return palette colors times light by id: (channel, id * SLOTS + slot)."""
    palettes = np.array(site.palettes)
    ground = len(strips.planes)
    palette = np.concatenate(([0], strips.table["palette"].astype(np.int64), faces.palette))
    facing = (
        faces.normal[:, 0] * light.direction[0]
        + faces.normal[:, 1] * light.direction[1]
        + faces.normal[:, 2] * light.direction[2]
    )
    # Real objects are rounder than their flat faces, so light wraps around the edges.
    diffuse = np.maximum(facing * 0.84 + 0.16, 0.0)
    leaves = 0.4 + 0.35 * facing
    diffuse = np.where(faces.texture >= Texture.CROWN, np.maximum(leaves, 0.2), diffuse)
    diffuse = np.where(shaded, diffuse * (1.0 - 0.85 * light.shadow), diffuse)
    openness = 0.88 + 0.12 * faces.normal[:, 1]
    sun = np.concatenate((np.full(1 + ground, light.direction[1]), diffuse))
    sky = np.concatenate((np.ones(1 + ground), openness))
    lit = np.empty((3, len(palette) * SLOTS), dtype=np.float32)
    for channel in range(3):
        gain = light.ambient[channel] * sky + light.sun[channel] * sun
        colors = np.ascontiguousarray(palettes[:, :, channel])[palette]
        colors *= gain[:, None]
        lit[channel] = colors.reshape(-1)
    return lit


def _paint_sky(planes: list[Plane], runs: Runs, site: Site, light: Light) -> None:
    """Paint gradient and clouds at the given runs."""
    camera, drift = site.camera, (site.dice.below(256), site.dice.below(256))
    row = np.repeat(runs.row, runs.width)
    column = ragged(runs.left, runs.width)
    spots = row * camera.columns + column
    height = np.minimum(row / camera.horizon, 1.0).astype(np.float32)
    unit = int(camera.rows + camera.columns // 2)
    # In perspective, rows of clouds move closer together toward the horizon.
    above = np.maximum(int(camera.horizon) - row, 0) * 512 // unit
    band = 22000 // (above + 55)
    index = ((band + drift[0]) & (SIDE - 1)) * SIDE
    index += (column * 300 // unit + drift[1]) & (SIDE - 1)
    cover = _clouds().take(index).astype(np.float32) * np.float32(1.0 / 420.0)
    cover += np.float32(2.2 * light.cloudiness - 2.1)
    np.minimum(np.maximum(cover, np.float32(0.0)), np.float32(0.92), out=cover)
    cover *= np.float32(1.0) - height * height * np.float32(0.6)
    for channel, plane in enumerate(planes):
        low, high = light.skyline[channel], light.zenith[channel]
        value = np.float32(high) + np.float32(low - high) * height
        value += (np.float32(light.cloud[channel]) - value) * cover
        plane[spots] = value


def expose(planes: list[Plane], camera: Camera, dice: Dice) -> npt.NDArray[np.uint8]:
    """Apply lens blur, vignette, grain and a tone curve; return the image (H, W, 3)."""
    rows, columns = camera.rows, camera.columns
    side = dice.between(0.08, 0.17)
    falloff = np.float32(1.0) - _vignette(rows, columns) * np.float32(dice.between(0.06, 0.26))
    grain = _grain()
    needed = rows * columns + (1 << 16)
    if needed > len(grain):
        grain = np.resize(grain, needed)
    strength = np.float32(dice.between(1.2, 5.0))
    curve = _tone_curves()[dice.below(_CURVES)]
    image = np.empty((rows, columns, 3), dtype=np.uint8)
    for channel, plane in enumerate(planes):
        light = plane.reshape(rows, columns)
        _blur(light, side)
        light *= falloff
        start = dice.below(1 << 16)
        light += grain[start : start + rows * columns].reshape(rows, columns) * strength
        image[:, :, channel] = curve.take(light.astype(np.int32), mode="clip")
    return image


def _blur(plane: Plane, side: float) -> None:
    """Blur in place, with weight `side` for each of four neighbors; keep the border."""
    inner = plane[1:-1, 1:-1]
    around = plane[:-2, 1:-1] + plane[2:, 1:-1]
    around += plane[1:-1, :-2]
    around += plane[1:-1, 2:]
    around *= np.float32(side)
    inner *= np.float32(1.0 - 4.0 * side)
    inner += around


@lru_cache(maxsize=4)
def _vignette(rows: int, columns: int) -> Plane:
    """Return the squared distance from the center of the image, 1 in the corners."""
    v = (np.arange(rows) + 0.5) / rows * 2.0 - 1.0
    u = (np.arange(columns) + 0.5) / columns * 2.0 - 1.0
    return ((v * v)[:, None] + (u * u)[None, :]).astype(np.float32) * np.float32(0.5)


@lru_cache(maxsize=1)
def _grain() -> Plane:
    """Return bell-shaped noise of standard deviation 1: sums of four random bytes."""
    count = 1 << 19
    raw = random_bytes(_GRAIN_KEY, 4 * count).reshape(4, count).astype(np.int32)
    centered = raw[0] + raw[1] + raw[2] + raw[3] - 510
    return centered.astype(np.float32) * np.float32(1.0 / 148.0)


@lru_cache(maxsize=1)
def _tone_curves() -> npt.NDArray[np.uint8]:
    """Return tone curves of growing contrast, from light in 0..511 to bytes."""
    light = np.arange(512, dtype=np.float64)
    rows = []
    for number in range(_CURVES):
        contrast = 0.25 * number / (_CURVES - 1)
        # Linear up to 190, then bending toward 255.
        over = np.maximum(light - 190.0, 0.0)
        soft = np.minimum(light, 190.0) + over * 65.0 / (over + 65.0)
        x = soft / 255.0
        curved = x + contrast * x * (1.0 - x) * (2.0 * x - 1.0) * 2.0
        rows.append(np.floor(np.minimum(np.maximum(curved * 255.0, 0.0), 255.0) + 0.5))
    return np.array(rows).astype(np.uint8)
