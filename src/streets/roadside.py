"""Plants (trees, bushes, hedges), lamps, poles, signs and traffic lights.

Palette slots of plants: 0 leaves, 1 bark. Slots of signs: 0 face, 1 border, 2 symbol. Slots of
traffic lights: 0 case, 1 red, 2 amber, 3 green, 4 visor.
"""

from . import colors
from .colors import Color
from .geometry import Shape, bar, ellipse, rectangle
from .street import Class, Side, Site
from .textures import Texture

LEAF, BARK = range(2)
FACE, BORDER, SYMBOL = range(3)
CASE, RED, AMBER, GREEN, VISOR = range(5)

TREES = ("tree round", "tree broad", "tree tall", "tree twin")
SIGNS = ("disc", "triangle", "octagon", "diamond", "square", "board", "yield")


def choose_species(site: Site) -> None:
    """Add the leaf palettes of four species."""
    dice = site.dice
    for _ in range(4):
        leaf = colors.leafy(dice, site.street.season)
        bark = colors.hsv(dice.between(0.04, 0.1), 0.3, dice.between(0.18, 0.45))
        site.leaves.append(site.palette(leaf, bark))


def tree(site: Site, x: float, z: float, height: float) -> None:
    """Place a tree of a random species; in autumn many are bare."""
    dice = site.dice
    name: str = dice.pick(TREES)
    if site.street.season > 0.8 and dice.chance(0.6):
        name = "tree bare"
    elif dice.chance(0.1):
        name = "conifer"
    scale = height / 10.0
    size = (scale * dice.between(0.85, 1.35) * dice.pick((-1.0, 1.0)), scale, 1.0)
    site.place(name, Class.VEGETATION, dice.pick(site.leaves), (x, 0.0, z), size=size)


def bush(site: Site, x: float, z: float, width: float, height: float) -> None:
    """Place a bush or a clump of shrubs."""
    name, palette = site.dice.pick(("bush", "bush", "shrub")), site.dice.pick(site.leaves)
    site.place(name, Class.VEGETATION, palette, (x, -0.1, z), size=(width, height, 1.0))


def hedge(site: Site, side: Side, z: float, length: float) -> None:
    """Place a clipped hedge along the sidewalk, in pieces for the sorting by depth."""
    dice = site.dice
    palette, height = dice.pick(site.leaves), dice.between(0.8, 2.0)
    at = z
    while at < z + length - 0.5:
        piece = min(5.0, z + length - at)
        site.place(
            "hedge",
            Class.VEGETATION,
            palette,
            (side.x(side.front + 0.6), 0.0, at),
            size=(1.0, height * dice.between(0.94, 1.06), piece),
            depth=at + piece,
            tiling=(piece, height, 0.0, 0.0),
        )
        at += piece


def street_trees(site: Site, side: Side) -> None:
    """Place a row of trees in the verge or on the sidewalk."""
    dice = site.dice
    if not dice.chance(0.85 if side.verge else 0.4):
        return
    x = (side.verge[0] + side.verge[1]) / 2 if side.verge else side.walk[0] + 0.5
    height, spacing = dice.between(5.0, 13.0), dice.between(7.0, 14.0)
    z = dice.between(4.0, 14.0)
    while z < 110.0:
        if dice.chance(0.85) and site.street.open_at(z - 3.0, z + 3.0):
            tree(site, side.x(x), z, height * dice.between(0.85, 1.15))
        z += spacing


def street_lamps(site: Site, side: Side) -> None:
    """Place street lamps and sometimes a row of bollards."""
    dice = site.dice
    metal = colors.gray(dice, 0.2, 0.65, 0.2)
    palette = site.palette(metal, colors.scaled(metal, 0.75))
    x = side.x(side.curb + 0.45)
    if dice.chance(0.75):
        z, spacing = dice.between(6.0, 26.0), dice.between(18.0, 32.0)
        while z < 110.0:
            name = "lamp left" if side.sign > 0 else "lamp right"
            size = (1.0, dice.between(0.9, 0.95), 1.0)
            site.place(name, Class.POLE, palette, (x, 0.0, z), size=size)
            z += spacing
    if dice.chance(0.25):
        z = dice.between(5.0, 12.0)
        for _ in range(4 + dice.below(8)):
            _pole(site, side.x(side.curb + 0.3), z, 0.95, 0.13)
            z += 1.6


def signs(site: Site, side: Side) -> None:
    """Place poles with one or two signs each."""
    dice = site.dice
    for _ in range(dice.below(4)):
        x, z = side.x(side.curb + dice.between(0.25, 0.8)), dice.between(7.0, 45.0)
        kind = dice.pick(SIGNS)
        height = dice.between(2.1, 2.7)
        _pole(site, x, z, height + 0.2, 0.09)
        _sign(site, kind, x, height, z)
        if dice.chance(0.3):
            _sign(site, "square", x, height - 0.75, z)


def traffic_lights(site: Site) -> None:
    """Place traffic lights at a crossing, some of them on an arm over the road."""
    dice, street = site.dice, site.street
    place = street.crossing or street.crosswalk
    if place is None or not dice.chance(0.75):
        if not dice.chance(0.15):
            return
        place = (dice.between(14.0, 40.0), 50.0)
    lit = dice.below(3)
    for z in (place[0] - 1.5, place[1] + 1.5):
        if z < 6.0:
            continue
        for side in street.sides:
            x = side.x(side.curb + 0.5)
            _pole(site, x, z, 3.6, 0.14)
            _light(site, x, 2.5, z, lit)
            if side.sign > 0 and dice.chance(0.4):
                metal = colors.gray(dice, 0.25, 0.6)
                palette = site.palette(metal, colors.scaled(metal, 0.8))
                _pole(site, x, z, 6.2, 0.18)
                reach = dice.between(2.5, 4.5)
                arm, size = (x - reach / 2, 6.0, z), (reach, 0.14, 1.0)
                site.place("post", Class.POLE, palette, arm, size=size, depth=z + 0.01)
                _light(site, x - reach, 5.3, z, lit)


def _pole(site: Site, x: float, z: float, height: float, width: float) -> None:
    metal = colors.gray(site.dice, 0.2, 0.72, 0.15)
    palette, size = site.palette(metal, colors.scaled(metal, 0.7)), (width, height, 1.0)
    site.place("post", Class.POLE, palette, (x, 0.0, z), size=size, depth=z + 0.02)


def _sign(site: Site, kind: str, x: float, y: float, z: float) -> None:
    """Place the face of a sign in one of seven color schemes."""
    dice = site.dice
    red, blue = colors.hsv(0.99, 0.85, 0.75), colors.hsv(0.6, 0.8, 0.65)
    white, yellow = colors.gray(dice, 0.8, 0.95), colors.hsv(0.13, 0.8, 0.9)
    dark = colors.gray(dice, 0.1, 0.2)
    scheme = dice.pick(
        (
            (white, red, dark),
            (blue, white, white),
            (red, white, white),
            (yellow, dark, dark),
            (white, dark, dark),
            (colors.muted(dice), white, dark),
            (colors.hsv(0.4, 0.6, 0.45), white, white),
        )
    )
    scale = dice.between(0.85, 1.2)
    palette, size = site.palette(*scheme), (scale, scale, 1.0)
    site.place(f"sign {kind}", Class.TRAFFIC_SIGN, palette, (x, y, z), size=size, depth=z - 0.02)


def _light(site: Site, x: float, y: float, z: float, lit: int) -> None:
    """Place a signal head with one lamp lit: 0 red, 1 amber, 2 green."""
    dice = site.dice
    case = colors.gray(dice, 0.1, 0.3) if dice.chance(0.7) else colors.hsv(0.13, 0.8, 0.75)
    lamps: list[Color] = [(70.0, 16.0, 16.0), (75.0, 55.0, 12.0), (14.0, 60.0, 40.0)]
    lamps[lit] = ((460.0, 60.0, 45.0), (460.0, 300.0, 40.0), (60.0, 420.0, 260.0))[lit]
    palette = site.palette(case, *lamps, colors.scaled(case, 0.6))
    site.place("light", Class.TRAFFIC_LIGHT, palette, (x, y, z), depth=z - 0.02)


def _post_shape() -> Shape:
    """Build a unit post, darker on its left."""
    shape = Shape()
    shape.flat(rectangle(-0.5, 0.5, 0.0, 1.0), 0)
    shape.flat(rectangle(-0.5, -0.5 / 3, 0.0, 1.0), 1)
    return shape


def _lamp_shape(reach: float) -> Shape:
    """Build a street lamp with an arm over the road."""
    shape = Shape()
    shape.flat(bar((0.0, 0.0), 0.2, (0.0, 7.6), 0.12), 0)
    shape.flat(rectangle(-0.14, 0.14, 0.0, 0.9), 1)
    shape.flat(bar((0.0, 7.55), 0.09, (reach, 8.0), 0.07), 0)
    shape.flat([(reach - 0.1, 7.92), (reach + 0.6, 7.98), (reach + 0.5, 8.12), (reach, 8.1)], 1)
    return shape


def _light_shape() -> Shape:
    """Build a signal head, 0.95 m tall."""
    shape = Shape()
    shape.flat(rectangle(-0.17, 0.17, 0.0, 0.95), CASE)
    shape.flat(rectangle(-0.15, 0.15, 0.02, 0.93), VISOR)
    for slot, y in ((RED, 0.78), (AMBER, 0.48), (GREEN, 0.18)):
        shape.flat(ellipse(0.0, y, 0.115, 0.115, 10), slot, casts=False)
    return shape


def _sign_shape(kind: str) -> Shape:
    """Build the face of a sign, about 0.7 m across and centered at y = 0."""
    outline = {
        "disc": ellipse(0.0, 0.0, 0.34, 0.34, 14),
        "triangle": [(-0.42, -0.3), (0.42, -0.3), (0.0, 0.42)],
        "octagon": ellipse(0.0, 0.0, 0.4, 0.4, 8),
        "diamond": [(-0.42, 0.0), (0.0, -0.42), (0.42, 0.0), (0.0, 0.42)],
        "square": rectangle(-0.34, 0.34, -0.34, 0.34),
        "board": rectangle(-0.75, 0.75, -0.4, 0.4),
        "yield": [(-0.42, 0.34), (0.0, -0.38), (0.42, 0.34)],
    }[kind]
    symbol = {
        "disc": rectangle(-0.2, 0.2, -0.06, 0.06),
        "triangle": rectangle(-0.05, 0.05, -0.18, 0.12),
        "octagon": rectangle(-0.24, 0.24, -0.08, 0.08),
        "diamond": [(-0.2, 0.0), (0.0, -0.2), (0.2, 0.0), (0.0, 0.2)],
        "square": bar((-0.1, -0.2), 0.1, (0.12, 0.2), 0.1),
        "board": rectangle(-0.55, 0.3, 0.08, 0.18),
        "yield": rectangle(-0.04, 0.04, -0.05, 0.12),
    }[kind]
    shape = Shape()
    shape.flat(outline, BORDER)
    shape.flat([(x * 0.78, y * 0.78) for x, y in outline], FACE)
    shape.flat(symbol, SYMBOL)
    if kind == "board":
        shape.flat(rectangle(-0.55, 0.5, -0.2, -0.1), SYMBOL)
    return shape


def _tree_shape(fork: float, *crowns: tuple[Texture, float, float, float, float]) -> Shape:
    """Build a 10 m tree: trunk, boughs, and crown sprites (left, right, low, high)."""
    shape = Shape()
    shape.flat(bar((0.0, -0.05), 0.5, (0.0, fork), 0.32), BARK, Texture.BARK)
    shape.flat(bar((0.0, fork - 0.3), 0.26, (-1.1, fork + 2.4), 0.1), BARK, Texture.BARK)
    shape.flat(bar((0.0, fork - 0.2), 0.26, (1.0, fork + 2.2), 0.1), BARK, Texture.BARK)
    shape.flat(bar((0.0, fork - 0.2), 0.3, (0.1, fork + 4.0), 0.1), BARK, Texture.BARK)
    for texture, left, right, low, high in crowns:
        slot = BARK if texture == Texture.BARE else LEAF
        shape.sprite(texture, left, right, low, high, slot)
    return shape


def _bush_shape(texture: Texture) -> Shape:
    """Build a unit sprite on the ground."""
    shape = Shape()
    shape.sprite(texture, -0.5, 0.5, 0.0, 1.0)
    return shape


def _hedge_shape() -> Shape:
    """Build a unit box on the ground."""
    shape = Shape()
    side = [(0.0, 0.0, 0.5), (0.0, 1.0, 0.5), (1.0, 1.0, 0.5), (1.0, 0.0, 0.5)]
    shape.loft(side, 0, Texture.HEDGE)
    return shape


def shapes() -> dict[str, Shape]:
    """Return the shapes by name."""
    round_, wide, tall = Texture.CROWN, Texture.CROWN_WIDE, Texture.CROWN_TALL
    broad = ((wide, -4.6, 2.6, 3.2, 9.0), (round_, -2.4, 4.4, 3.6, 10.0))
    twin = ((round_, -4.2, 2.2, 3.2, 8.8), (tall, -1.8, 3.8, 2.8, 10.2))
    named = {
        "post": _post_shape(),
        "lamp left": _lamp_shape(-1.8),
        "lamp right": _lamp_shape(1.8),
        "light": _light_shape(),
        "tree round": _tree_shape(3.2, (round_, -3.6, 3.6, 2.8, 10.0)),
        "tree broad": _tree_shape(3.0, *broad),
        "tree tall": _tree_shape(2.6, (tall, -2.6, 2.6, 2.4, 10.0)),
        "tree twin": _tree_shape(3.0, *twin),
        "tree bare": _tree_shape(3.4, (Texture.BARE, -3.4, 3.4, 2.4, 10.0)),
        "conifer": _tree_shape(1.0, (Texture.CONIFER, -2.6, 2.6, 0.6, 10.0)),
        "bush": _bush_shape(Texture.BUSH),
        "shrub": _bush_shape(Texture.CROWN_WIDE),
        "hedge": _hedge_shape(),
    }
    return named | {f"sign {kind}": _sign_shape(kind) for kind in SIGNS}
