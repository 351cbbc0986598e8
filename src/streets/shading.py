"""Shading: every pixel of the id map gets the color of its face, all pixels at once."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .camera import Camera
from .geometry import Faces, Floats, Ints, Strips, ragged
from .light import Light
from .noise import SIDE, fractal, smooth
from .raster import Runs
from .stage import SLOTS, Stage
from .texture import PART_SHIFT, Texture, atlas, grime, texels_per_unit

Plane = npt.NDArray[np.float32]

SKY_ID = 0
BIAS = float(1 << 16)
FIRST_STRIP = 1


@lru_cache(maxsize=1)
def _clouds() -> npt.NDArray[np.int32]:
    """Billows in 0..1023, flat 256x256."""
    field = fractal(400, 4, 6) * 2 + smooth(410, 4) - 128
    return np.clip(field + 512, 0, 1023).reshape(-1).astype(np.int32)


@lru_cache(maxsize=4)
def _column_centers(rows: int, columns: int) -> Plane:
    """The u coordinate of every pixel, flat."""
    return np.tile(np.arange(columns, dtype=np.float32) + np.float32(0.5), rows)


def _texels(
    forms: tuple[tuple[Floats, Floats], ...], runs: Runs, columns: Plane
) -> tuple[Plane, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """1/z and integer texel coordinates of every pixel, from the linear forms of its run.

    Texels are counted from -BIAS, so that truncation is the floor. A ratio of linear forms is
    monotone along a run: if both ends are in range, no pixel between them overflows the cast.
    """
    (slope, offset), *rest = forms
    left = runs.left + 0.5
    right = left + (runs.width - 1)
    ends = [slope * left + offset, slope * right + offset]
    sane = (ends[0] > 1e-3) & (ends[1] > 1e-3)
    biased = [(a + BIAS * slope, b + BIAS * offset) for a, b in rest]
    for a, b in biased:
        for u, inverse in zip((left, right), ends, strict=True):
            value = a * u + b
            sane &= (value >= 0.0) & (value <= 2 * BIAS * inverse)
    planes = []
    for (a, b), default in zip([(slope, offset), *biased], (1e-3, 0.0, 0.0), strict=True):
        plane = np.repeat(np.where(sane, a, 0.0).astype(np.float32), runs.width)
        plane *= columns
        plane += np.repeat(np.where(sane, b, default).astype(np.float32), runs.width)
        planes.append(plane)
    planes[1] /= planes[0]
    planes[2] /= planes[0]
    return planes[0], planes[1].astype(np.int32), planes[2].astype(np.int32)


def _softness(packing: Floats, inverse: Floats) -> Ints:
    """Atlas level for runs on whose middle `packing * z` texels fall into a pixel."""
    packed = packing / np.maximum(inverse, 1e-3)
    return (packed > 1.5).astype(np.int64) + (packed > 3.0) + (packed > 6.0)


def _lit_colors(
    stage: Stage, strips: Strips, faces: Faces, light: Light, shaded: npt.NDArray[np.bool_]
) -> Plane:
    """Palette colors times the light on each face: (channel, id * SLOTS + slot)."""
    palettes = np.array(stage.palettes)
    ground = len(strips.planes)
    palette = np.concatenate(([0], strips.table["palette"].astype(np.int64), faces.palette))
    facing = (
        faces.normal[:, 0] * light.direction[0]
        + faces.normal[:, 1] * light.direction[1]
        + faces.normal[:, 2] * light.direction[2]
    )
    # Soft wrap: real objects are rounder than their faces.
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


def _paint_sky(
    planes: list[Plane], runs: Runs, camera: Camera, light: Light, drift: tuple[int, int]
) -> None:
    """Gradient and clouds for the pixels nothing else covers."""
    runs = runs.where(runs.owner == SKY_ID)
    row = np.repeat(runs.row, runs.width)
    column = ragged(runs.left, runs.width)
    spots = row * camera.columns + column
    height = np.minimum(row / camera.horizon, 1.0).astype(np.float32)
    unit = int(camera.rows + camera.columns // 2)
    # Seen in perspective, cloud rows crowd together toward the horizon.
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


def shade(
    stage: Stage,
    strips: Strips,
    faces: Faces,
    runs: Runs,
    shadow: npt.NDArray[np.bool_],
    shaded: npt.NDArray[np.bool_],
    camera: Camera,
    light: Light,
    drift: tuple[int, int],
) -> list[Plane]:
    """Red, green and blue planes (flat, 0..255 and above) of the scene before the sensor."""
    ground = len(strips.planes)
    lit = _lit_colors(stage, strips, faces, light, shaded)
    texture = np.concatenate(([0], strips.table["texture"].astype(np.int64), faces.texture))
    slot = np.concatenate(([0], strips.table["slot"].astype(np.int64), faces.slot))
    table = np.concatenate((np.zeros((1, 9)), strips.planes, faces.planes))

    # Along a run of one id everything is linear in u, so only the runs look their faces up.
    face, length = runs.owner, runs.width
    coefficients = table[face]
    center = runs.row + 0.5
    forms = tuple(
        (coefficients[:, k], coefficients[:, k + 1] * center + coefficients[:, k + 2])
        for k in (0, 3, 6)
    )
    inverse, s, t = _texels(forms, runs, _column_centers(camera.rows, camera.columns))

    packing = texels_per_unit()[texture[face]] / camera.focal
    middle = runs.left + 0.5 * length
    tile = _softness(packing, forms[0][0] * middle + forms[0][1]) * len(Texture) + texture[face]
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
    _paint_sky(planes, runs, camera, light, drift)
    return planes
