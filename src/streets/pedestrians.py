"""People on foot, on the sidewalks and on crossings; bicycles and motorcycles left there."""

from .classes import Class
from .outfits import clothes
from .people import BACKS, FRONTS, WALKERS
from .riders import two_wheeler
from .site import Site
from .street import Side


def _person(site: Site, x: float, z: float) -> None:
    """One pedestrian, now and then a child."""
    dice = site.dice
    name = dice.pick(dice.pick((WALKERS, WALKERS, FRONTS, BACKS)))
    tall = dice.between(0.9, 1.08) * (0.65 if dice.chance(0.08) else 1.0)
    width = tall * dice.between(0.95, 1.25) * dice.pick((-1.0, 1.0))
    site.stage.place(name, Class.PERSON, clothes(site), (x, 0.0, z), size=(width, tall, 1.0))


def pedestrians(site: Site, side: Side) -> None:
    """Groups on the sidewalk, and sometimes a stand of bicycles or motorcycles."""
    dice = site.dice
    inner, outer = side.walk[0] + 0.3, side.walk[1] - 0.2
    for _ in range(1 + dice.below(4 + int(5 * site.street.town))):
        near = dice.unit()
        x, z = dice.between(inner, outer), 6.0 + 42.0 * near * near
        for _ in range(1 + dice.below(3)):
            _person(site, side.x(x), z)
            x, z = x + dice.bell(0.0, 0.4), z + dice.between(0.1, 0.8)
    if dice.chance(0.3):
        x, z = dice.between(inner, outer), dice.between(6.0, 18.0)
        name = dice.pick(("bicycle side", "bicycle side", "motorcycle side"))
        label = Class.BICYCLE if name == "bicycle side" else Class.MOTORCYCLE
        for _ in range(2 + dice.below(6)):
            two_wheeler(site, name, label, side.x(x), z)
            z += dice.between(0.5, 0.9)


def crossing_people(site: Site) -> None:
    """Pedestrians on the zebra crossing."""
    zebra = site.street.zebra
    if zebra is None:
        return
    for _ in range(site.dice.below(5)):
        x = site.dice.between(-site.street.left.curb, site.street.right.curb)
        _person(site, x, site.dice.between(max(zebra[0], 5.0), max(zebra[1], 6.0)))
