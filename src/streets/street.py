"""The street: class ids, random plan, and the site of ground and placed shapes."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from . import colors
from .colors import Color
from .geometry import Camera
from .randomness import Dice
from .textures import Texture

VOID = 255  # the label of pixels without a class
SLOTS = 8  # colors per palette

Span = tuple[float, float]


class Class(IntEnum):
    """Training ids of Cityscapes.

    Only the classes from PERSON on have instance numbers.
    """

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
    """A rectangle of ground.

    All fields are numbers, so that strips stack to one array.
    """

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


NEAR, FAR = 1.2, 190.0  # z range of lines, curbs and sidewalks
HORIZON = 400.0  # z where the road ends


def _plan_side(dice: Dice, sign: float, half: float, town: float) -> Side:
    parking = dice.chance(0.5)
    curb = half + (2.1 if parking else dice.between(0.2, 0.6))
    verge = None
    start = curb + 0.15
    if dice.chance(0.36):
        verge = (start, start + dice.between(0.8, 2.6))
        start = verge[1]
    walk = (start, start + dice.between(2.0, 3.2 + 2.8 * town))
    return Side(sign, curb, walk, parking, verge)


def plan_street(dice: Dice) -> Street:
    """Draw a random plan."""
    town = dice.unit()
    lane_width = dice.between(2.8, 3.5)
    each_way = 2 if dice.chance(0.28) else 1
    lanes = tuple(lane_width * (lane + 0.5) for lane in range(-each_way, each_way))
    rails = None
    if dice.chance(0.17):
        rails = dice.pick(lanes[: each_way + 1])
    crossing = None
    if dice.chance(0.45):
        start = dice.between(12.0, 55.0)
        crossing = (start, start + dice.between(9.0, 16.0))
    crosswalk = None
    if dice.chance(0.3):
        start = crossing[0] - 4.5 if crossing and dice.chance(0.7) else dice.between(8.0, 30.0)
        crosswalk = (start, start + 3.0)
    half = each_way * lane_width
    return Street(
        lanes=lanes,
        lane_width=lane_width,
        ego=lanes[each_way + (each_way - 1 if dice.chance(0.5) else 0)] + dice.bell(0.0, 0.3),
        left=_plan_side(dice, -1.0, half, town),
        right=_plan_side(dice, 1.0, half, town),
        crossing=crossing,
        crosswalk=crosswalk,
        rails=rails,
        season=dice.unit() if dice.chance(0.5) else dice.between(0.0, 0.3),
        town=town,
    )


def lay_ground(site: Site) -> None:
    """Paint the ground, from the lots to the markings of the road."""
    dice, street = site.dice, site.street
    road, walk = _ground_palettes(site)
    paving = dice.weighted([(Texture.SLABS, 0.5), (Texture.COBBLES, 0.2), (Texture.ASPHALT, 0.3)])
    surface = Texture.COBBLES if dice.chance(0.08) else Texture.ASPHALT
    paved_lots = dice.chance(0.25 + 0.5 * street.town)
    for side in street.sides:
        lots = side.across(side.front, 300.0)
        if paved_lots:
            site.strip(lots, (NEAR, HORIZON), Class.SIDEWALK, walk, paving)
        else:
            site.strip(lots, (NEAR, HORIZON), Class.TERRAIN, site.soil, Texture.GRASS)
        site.strip(side.across(*side.walk), (NEAR, FAR), Class.SIDEWALK, walk, paving)
        if side.verge:
            verge = side.across(*side.verge)
            site.strip(verge, (NEAR, FAR), Class.TERRAIN, site.soil, Texture.GRASS)
        curb = side.across(side.curb - 0.02, side.curb + 0.15)
        site.strip(curb, (NEAR, FAR), Class.SIDEWALK, walk, Texture.CONCRETE, 1)
    whole = (-street.left.curb, street.right.curb)
    site.strip(whole, (NEAR, HORIZON), Class.ROAD, road, surface)
    for side in street.sides:
        gutter = side.across(side.curb - 0.35, side.curb - 0.02)
        site.strip(gutter, (NEAR, FAR), Class.ROAD, road, surface, 2)
    _cross_street(site, road, walk, paving)
    _wear(site, road)
    if street.rails is not None:
        for offset in (-0.75, 0.75):
            x = street.rails + offset
            site.strip((x - 0.12, x + 0.12), (NEAR, FAR), Class.ROAD, road, surface, 3)
            site.strip((x - 0.04, x + 0.04), (NEAR, FAR), Class.ROAD, road, Texture.PLAIN, 4)
    _markings(site, road)


def _ground_palettes(site: Site) -> tuple[int, int]:
    """Add the palettes of road, sidewalk and soil; return the first two.

    Road: 0 surface, 1 markings, 2 patches, 3 seams, 4 rails. Sidewalk: 0 paving, 1 curb.
    """
    dice = site.dice
    tar = colors.asphalt(dice)
    white = colors.hsv(dice.between(0.08, 0.16), dice.between(0.0, 0.08), dice.between(0.72, 0.95))
    if dice.chance(0.1):
        white = colors.hsv(0.12, 0.6, 0.85)
    road = site.palette(
        tar,
        white,
        colors.scaled(tar, dice.between(0.72, 1.2)),
        colors.scaled(tar, 0.62),
        colors.gray(dice, 0.3, 0.5),
    )
    walk = site.palette(colors.paving(dice), colors.gray(dice, 0.5, 0.85))
    bare = dice.chance(0.25)
    site.soil = site.palette(
        colors.earthy(dice) if bare else colors.leafy(dice, site.street.season)
    )
    return road, walk


def _cross_street(site: Site, road: int, walk: int, paving: Texture) -> None:
    """Paint the cross street with its curbs and sidewalks."""
    if site.street.crossing is None:
        return
    near, far = site.street.crossing
    for side in site.street.sides:
        wide = side.across(side.curb, 120.0)
        site.strip(wide, (near - 2.4, far + 2.4), Class.SIDEWALK, walk, paving)
        site.strip(wide, (near - 0.15, far + 0.15), Class.SIDEWALK, walk, Texture.CONCRETE, 1)
        site.strip(wide, (near, far), Class.ROAD, road, Texture.ASPHALT)


def _wear(site: Site, road: int) -> None:
    """Paint patches, seams and manhole covers."""
    dice, street = site.dice, site.street
    half = street.lanes[-1] + street.lane_width / 2
    for _ in range(dice.below(6)):
        x, z = dice.between(-half, half), dice.between(3.0, 35.0)
        box = (x, x + dice.between(0.6, 3.0)), (z, z + dice.between(1.0, 9.0))
        site.strip(*box, Class.ROAD, road, Texture.ASPHALT, 2)
    for _ in range(dice.below(3)):
        x = dice.between(-half, half)
        site.strip((x, x + 0.05), (NEAR, FAR), Class.ROAD, road, Texture.ASPHALT, 3)
    for _ in range(dice.below(4)):
        x, z = dice.between(-half, half), dice.between(4.0, 25.0)
        site.strip((x, x + 0.62), (z, z + 0.62), Class.ROAD, road, Texture.COBBLES, 3)


def _markings(site: Site, road: int) -> None:
    """Paint center, lane and edge lines, the crosswalk and its stop line."""
    dice, street = site.dice, site.street
    half = street.lanes[-1] + street.lane_width / 2
    if dice.chance(0.85):
        if dice.chance(0.3):
            for x in (-0.12, 0.12) if dice.chance(0.5) else (0.0,):
                _solid_line(site, x, road)
        else:
            _dashed_line(site, 0.0, road)
    for lane in street.lanes[:-1]:
        edge = lane + street.lane_width / 2
        if abs(edge) > 0.5:
            _dashed_line(site, edge, road)
    if dice.chance(0.5):
        for sign in (-1.0, 1.0):
            _solid_line(site, sign * (half - 0.05), road)
    if street.crosswalk:
        x = -half - 0.2
        while x < half + 0.2:
            site.strip((x, x + 0.5), street.crosswalk, Class.ROAD, road, Texture.PAINTED, 1)
            x += 1.0
        stop = street.crosswalk[0] - 1.2
        site.strip((0.1, half), (stop - 0.4, stop), Class.ROAD, road, Texture.PAINTED, 1)


def _dashed_line(site: Site, x: float, road: int) -> None:
    length, gap = site.dice.pick([(3.0, 6.0), (3.0, 3.0), (6.0, 6.0), (4.0, 8.0)])
    z = NEAR + site.dice.between(0.0, length + gap)
    while z < 120.0:
        if site.street.open_at(z - 1.0, z + length + 1.0):
            _line(site, x, (z, z + length), road)
        z += length + gap


def _solid_line(site: Site, x: float, road: int) -> None:
    crossing = site.street.crossing
    if crossing:
        _line(site, x, (NEAR, crossing[0] - 1.0), road)
        _line(site, x, (crossing[1] + 1.0, FAR), road)
    else:
        _line(site, x, (NEAR, FAR), road)


def _line(site: Site, x: float, along: Span, road: int) -> None:
    site.strip((x - 0.13 / 2, x + 0.13 / 2), along, Class.ROAD, road, Texture.PAINTED, 1)
