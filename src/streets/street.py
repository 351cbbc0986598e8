"""The street itself: its random plan and its ground."""

from . import colors
from .randomness import Dice
from .site import Class, Side, Site, Span, Street
from .textures import Texture

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
