"""The stage: everything a layout puts into a scene, as plain rows of numbers.

Ground is a list of strips, painted in order; objects are placements of named shapes. Nothing is
computed here, so that all geometry can be done later for the whole scene at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from . import cars, cycles, furniture, lorries, people
from .classes import FIRST_THING, VOID
from .shape import Shape
from .texture import Texture

Color = tuple[float, float, float]
SLOTS = 8

PLACEMENT_FIELDS = (
    "shape",
    "x",
    "y",
    "z",
    "cosine",
    "sine",
    "width",
    "height",
    "length",
    "s_scale",
    "t_scale",
    "s_shift",
    "t_shift",
    "depth",
    "label",
    "instance",
    "palette",
    "texture",
    "casts",
)
STRIP_FIELDS = ("left", "right", "near", "far", "label", "palette", "slot", "texture")


@dataclass(frozen=True)
class Bank:
    """All shapes as flat arrays: shapes index faces, faces index corners."""

    names: dict[str, int]
    first_face: npt.NDArray[np.int64]
    face_count: npt.NDArray[np.int64]
    first_corner: npt.NDArray[np.int64]
    corner_count: npt.NDArray[np.int64]
    slot: npt.NDArray[np.int64]
    texture: npt.NDArray[np.int64]
    two_sided: npt.NDArray[np.bool_]
    casts: npt.NDArray[np.bool_]
    corners: npt.NDArray[np.float64]
    coordinates: npt.NDArray[np.float64]
    reach: npt.NDArray[np.float64]


@lru_cache(maxsize=1)
def bank() -> Bank:
    """The shapes of every kind of object, built once."""
    shapes: dict[str, Shape] = {}
    for kind in (cars, lorries, cycles, people, furniture):
        shapes |= kind.shapes()
    faces = [face for shape in shapes.values() for face in shape.faces]
    face_count = np.array([len(shape.faces) for shape in shapes.values()])
    corner_count = np.array([len(face.corners) for face in faces])
    return Bank(
        names={name: index for index, name in enumerate(shapes)},
        first_face=np.cumsum(face_count) - face_count,
        face_count=face_count,
        first_corner=np.cumsum(corner_count) - corner_count,
        corner_count=corner_count,
        slot=np.array([face.slot for face in faces]),
        texture=np.array([int(face.texture) for face in faces]),
        two_sided=np.array([face.two_sided for face in faces]),
        casts=np.array([face.casts for face in faces]),
        corners=np.array([corner for face in faces for corner in face.corners]),
        coordinates=np.array([st for face in faces for st in face.coordinates]),
        reach=np.array([shape.reach() for shape in shapes.values()]),
    )


@dataclass
class Stage:
    """Collects palettes, ground strips and placements; hands out instance numbers."""

    palettes: list[list[Color]] = field(default_factory=list)
    strips: list[tuple[float, ...]] = field(default_factory=list)
    placements: list[tuple[float, ...]] = field(default_factory=list)
    instances: int = 0

    def palette(self, *colors: Color) -> int:
        """Register up to eight colors and return the number of their palette."""
        row = list(colors[:SLOTS])
        row.extend([row[-1]] * (SLOTS - len(row)))
        self.palettes.append(row)
        return len(self.palettes) - 1

    def strip(
        self,
        across: tuple[float, float],
        along: tuple[float, float],
        label: int,
        palette: int,
        texture: Texture,
        slot: int = 0,
    ) -> None:
        """Paint a rectangle of ground: x range, z range."""
        if across[1] > across[0] and along[1] > along[0]:
            self.strips.append((*across, *along, label, palette, slot, texture))

    def place(
        self,
        name: str,
        label: int,
        palette: int,
        at: tuple[float, float, float],
        *,
        turn: tuple[float, float] = (1.0, 0.0),
        size: tuple[float, float, float] = (1.0, 1.0, 1.0),
        depth: float | None = None,
        texture: Texture | None = None,
        tiling: Sequence[float] = (1.0, 1.0, 0.0, 0.0),
        casts: bool = True,
    ) -> None:
        """Put a shape at (x, y, z), turned by (cosine, sine); larger `depth` is painted earlier."""
        instance = 0
        if FIRST_THING <= label < VOID:
            self.instances += 1
            instance = self.instances
        self.placements.append(
            (
                bank().names[name],
                *at,
                *turn,
                *size,
                *tiling,
                at[2] if depth is None else depth,
                label,
                instance,
                palette,
                -1 if texture is None else texture,
                casts,
            )
        )
