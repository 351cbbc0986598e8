"""Buildings: facades with their shops, doors, plinths, cornices and roofs."""

from . import colors
from .classes import Class
from .site import Site
from .stage import Color
from .street import Side
from .texture import FACADES, Texture


def _building_palette(site: Site) -> int:
    """0 wall, 1 glass, 2 frame, 3 dark, 4 lit or awning, 5 trim, 6 roof, 7 plinth."""
    dice = site.dice
    wall = colors.facade(dice)
    glass = colors.hsv(dice.between(0.5, 0.65), dice.between(0.05, 0.4), dice.between(0.2, 0.6))
    frame = colors.gray(dice, 0.75, 0.95) if dice.chance(0.7) else colors.earthy(dice)
    dark = colors.darker(colors.muted(dice), 0.5)
    lit: Color = (430.0, 340.0, 190.0) if site.lamps else colors.darker(glass, 1.15)
    trim = colors.darker(wall, dice.between(1.05, 1.3)) if dice.chance(0.6) else frame
    roof = colors.earthy(dice) if dice.chance(0.6) else colors.gray(dice, 0.2, 0.5)
    return site.stage.palette(wall, glass, frame, dark, lit, trim, roof, colors.darker(wall, 0.7))


def _shop_palette(site: Site) -> int:
    """Colors of one row of shops."""
    dice = site.dice
    glass = colors.hsv(dice.between(0.5, 0.65), dice.between(0.05, 0.35), dice.between(0.15, 0.5))
    sign = colors.strong(dice)
    wares: Color = (400.0, 330.0, 210.0) if site.lamps else sign
    return site.stage.palette(
        colors.facade(dice),
        glass,
        colors.gray(dice, 0.6, 0.95),
        colors.cloth(dice),
        wares,
        colors.muted(dice),
    )


def _roof_palette(site: Site, palette: int) -> int:
    """The roof color of a building's palette."""
    return site.stage.palette(site.stage.palettes[palette][6])


def _door_palette(site: Site) -> int:
    """The color of one front door."""
    return site.stage.palette(colors.darker(colors.cloth(site.dice), 0.8))


def panel(
    site: Site,
    corner: tuple[float, float, float],
    length: float,
    height: float,
    palette: int,
    texture: Texture,
    *,
    depth: float,
    facing: bool = False,
    tiling: tuple[float, float, float, float] | None = None,
    label: Class = Class.BUILDING,
    name: str = "panel",
    lean: float = 1.0,
) -> None:
    """A rectangle along the road from `corner`, or across it (toward +x) if `facing`."""
    site.stage.place(
        name,
        label,
        palette,
        corner,
        turn=(0.0, 1.0) if facing else (1.0, 0.0),
        size=(lean, height, length),
        depth=depth,
        texture=texture,
        tiling=tiling or (length, height, 0.0, 0.0),
    )


def face(site: Site, across: tuple[float, float], z: float, depth: float, height: float) -> None:
    """A facade that faces the camera."""
    dice = site.dice
    width = across[1] - across[0]
    bays, floors = max(round(width / 3.2), 1), max(round(height / 3.1), 1)
    panel(
        site,
        (across[0], 0.0, z),
        width,
        height,
        _building_palette(site),
        dice.pick(FACADES),
        depth=depth,
        facing=True,
        tiling=(bays, floors, dice.below(4), dice.below(4)),
    )


def block(site: Site, side: Side, front: float, z: float, length: float, height: float) -> None:
    """One building: street front, near end, shop or plinth, cornice, perhaps a roof."""
    dice = site.dice
    palette = _building_palette(site)
    texture = dice.pick(FACADES)
    x, depth = side.x(front), z + length
    story = dice.between(2.9, 3.5)
    floors = max(round(height / story), 1)
    bays = max(round(length / dice.between(2.6, 3.8)), 1)
    shift = (float(dice.below(4)), float(dice.below(4)))
    deep = dice.between(8.0, 14.0)
    end = side.across(front, front + deep)
    end_texture = Texture.SPARSE if dice.chance(0.6) else texture
    if dice.chance(0.45):
        rise = dice.between(1.8, 4.2)
        eaves, ridge = side.x(front - 0.35), side.sign * (deep / 2 + 0.35)
        site.stage.place(
            "gable",
            Class.BUILDING,
            palette,
            (end[0], height, z),
            size=(deep, rise, 1.0),
            depth=depth + 0.02,
            texture=Texture.PLASTER,
            tiling=(deep, rise, 0.0, 0.0),
        )
        site.stage.place(
            "slope",
            Class.BUILDING,
            _roof_palette(site, palette),
            (eaves, height - 0.15, z),
            size=(ridge, rise + 0.15, length),
            depth=depth + 0.03,
            texture=Texture.ROOF,
            tiling=(length, rise * 1.6, 0.0, 0.0),
        )
        if dice.chance(0.5):
            panel(
                site,
                (x + side.sign * 2.0, height, z + length * 0.4),
                0.9,
                rise + 0.9,
                palette,
                Texture.BRICK,
                depth=depth + 0.04,
            )
    else:
        panel(
            site,
            (side.x(front - 0.2), height - 0.1, z),
            length,
            dice.between(0.25, 0.8),
            palette,
            Texture.CONCRETE,
            depth=depth - 0.02,
        )
    panel(
        site,
        (end[0], 0.0, z),
        deep,
        height,
        palette,
        end_texture,
        depth=depth,
        facing=True,
        tiling=(max(round(deep / 3.2), 1), floors, *shift),
    )
    panel(
        site,
        (x, 0.0, z),
        length,
        height,
        palette,
        texture,
        depth=depth,
        tiling=(bays, floors, *shift),
    )
    if dice.chance(0.25 + 0.5 * site.street.town):
        panel(
            site,
            (x - side.sign * 0.05, 0.0, z),
            length,
            min(3.6, height),
            _shop_palette(site),
            Texture.SHOPS,
            depth=depth - 0.01,
            tiling=(max(round(length / 4.2), 1), 1.0, shift[0], shift[1]),
        )
    else:
        panel(
            site,
            (x - side.sign * 0.05, 0.0, z),
            length,
            dice.between(0.4, 1.1),
            palette,
            Texture.CONCRETE,
            depth=depth - 0.01,
        )
        door = z + length * dice.between(0.1, 0.8)
        panel(
            site,
            (x - side.sign * 0.06, 0.0, door),
            1.3,
            2.5,
            _door_palette(site),
            Texture.CLOTH,
            depth=depth - 0.02,
        )
