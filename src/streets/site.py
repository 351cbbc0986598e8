"""The data of a scene: class ids, the plan of the street, the ground and the placed shapes."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from .camera import Camera
from .colors import Color
from .randomness import Dice
from .textures import Texture

VOID = 255  # the label of pixels without a class
SLOTS = 8  # colors per palette

Span = tuple[float, float]


class Class(IntEnum):
    """Training ids of Cityscapes. Only the classes from PERSON on have instance numbers."""

    ROAD = 0
    SIDEWALK = 1
    BUILDING = 2
    WALL = 3
    FENCE = 4
    POLE = 5
    TRAFFIC_LIGHT = 6
    TRAFFIC_SIGN = 7
    VEGETATION = 8
    TERRAIN = 9
    SKY = 10
    PERSON = 11
    RIDER = 12
    CAR = 13
    TRUCK = 14
    BUS = 15
    TRAIN = 16
    MOTORCYCLE = 17
    BICYCLE = 18


@dataclass(frozen=True)
class Side:
    """One side of the street, in meters from the center line outward."""

    sign: float  # -1 on the left, +1 on the right
    curb: float
    walk: Span  # the sidewalk
    parking: bool
    verge: Span | None  # a strip of grass between curb and sidewalk

    @property
    def front(self) -> float:
        """The distance where the lots begin."""
        return self.walk[1]

    def x(self, distance: float) -> float:
        """Return the world x of a distance from the center line."""
        return self.sign * distance

    def across(self, inner: float, outer: float) -> Span:
        """Return the x range between two distances from the center line."""
        return (inner, outer) if self.sign > 0 else (-outer, -inner)


@dataclass(frozen=True)
class Street:
    """The plan of the street."""

    lanes: tuple[float, ...]  # x of each lane's middle
    lane_width: float
    ego: float  # x of the camera
    left: Side
    right: Side
    crossing: Span | None  # z range of the cross street
    crosswalk: Span | None
    rails: float | None  # x of the tram track
    season: float  # 0 spring, 1 autumn
    town: float  # 0 suburb, 1 city center

    @property
    def sides(self) -> tuple[Side, Side]:
        return (self.left, self.right)

    def open_at(self, near: float, far: float) -> bool:
        """Return whether a z range is clear of the cross street."""
        return self.crossing is None or far <= self.crossing[0] or near >= self.crossing[1]


class Strip(NamedTuple):
    """A rectangle of ground. All fields are numbers, so that strips stack to one array."""

    left: float
    right: float
    near: float
    far: float
    label: int
    palette: int
    slot: int
    texture: int


class Placement(NamedTuple):
    """A placed shape, without the shape's name; see `Site.place`."""

    x: float
    y: float
    z: float
    cosine: float
    sine: float
    width: float
    height: float
    length: float
    s_scale: float
    t_scale: float
    s_shift: float
    t_shift: float
    depth: float
    label: int
    instance: int
    palette: int
    texture: int
    casts: bool


@dataclass
class Site:
    """A street under construction: palettes, ground strips and placed shapes."""

    dice: Dice
    street: Street
    camera: Camera
    lamps: bool  # lights are switched on
    soil: int = 0  # palette of soil and grass
    leaves: list[int] = field(default_factory=list)  # palettes of the tree species
    palettes: list[list[Color]] = field(default_factory=list)
    strips: list[Strip] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)  # the shape of each placement
    placements: list[Placement] = field(default_factory=list)
    instances: int = 0

    def palette(self, *slots: Color) -> int:
        """Add a palette of up to eight colors and return its number."""
        self.palettes.append([*slots, *[slots[-1]] * (SLOTS - len(slots))])
        return len(self.palettes) - 1

    def strip(
        self,
        across: Span,
        along: Span,
        label: Class,
        palette: int,
        texture: Texture,
        slot: int = 0,
    ) -> None:
        """Paint a rectangle of ground over the earlier ones: x range, z range."""
        if across[1] > across[0] and along[1] > along[0]:
            self.strips.append(Strip(*across, *along, label, palette, slot, texture))

    def place(
        self,
        shape: str,
        label: int,
        palette: int,
        at: tuple[float, float, float],
        *,
        turn: tuple[float, float] = (1.0, 0.0),
        size: tuple[float, float, float] = (1.0, 1.0, 1.0),
        depth: float | None = None,
        texture: Texture | None = None,
        tiling: tuple[float, float, float, float] = (1.0, 1.0, 0.0, 0.0),
        casts: bool = True,
    ) -> None:
        """Place a shape.

        Args:
            shape: Name of the shape.
            label: Class of its pixels.
            palette: Number of its palette.
            at: Position (x, y, z) of its origin.
            turn: Cosine and sine of its rotation about the vertical.
            size: Scale in width, height and length.
            depth: Painting order: shapes of larger depth are painted first. Default: z.
            texture: Replaces the textures of its faces.
            tiling: Scale (2) and shift (2) of the texture coordinates.
            casts: Whether it casts a shadow.
        """
        instance = 0
        if Class.PERSON <= label < VOID:
            self.instances += 1
            instance = self.instances
        depth = at[2] if depth is None else depth
        kind = -1 if texture is None else texture
        self.shapes.append(shape)
        self.placements.append(
            Placement(*at, *turn, *size, *tiling, depth, label, instance, palette, kind, casts)
        )
