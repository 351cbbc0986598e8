"""Procedural street scenes with exact labels: a dataset that needs no download.

A scene comes about in the order of `render`: plan and light are drawn from hashed dice, the stage
is set, its faces are projected and painted far to near into a map of face ids, and image, labels
and instances are all read from that one map. Every step is integer or plain IEEE arithmetic, so
that sample `index` of `seed` is the same bytes on every machine.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .camera import choose_camera
from .classes import CLASSES, PALETTE, VOID, Class
from .geometry import arrange, lay_strips, place_faces
from .light import choose_light
from .population import populate
from .randomness import Dice, key
from .raster import paint, polygon_runs, strip_runs, visible_runs
from .sensor import expose
from .shading import FIRST_STRIP, SKY_ID, shade
from .shadow import cast_shadows
from .site import Site
from .stage import Stage
from .street import lay_ground, plan_street

__all__ = ["CLASSES", "PALETTE", "VOID", "Scene", "render"]

SMALLEST = 32


@dataclass(frozen=True)
class Scene:
    """One sample: image (H, W, 3), labels (H, W) in trainIds, instances (H, W), 0 for stuff."""

    image: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]
    instances: npt.NDArray[np.uint16]


def render(seed: int, index: int, height: int = 256, width: int = 512) -> Scene:
    """Render sample `index` of the endless dataset `seed`."""
    if height < SMALLEST or width < SMALLEST:
        raise ValueError(f"size {height}x{width} is below the smallest, {SMALLEST}x{SMALLEST}")
    if index < 0:
        raise ValueError(f"index must not be negative, got {index}")
    dice = Dice(key(seed, index))
    street = plan_street(dice)
    camera = choose_camera(dice, height, width, street.ego)
    light = choose_light(dice)

    stage = Stage()
    soil = lay_ground(stage, dice, street)
    populate(Site(stage, dice, street, camera, light.lamps, soil))

    strips = lay_strips(stage, camera)
    placements = arrange(stage)
    faces = place_faces(placements, camera, None)
    first_face = FIRST_STRIP + len(strips.planes)
    canvas = np.full(height * width + 1, SKY_ID, dtype=np.int32)
    paint(canvas, strip_runs(strips, camera), None, FIRST_STRIP, width, camera.focal)
    paint(canvas, polygon_runs(faces, height, width), faces, first_face, width, camera.focal)
    runs = visible_runs(canvas, width)

    shadow, shaded = cast_shadows(placements, faces, camera, light)
    drift = (dice.below(256), dice.below(256))
    planes = shade(stage, strips, faces, runs, shadow, shaded, camera, light, drift)
    image = expose(planes, height, width, dice)

    ground = strips.table["label"].astype(np.uint8)
    label = np.concatenate(([Class.SKY], ground, faces.label)).astype(np.uint8)
    instance = np.concatenate((np.zeros(first_face, dtype=np.int64), faces.instance))
    seen = np.zeros(stage.instances + 1, dtype=np.int64)
    seen[instance[runs.owner]] = 1
    seen[0] = 0
    number = np.cumsum(seen) * seen
    return Scene(
        image=image,
        labels=np.repeat(label[runs.owner], runs.width).reshape(height, width),
        instances=np.repeat(number[instance[runs.owner]].astype(np.uint16), runs.width).reshape(
            height, width
        ),
    )
