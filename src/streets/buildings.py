"""The lots along the sidewalks: buildings, gardens, parks, walls and fences."""

from . import colors
from .colors import Color
from .geometry import Shape
from .roadside import bush, hedge, tree
from .street import Class, Side, Site
from .textures import FACADES, Texture

END = 150.0  # z where both sides of the street end


def line_street(site: Site) -> None:
    """Build both sides of the street, then the backdrop at its end."""
    for side in site.street.sides:
        _line_side(site, side)
    _backdrop(site)


def _line_side(site: Site, side: Side) -> None:
    """Fill one side of the street with lots, except where the cross street is."""
    dice, crossing = site.dice, site.street.crossing
    lots = dice.pick(
        (
            ((_terrace, 0.8), (_garden, 0.1), (_walled, 0.05), (_park, 0.05)),
            ((_terrace, 0.45), (_garden, 0.2), (_walled, 0.15), (_park, 0.2)),
            ((_garden, 0.55), (_terrace, 0.2), (_park, 0.15), (_walled, 0.1)),
            ((_park, 0.6), (_garden, 0.15), (_walled, 0.15), (_terrace, 0.1)),
            ((_terrace, 0.92), (_park, 0.08)),
        )
    )
    z = dice.between(1.5, 3.0)
    while z < END:
        lot = dice.weighted(lots)
        length = dice.between(9.0, 24.0) * (1.0 + z / 150.0)
        if crossing and z < crossing[1] + 2.4 and z + length > crossing[0] - 2.4:
            length = crossing[0] - 2.4 - z
            if length < 4.0:
                z = crossing[1] + 2.4
                _far_corner(site, side, z)
                continue
        lot(site, side, z, length)
        z += length


def _terrace(site: Site, side: Side, z: float, length: float) -> None:
    """Place a building at the edge of the sidewalk."""
    height = site.dice.between(6.5, 13.0 + 14.0 * site.street.town)
    _building(site, side, side.front, z, length, height)


def _garden(site: Site, side: Side, z: float, length: float) -> None:
    """Place a house set back behind a fence, hedge or low wall."""
    dice = site.dice
    setback = dice.between(3.5, 9.0)
    lawn = side.across(side.front, side.front + setback)
    site.strip(lawn, (z, z + length), Class.TERRAIN, site.soil, Texture.GRASS)
    gap = dice.between(0.0, 3.0)
    if length > 5.0 + gap and dice.chance(0.85):
        height = dice.between(4.5, 9.0)
        _building(site, side, side.front + setback, z + gap, length - gap, height)
    for _ in range(dice.below(4)):
        x = side.x(side.front + dice.between(1.2, setback))
        is_tree = dice.chance(0.5)
        at = z + dice.between(0.0, length)
        if is_tree:
            tree(site, x, at, dice.between(4.0, 10.0))
        else:
            bush(site, x, at, dice.between(1.2, 3.5), dice.between(0.8, 2.2))
    _boundary(site, side, z, length)


def _park(site: Site, side: Side, z: float, length: float) -> None:
    """Place grass, trees and bushes."""
    dice = site.dice
    lawn = side.across(side.front, side.front + 60.0)
    site.strip(lawn, (z, z + length), Class.TERRAIN, site.soil, Texture.GRASS)
    for _ in range(2 + int(length / 4.5)):
        x = side.x(side.front + dice.between(0.8, 22.0))
        tree(site, x, z + dice.between(0.0, length), dice.between(6.0, 15.0))
    for _ in range(1 + int(length / 5.0)):
        x = side.x(side.front + dice.between(0.6, 16.0))
        at = z + dice.between(0.0, length)
        bush(site, x, at, dice.between(2.0, 6.0), dice.between(1.0, 3.5))
    if dice.chance(0.45):
        _boundary(site, side, z, length)


def _walled(site: Site, side: Side, z: float, length: float) -> None:
    """Place a high wall with trees and perhaps a building behind it."""
    dice = site.dice
    _wall(site, side, z, length, dice.between(1.8, 4.0))
    for _ in range(1 + dice.below(4)):
        x = side.x(side.front + dice.between(1.5, 9.0))
        tree(site, x, z + dice.between(0.0, length), dice.between(6.0, 13.0))
    if dice.chance(0.5):
        front = side.front + dice.between(6.0, 12.0)
        _building(site, side, front, z, length, dice.between(6.0, 14.0))


def _far_corner(site: Site, side: Side, z: float) -> None:
    """Place facades that face the camera on the far side of the cross street."""
    x = side.front + site.dice.between(8.0, 14.0)
    while x < 70.0:
        width = site.dice.between(8.0, 18.0)
        if site.dice.chance(0.75):
            _facade(site, side.across(x, x + width), z, z + 0.1, site.dice.between(6.0, 16.0))
        else:
            tree(site, side.x(x + width / 2), z + 2.0, site.dice.between(6.0, 12.0))
        x += width


def _backdrop(site: Site) -> None:
    """Place distant houses and woods across the whole view."""
    dice = site.dice
    x = -150.0
    wooded = dice.chance(0.55)
    while x < 150.0:
        width = dice.between(10.0, 26.0)
        z = dice.between(155.0, 185.0)
        if dice.chance(0.65 if wooded else 0.25):
            tree(site, x, z, dice.between(9.0, 20.0))
            bush(site, x, z - 1.0, 22.0, dice.between(4.0, 9.0))
            x += 7.0
        else:
            _facade(site, (x, x + width), z, z, dice.between(7.0, 24.0))
            x += width


def _panel(
    site: Site,
    texture: Texture,
    palette: int,
    corner: tuple[float, float, float],
    size: tuple[float, float],
    depth: float,
    *,
    facing: bool = False,
    tiling: tuple[float, float, float, float] | None = None,
    label: Class = Class.BUILDING,
) -> None:
    """Place a rectangle (length, height) along the road; across to +x if `facing`."""
    length, height = size
    site.place(
        "panel",
        label,
        palette,
        corner,
        turn=(0.0, 1.0) if facing else (1.0, 0.0),
        size=(1.0, height, length),
        depth=depth,
        texture=texture,
        tiling=tiling or (length, height, 0.0, 0.0),
    )


def _facade(site: Site, across: tuple[float, float], z: float, depth: float, height: float) -> None:
    """Place a facade that faces the camera."""
    dice = site.dice
    width = across[1] - across[0]
    bays, floors = max(round(width / 3.2), 1), max(round(height / 3.1), 1)
    palette, texture = _building_palette(site), dice.pick(FACADES)
    tiling = (bays, floors, dice.below(4), dice.below(4))
    corner = (across[0], 0.0, z)
    _panel(site, texture, palette, corner, (width, height), depth, facing=True, tiling=tiling)


def _building(site: Site, side: Side, front: float, z: float, length: float, height: float) -> None:
    """Place a building: street front, near end, roof or parapet, shops or a door."""
    dice = site.dice
    palette = _building_palette(site)
    texture = dice.pick(FACADES)
    x, depth = side.x(front), z + length
    floors = max(round(height / dice.between(2.9, 3.5)), 1)
    bays = max(round(length / dice.between(2.6, 3.8)), 1)
    shift = (float(dice.below(4)), float(dice.below(4)))
    deep = dice.between(8.0, 14.0)
    end = side.across(front, front + deep)[0]
    end_texture = Texture.SPARSE if dice.chance(0.6) else texture
    if dice.chance(0.45):
        _gable_roof(site, side, palette, front, z, length, height, deep)
    else:
        corner, parapet = (side.x(front - 0.2), height - 0.1, z), (length, dice.between(0.25, 0.8))
        _panel(site, Texture.CONCRETE, palette, corner, parapet, depth - 0.02)
    end_tiling = (max(round(deep / 3.2), 1), floors, *shift)
    corner, end_size = (end, 0.0, z), (deep, height)
    _panel(site, end_texture, palette, corner, end_size, depth, facing=True, tiling=end_tiling)
    tiling = (bays, floors, *shift)
    _panel(site, texture, palette, (x, 0.0, z), (length, height), depth, tiling=tiling)
    corner = (x - side.sign * 0.05, 0.0, z)
    if dice.chance(0.25 + 0.5 * site.street.town):
        shops, size = _shop_palette(site), (length, min(3.6, height))
        shop_tiling = (max(round(length / 4.2), 1), 1.0, *shift)
        _panel(site, Texture.SHOPS, shops, corner, size, depth - 0.01, tiling=shop_tiling)
    else:
        plinth = (length, dice.between(0.4, 1.1))
        _panel(site, Texture.CONCRETE, palette, corner, plinth, depth - 0.01)
        corner = (x - side.sign * 0.06, 0.0, z + length * dice.between(0.1, 0.8))
        door = site.palette(colors.scaled(colors.cloth(dice), 0.8))
        _panel(site, Texture.CLOTH, door, corner, (1.3, 2.5), depth - 0.02)


def _gable_roof(
    site: Site,
    side: Side,
    palette: int,
    front: float,
    z: float,
    length: float,
    height: float,
    deep: float,
) -> None:
    """Place the gable, the visible slope of the roof and perhaps a chimney."""
    rise, depth = site.dice.between(1.8, 4.2), z + length
    site.place(
        "gable",
        Class.BUILDING,
        palette,
        (side.across(front, front + deep)[0], height, z),
        size=(deep, rise, 1.0),
        depth=depth + 0.02,
        texture=Texture.PLASTER,
        tiling=(deep, rise, 0.0, 0.0),
    )
    site.place(
        "slope",
        Class.BUILDING,
        site.palette(site.palettes[palette][6]),
        (side.x(front - 0.35), height - 0.15, z),
        size=(side.sign * (deep / 2 + 0.35), rise + 0.15, length),
        depth=depth + 0.03,
        texture=Texture.ROOF,
        tiling=(length, rise * 1.6, 0.0, 0.0),
    )
    if site.dice.chance(0.5):
        corner = (side.x(front) + side.sign * 2.0, height, z + length * 0.4)
        _panel(site, Texture.BRICK, palette, corner, (0.9, rise + 0.9), depth + 0.04)


def _building_palette(site: Site) -> int:
    """Add a palette: 0 wall, 1 glass, 2 frame, 3 dark, 4 lit pane, 5 trim, 6 roof."""
    dice = site.dice
    wall = colors.facade(dice)
    glass = colors.glass(dice, 0.4, 0.2, 0.6)
    frame = colors.gray(dice, 0.75, 0.95) if dice.chance(0.7) else colors.earthy(dice)
    dark = colors.scaled(colors.muted(dice), 0.5)
    lit: Color = (430.0, 340.0, 190.0) if site.lamps else colors.scaled(glass, 1.15)
    trim = colors.scaled(wall, dice.between(1.05, 1.3)) if dice.chance(0.6) else frame
    roof = colors.earthy(dice) if dice.chance(0.6) else colors.gray(dice, 0.2, 0.5)
    return site.palette(wall, glass, frame, dark, lit, trim, roof)


def _shop_palette(site: Site) -> int:
    """Add the palette of a row of shops, with the slots of a building."""
    dice = site.dice
    glass = colors.glass(dice, 0.35, 0.15, 0.5)
    sign = colors.strong(dice)
    lit: Color = (400.0, 330.0, 210.0) if site.lamps else sign
    wall, frame = colors.facade(dice), colors.gray(dice, 0.6, 0.95)
    return site.palette(wall, glass, frame, colors.cloth(dice), lit, colors.muted(dice))


def _boundary(site: Site, side: Side, z: float, length: float) -> None:
    """Place a fence, a hedge, a low wall or nothing."""
    kind = site.dice.weighted([("fence", 0.62), ("hedge", 0.2), ("wall", 0.13), ("none", 0.05)])
    if kind == "fence":
        _fence(site, side, z, length)
    elif kind == "wall":
        _wall(site, side, z, length, site.dice.between(0.7, 1.6))
    elif kind == "hedge":
        hedge(site, side, z, length)


def _fence(site: Site, side: Side, z: float, length: float) -> None:
    """Place railings, pickets or wire mesh, in pieces for the sorting by depth."""
    dice = site.dice
    texture = dice.pick((Texture.RAILINGS, Texture.PICKETS, Texture.MESH))
    palette = site.palette(colors.paint(dice) if dice.chance(0.6) else colors.earthy(dice))
    height = 2.0 if texture == Texture.MESH else dice.between(1.0, 1.9)
    rows = 2.0 if texture == Texture.MESH else 1.0
    at = z
    while at < z + length - 0.1:
        piece = min(6.0, z + length - at)
        corner, size = (side.x(side.front + 0.1), 0.0, at), (piece, height)
        tiling = (piece, rows, 0.0, 0.0)
        _panel(site, texture, palette, corner, size, at + piece, label=Class.FENCE, tiling=tiling)
        at += piece


def _wall(site: Site, side: Side, z: float, length: float, height: float) -> None:
    """Place a wall with a coping, in pieces for the sorting by depth."""
    dice = site.dice
    texture = dice.pick((Texture.BRICK, Texture.CONCRETE, Texture.PLASTER, Texture.COBBLES))
    color = colors.facade(dice)
    palette = site.palette(color)
    coping = site.palette(colors.scaled(color, dice.between(0.8, 1.25)))
    x = side.x(side.front + 0.1)
    at = z
    while at < z + length - 0.1:
        piece = min(7.0, z + length - at)
        depth, size = at + piece, (piece, height)
        _panel(site, texture, palette, (x, 0.0, at), size, depth, label=Class.WALL)
        corner, size = (x - side.sign * 0.06, height - 0.05, at), (piece, 0.16)
        _panel(site, Texture.CONCRETE, coping, corner, size, depth - 0.01, label=Class.WALL)
        at += piece
    corner = (side.across(side.front + 0.1, side.front + 0.45)[0], 0.0, z)
    _panel(site, texture, palette, corner, (0.35, height), z, facing=True, label=Class.WALL)


def _unit_panel(top: float) -> Shape:
    """Build a unit square along the road, its top edge moved sideways by `top`."""
    shape = Shape()
    shape.face(
        [(0.0, 0.0, 0.0), (0.0, 0.0, 1.0), (top, 1.0, 1.0), (top, 1.0, 0.0)],
        0,
        two_sided=True,
        casts=True,
        coordinates=[(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)],
    )
    return shape


def shapes() -> dict[str, Shape]:
    """Return the unit shapes by name."""
    gable = Shape()
    gable.flat([(0.0, 0.0), (1.0, 0.0), (0.5, 1.0)], 0)
    return {"panel": _unit_panel(0.0), "slope": _unit_panel(1.0), "gable": gable}
