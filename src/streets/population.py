"""Everything that stands or moves on the ground, put on the stage in no particular order.

Painting order comes from depth alone.
"""

from .frontage import build
from .pedestrians import crossing_people, pedestrians
from .plants import leaf_palette
from .roadside import lamps, signs, traffic_lights, trees
from .site import Site
from .vehicles import bonnet, cross_traffic, lanes, parked

SPECIES = 4


def populate(site: Site) -> None:
    """Fill the site: frontages first, then traffic, people and furniture."""
    site.leaves.extend(leaf_palette(site) for _ in range(SPECIES))
    build(site)
    lanes(site)
    cross_traffic(site)
    for side in site.street.sides:
        parked(site, side)
        pedestrians(site, side)
        trees(site, side)
        lamps(site, side)
        signs(site, side)
    traffic_lights(site)
    crossing_people(site)
    bonnet(site)
