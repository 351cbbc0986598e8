"""Procedural street scenes with exact labels: a dataset that needs no download.

`render(seed, index)` draws one scene in these steps:

1. street: draw a plan of lanes, sidewalks and crossings, and paint the ground.
2. buildings, traffic, roadside: place shapes (geometry, vehicles) along the street.
3. raster: project the shapes and paint them from far to near into a map of face ids.
4. shading: look up color, texture, light and shadow of each pixel's face, then add lens blur,
   vignette, noise and a tone curve.

Labels and instances are read from the map of face ids. World axes: x to the right of the road's
center line, y up, z forward, in meters. All steps use counter-based random numbers and integer or
plain IEEE arithmetic, so sample `index` of `seed` has the same bytes on every machine.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from . import buildings, roadside, traffic, vehicles
from .geometry import Bank, choose_camera, pack
from .randomness import Dice, key
from .raster import (
    paint,
    polygon_runs,
    project_faces,
    project_strips,
    sort_placements,
    strip_runs,
    visible_runs,
)
from .shading import FIRST_STRIP, SKY_ID, cast_shadows, choose_light, expose, shade
from .street import VOID, Class, Site, lay_ground, plan_street

__all__ = ["VOID", "Class", "Scene", "render"]

MIN_SIZE = 32


@dataclass(frozen=True)
class Scene:
    """One sample of size H x W."""

    image: npt.NDArray[np.uint8]  # (H, W, 3), RGB
    labels: npt.NDArray[np.uint8]  # (H, W), Class or VOID
    instances: npt.NDArray[np.uint16]  # (H, W), from 1 on for people and vehicles, else 0


def render(seed: int, index: int, height: int = 256, width: int = 512) -> Scene:
    """Render sample `index` of the infinite dataset `seed`.

    Raises:
        ValueError: If the image is smaller than 32x32 or the index is negative.
    """
    if height < MIN_SIZE or width < MIN_SIZE:
        raise ValueError(
            f"image size {height}x{width} is too small: "
            f"expected at least {MIN_SIZE}x{MIN_SIZE} (height x width)"
        )
    if index < 0:
        raise ValueError(f"index must be 0 or greater, got {index}")
    dice = Dice(key(seed, index))
    street = plan_street(dice)
    camera = choose_camera(dice, height, width, street.ego)
    light = choose_light(dice)
    site = Site(dice, street, camera, light.lamps)
    lay_ground(site)
    _populate(site)

    bank = _bank()
    strips = project_strips(site)
    placements = sort_placements(site, bank)
    faces = project_faces(placements, bank, camera)
    first_face = FIRST_STRIP + len(strips.planes)
    canvas = np.full(height * width + 1, SKY_ID, dtype=np.int32)
    paint(canvas, strip_runs(strips, camera), FIRST_STRIP, camera)
    paint(canvas, polygon_runs(faces, camera), first_face, camera, faces)
    runs = visible_runs(canvas, width)

    shadow, shaded = cast_shadows(placements, faces, bank, camera, light)
    image = expose(shade(site, light, strips, faces, runs, shadow, shaded), camera, dice)

    label = np.concatenate(([Class.SKY], strips.table["label"], faces.label)).astype(np.uint8)
    instance = np.concatenate((np.zeros(first_face, dtype=np.int64), faces.instance))
    # Number the visible instances from 1 on, without gaps.
    seen = np.zeros(site.instances + 1, dtype=np.int64)
    seen[instance[runs.owner]] = 1
    seen[0] = 0
    number = (np.cumsum(seen) * seen).astype(np.uint16)
    return Scene(
        image=image,
        labels=np.repeat(label[runs.owner], runs.width).reshape(height, width),
        instances=np.repeat(number[instance[runs.owner]], runs.width).reshape(height, width),
    )


@lru_cache(maxsize=1)
def _bank() -> Bank:
    return pack(vehicles.shapes() | traffic.shapes() | roadside.shapes() | buildings.shapes())


def _populate(site: Site) -> None:
    """Place all objects. The order matters only to the random numbers."""
    roadside.choose_species(site)
    buildings.line_street(site)
    traffic.moving_vehicles(site)
    traffic.cross_traffic(site)
    for side in site.street.sides:
        traffic.parked_vehicles(site, side)
        traffic.pedestrians(site, side)
        roadside.street_trees(site, side)
        roadside.street_lamps(site, side)
        roadside.signs(site, side)
    roadside.traffic_lights(site)
    traffic.crosswalk_pedestrians(site)
    traffic.ego_hood(site)
