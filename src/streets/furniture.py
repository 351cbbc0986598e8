"""Street furniture and plants: poles, lamps, traffic lights, signs, trees, and bare panels.

Slots of trees: 0 leaves, 1 bark. Slots of signs: 0 face, 1 border, 2 symbol, 3 post.
Slots of traffic lights: 0 case, 1 red, 2 amber, 3 green, 4 visor.
"""

from .shape import Point2, Shape, limb, ring
from .texture import Texture

FACE, BORDER, SYMBOL, POST = range(4)
CASE, RED, AMBER, GREEN, VISOR = range(5)
LEAF, BARK = range(2)

SIGN_SHAPES = ("disc", "triangle", "octagon", "diamond", "square", "board", "yield")


def _bar(x0: float, x1: float, y0: float, y1: float) -> list[Point2]:
    return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]


def _post(height: float, width: float) -> Shape:
    """A unit post, darker on its left."""
    shape = Shape()
    half = width / 2
    shape.flat(_bar(-half, half, 0.0, height), 0)
    shape.flat(_bar(-half, -half / 3, 0.0, height), 1)
    return shape


def _lamp(reach: float) -> Shape:
    """A street lamp whose arm reaches over the road."""
    shape = Shape()
    shape.flat(limb((0.0, 0.0), 0.2, (0.0, 7.6), 0.12), 0)
    shape.flat(_bar(-0.14, 0.14, 0.0, 0.9), 1)
    shape.flat(limb((0.0, 7.55), 0.09, (reach, 8.0), 0.07), 0)
    shape.flat([(reach - 0.1, 7.92), (reach + 0.6, 7.98), (reach + 0.5, 8.12), (reach, 8.1)], 1)
    return shape


def _light() -> Shape:
    """A signal head, 0.95 m tall."""
    shape = Shape()
    shape.flat(_bar(-0.17, 0.17, 0.0, 0.95), CASE)
    shape.flat(_bar(-0.15, 0.15, 0.02, 0.93), VISOR)
    for slot, y in ((RED, 0.78), (AMBER, 0.48), (GREEN, 0.18)):
        shape.flat(ring(0.0, y, 0.115, 0.115, 10), slot, casts=False)
    return shape


def _sign(kind: str) -> Shape:
    """A sign face about 0.7 m across, its center at y = 0."""
    outline = {
        "disc": ring(0.0, 0.0, 0.34, 0.34, 14),
        "triangle": [(-0.42, -0.3), (0.42, -0.3), (0.0, 0.42)],
        "octagon": ring(0.0, 0.0, 0.4, 0.4, 8),
        "diamond": [(-0.42, 0.0), (0.0, -0.42), (0.42, 0.0), (0.0, 0.42)],
        "square": _bar(-0.34, 0.34, -0.34, 0.34),
        "board": _bar(-0.75, 0.75, -0.4, 0.4),
        "yield": [(-0.42, 0.34), (0.0, -0.38), (0.42, 0.34)],
    }[kind]
    shape = Shape()
    shape.flat(outline, BORDER)
    shape.flat([(x * 0.78, y * 0.78) for x, y in outline], FACE)
    symbol = {
        "disc": _bar(-0.2, 0.2, -0.06, 0.06),
        "triangle": _bar(-0.05, 0.05, -0.18, 0.12),
        "octagon": _bar(-0.24, 0.24, -0.08, 0.08),
        "diamond": [(-0.2, 0.0), (0.0, -0.2), (0.2, 0.0), (0.0, 0.2)],
        "square": limb((-0.1, -0.2), 0.1, (0.12, 0.2), 0.1),
        "board": _bar(-0.55, 0.3, 0.08, 0.18),
        "yield": _bar(-0.04, 0.04, -0.05, 0.12),
    }[kind]
    shape.flat(symbol, SYMBOL)
    if kind == "board":
        shape.flat(_bar(-0.55, 0.5, -0.2, -0.1), SYMBOL)
    return shape


def _tree(crowns: list[tuple[Texture, float, float, float, float]], fork: float) -> Shape:
    """A tree 10 m tall: trunk, two boughs, then crown sprites (left, right, low, high)."""
    shape = Shape()
    shape.flat(limb((0.0, -0.05), 0.5, (0.0, fork), 0.32), BARK, Texture.BARK)
    shape.flat(limb((0.0, fork - 0.3), 0.26, (-1.1, fork + 2.4), 0.1), BARK, Texture.BARK)
    shape.flat(limb((0.0, fork - 0.2), 0.26, (1.0, fork + 2.2), 0.1), BARK, Texture.BARK)
    shape.flat(limb((0.0, fork - 0.2), 0.3, (0.1, fork + 4.0), 0.1), BARK, Texture.BARK)
    for texture, left, right, low, high in crowns:
        shape.sprite(texture, left, right, low, high, BARK if texture == Texture.BARE else LEAF)
    return shape


def _bush(texture: Texture) -> Shape:
    """A unit sprite on the ground."""
    shape = Shape()
    shape.sprite(texture, -0.5, 0.5, 0.0, 1.0)
    return shape


def _box() -> Shape:
    """A unit box on the ground, one texture unit for each meter once scaled."""
    shape = Shape()
    shape.loft(
        [(0.0, 0.0, 0.5), (0.0, 1.0, 0.5), (1.0, 1.0, 0.5), (1.0, 0.0, 0.5)], 0, Texture.HEDGE
    )
    return shape


def _panel(top: float) -> Shape:
    """A unit square standing along the road, its top edge moved sideways by `top`."""
    shape = Shape()
    shape.face(
        [(0.0, 0.0, 0.0), (0.0, 0.0, 1.0), (top, 1.0, 1.0), (top, 1.0, 0.0)],
        0,
        Texture.PLAIN,
        two_sided=True,
        casts=True,
        coordinates=[(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)],
    )
    return shape


def _gable() -> Shape:
    """A unit triangle facing along the road."""
    shape = Shape()
    shape.face(
        [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.5, 1.0, 0.0)],
        0,
        Texture.PLAIN,
        two_sided=True,
        casts=True,
        coordinates=[(0.0, 0.0), (1.0, 0.0), (0.5, 1.0)],
    )
    return shape


TREES = ("tree round", "tree broad", "tree tall", "tree twin")


def shapes() -> dict[str, Shape]:
    """Everything by name; panels and boxes are units to be scaled."""
    named = {
        "post": _post(1.0, 1.0),
        "lamp left": _lamp(-1.8),
        "lamp right": _lamp(1.8),
        "light": _light(),
        "tree round": _tree([(Texture.CROWN, -3.6, 3.6, 2.8, 10.0)], 3.2),
        "tree broad": _tree(
            [(Texture.CROWN_WIDE, -4.6, 2.6, 3.2, 9.0), (Texture.CROWN, -2.4, 4.4, 3.6, 10.0)], 3.0
        ),
        "tree tall": _tree([(Texture.CROWN_TALL, -2.6, 2.6, 2.4, 10.0)], 2.6),
        "tree twin": _tree(
            [(Texture.CROWN, -4.2, 2.2, 3.2, 8.8), (Texture.CROWN_TALL, -1.8, 3.8, 2.8, 10.2)], 3.0
        ),
        "tree bare": _tree([(Texture.BARE, -3.4, 3.4, 2.4, 10.0)], 3.4),
        "conifer": _tree([(Texture.CONIFER, -2.6, 2.6, 0.6, 10.0)], 1.0),
        "bush": _bush(Texture.BUSH),
        "shrub": _bush(Texture.CROWN_WIDE),
        "box": _box(),
        "panel": _panel(0.0),
        "slope": _panel(1.0),
        "gable": _gable(),
    }
    named.update({f"sign {kind}": _sign(kind) for kind in SIGN_SHAPES})
    return named
