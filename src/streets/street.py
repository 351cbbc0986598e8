"""The street plan and its ground: lanes, curbs, sidewalks, verges, crossings, markings."""

from dataclasses import dataclass

from . import colors
from .classes import Class
from .randomness import Dice
from .stage import Stage
from .texture import Texture

NEAR, FAR = 1.2, 190.0
Span = tuple[float, float]


@dataclass(frozen=True)
class Side:
    """One side of the street, from the curb outwards; `sign` is -1 on the left, +1 on the right."""

    sign: float
    curb: float
    walk: Span
    front: float
    parking: bool
    verge: Span | None

    def x(self, outwards: float) -> float:
        """The world x of a distance from the center line."""
        return self.sign * outwards

    def across(self, inner: float, outer: float) -> Span:
        """The x range between two distances from the center line."""
        return (inner, outer) if self.sign > 0 else (-outer, -inner)


@dataclass(frozen=True)
class Street:
    """Plan of the street: where lanes, sides and the cross street are."""

    lanes: tuple[float, ...]
    lane_width: float
    ego: float
    left: Side
    right: Side
    crossing: Span | None
    zebra: Span | None
    rails: float | None
    season: float
    town: float

    @property
    def sides(self) -> tuple[Side, Side]:
        """Left and right."""
        return (self.left, self.right)

    def open_at(self, near: float, far: float) -> bool:
        """Whether a stretch is clear of the cross street."""
        return self.crossing is None or far <= self.crossing[0] or near >= self.crossing[1]


def _side(dice: Dice, sign: float, half: float, town: float) -> Side:
    """Choose parking lane, verge and sidewalk of one side."""
    parking = dice.chance(0.5)
    curb = half + (2.1 if parking else dice.between(0.2, 0.6))
    verge = None
    start = curb + 0.15
    if dice.chance(0.36):
        verge = (start, start + dice.between(0.8, 2.6))
        start = verge[1]
    walk = (start, start + dice.between(2.0, 3.2 + 2.8 * town))
    return Side(sign, curb, walk, walk[1], parking, verge)


def plan_street(dice: Dice) -> Street:
    """Choose the plan."""
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
    zebra = None
    if dice.chance(0.3):
        start = crossing[0] - 4.5 if crossing and dice.chance(0.7) else dice.between(8.0, 30.0)
        zebra = (start, start + 3.0)
    half = each_way * lane_width
    return Street(
        lanes=lanes,
        lane_width=lane_width,
        ego=lanes[each_way + (each_way - 1 if dice.chance(0.5) else 0)] + dice.bell(0.0, 0.3),
        left=_side(dice, -1.0, half, town),
        right=_side(dice, 1.0, half, town),
        crossing=crossing,
        zebra=zebra,
        rails=rails,
        season=dice.unit() if dice.chance(0.5) else dice.between(0.0, 0.3),
        town=town,
    )


def _palettes(stage: Stage, dice: Dice, street: Street) -> tuple[int, int, int]:
    """Palettes of road (0 surface, 1 lines, 2 patch, 3 seam, 4 iron), walk, and soil."""
    tar = colors.asphalt(dice)
    white = colors.hsv(dice.between(0.08, 0.16), dice.between(0.0, 0.08), dice.between(0.72, 0.95))
    if dice.chance(0.1):
        white = colors.hsv(0.12, 0.6, 0.85)
    road = stage.palette(
        tar,
        white,
        colors.darker(tar, dice.between(0.72, 1.2)),
        colors.darker(tar, 0.62),
        colors.gray(dice, 0.3, 0.5),
    )
    slab = colors.paving(dice)
    curb = colors.gray(dice, 0.5, 0.85)
    walk = stage.palette(slab, curb, colors.darker(slab, 0.85))
    bare = dice.chance(0.25)
    ground = colors.earthy(dice) if bare else colors.leafy(dice, street.season)
    soil = stage.palette(ground, colors.darker(ground, 0.8))
    return road, walk, soil


def _mark(stage: Stage, x: float, width: float, along: Span, road: int) -> None:
    """A painted line along the road."""
    stage.strip((x - width / 2, x + width / 2), along, Class.ROAD, road, Texture.PAINTED, 1)


def _dashes(stage: Stage, dice: Dice, x: float, road: int, street: Street) -> None:
    """A dashed line, interrupted at the cross street."""
    length, gap = dice.pick([(3.0, 6.0), (3.0, 3.0), (6.0, 6.0), (4.0, 8.0)])
    z = NEAR + dice.between(0.0, length + gap)
    while z < 120.0:
        if street.open_at(z - 1.0, z + length + 1.0):
            _mark(stage, x, 0.13, (z, z + length), road)
        z += length + gap


def _line(stage: Stage, x: float, road: int, street: Street) -> None:
    """A solid line, interrupted at the cross street."""
    stretches: list[Span] = [(NEAR, FAR)]
    if street.crossing:
        stretches = [(NEAR, street.crossing[0] - 1.0), (street.crossing[1] + 1.0, FAR)]
    for stretch in stretches:
        _mark(stage, x, 0.13, stretch, road)


def _markings(stage: Stage, dice: Dice, street: Street, road: int) -> None:
    """Center, lane and edge lines, zebra crossing and stop line."""
    half = street.lanes[-1] + street.lane_width / 2
    if dice.chance(0.85):
        if dice.chance(0.3):
            for x in (-0.12, 0.12) if dice.chance(0.5) else (0.0,):
                _line(stage, x, road, street)
        else:
            _dashes(stage, dice, 0.0, road, street)
    for lane in street.lanes[:-1]:
        edge = lane + street.lane_width / 2
        if abs(edge) > 0.5:
            _dashes(stage, dice, edge, road, street)
    if dice.chance(0.5):
        for sign in (-1.0, 1.0):
            _line(stage, sign * (half - 0.05), road, street)
    if street.zebra:
        x = -half - 0.2
        while x < half + 0.2:
            stage.strip((x, x + 0.5), street.zebra, Class.ROAD, road, Texture.PAINTED, 1)
            x += 1.0
        stop = street.zebra[0] - 1.2
        stage.strip((0.1, half), (stop - 0.4, stop), Class.ROAD, road, Texture.PAINTED, 1)


def _wear(stage: Stage, dice: Dice, street: Street, road: int) -> None:
    """Repairs, seams, manholes: the road is rarely one surface."""
    half = street.lanes[-1] + street.lane_width / 2
    for _ in range(dice.below(6)):
        x, z = dice.between(-half, half), dice.between(3.0, 35.0)
        box = (x, x + dice.between(0.6, 3.0)), (z, z + dice.between(1.0, 9.0))
        stage.strip(*box, Class.ROAD, road, Texture.ASPHALT, 2)
    for _ in range(dice.below(3)):
        x = dice.between(-half, half)
        stage.strip((x, x + 0.05), (NEAR, FAR), Class.ROAD, road, Texture.ASPHALT, 3)
    for _ in range(dice.below(4)):
        x, z = dice.between(-half, half), dice.between(4.0, 25.0)
        stage.strip((x, x + 0.62), (z, z + 0.62), Class.ROAD, road, Texture.COBBLES, 3)


def _cross_street(stage: Stage, street: Street, road: int, walk: int, texture: Texture) -> None:
    """The road that crosses, with its curbs and sidewalks."""
    if street.crossing is None:
        return
    near, far = street.crossing
    for side in street.sides:
        wide = side.across(side.curb, 120.0)
        stage.strip(wide, (near - 2.4, far + 2.4), Class.SIDEWALK, walk, texture)
        stage.strip(wide, (near - 0.15, far + 0.15), Class.SIDEWALK, walk, Texture.CONCRETE, 1)
        stage.strip(wide, (near, far), Class.ROAD, road, Texture.ASPHALT)


def lay_ground(stage: Stage, dice: Dice, street: Street) -> int:
    """Paint all ground in order; returns the soil palette for the frontages to use."""
    road, walk, soil = _palettes(stage, dice, street)
    texture = dice.weighted([(Texture.SLABS, 0.5), (Texture.COBBLES, 0.2), (Texture.ASPHALT, 0.3)])
    surface = Texture.COBBLES if dice.chance(0.08) else Texture.ASPHALT
    paved = dice.chance(0.25 + 0.5 * street.town)
    for side in street.sides:
        everything = side.across(side.front, 300.0)
        if paved:
            stage.strip(everything, (NEAR, 400.0), Class.SIDEWALK, walk, texture)
        else:
            stage.strip(everything, (NEAR, 400.0), Class.TERRAIN, soil, Texture.GRASS)
        stage.strip(side.across(*side.walk), (NEAR, FAR), Class.SIDEWALK, walk, texture)
        if side.verge:
            stage.strip(side.across(*side.verge), (NEAR, FAR), Class.TERRAIN, soil, Texture.GRASS)
        curb = side.across(side.curb - 0.02, side.curb + 0.15)
        stage.strip(curb, (NEAR, FAR), Class.SIDEWALK, walk, Texture.CONCRETE, 1)
    whole = (-street.left.curb, street.right.curb)
    stage.strip(whole, (NEAR, 400.0), Class.ROAD, road, surface)
    for side in street.sides:
        gutter = side.across(side.curb - 0.35, side.curb - 0.02)
        stage.strip(gutter, (NEAR, FAR), Class.ROAD, road, surface, 2)
    _cross_street(stage, street, road, walk, texture)
    _wear(stage, dice, street, road)
    if street.rails is not None:
        for offset in (-0.75, 0.75):
            x = street.rails + offset
            stage.strip((x - 0.12, x + 0.12), (NEAR, FAR), Class.ROAD, road, surface, 3)
            stage.strip((x - 0.04, x + 0.04), (NEAR, FAR), Class.ROAD, road, Texture.PLAIN, 4)
    _markings(stage, dice, street, road)
    return soil
