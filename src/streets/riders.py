"""Riders on their bicycles and motorcycles, and two-wheelers without riders."""

from . import colors
from .classes import Class
from .outfits import clothes, vehicle_palette
from .site import Site


def two_wheeler(site: Site, name: str, label: Class, x: float, z: float) -> None:
    """A bicycle or motorcycle without its rider."""
    flip = site.dice.pick((-1.0, 1.0))
    site.stage.place(
        name,
        label,
        vehicle_palette(site, colors.paint(site.dice)),
        (x, 0.0, z),
        size=(flip, 1.0, 1.0),
    )


def _ridden(site: Site, vehicle: str, rider: str, label: Class, x: float, z: float) -> None:
    """A vehicle and, just in front of it, its rider: two instances."""
    flip = site.dice.pick((-1.0, 1.0))
    size = (flip * 1.05, site.dice.between(0.98, 1.1), 1.0)
    site.stage.place(vehicle, label, vehicle_palette(site), (x, 0.0, z), size=size)
    site.stage.place(rider, Class.RIDER, clothes(site), (x, 0.0, z), size=size, depth=z - 0.01)


def cyclist(site: Site, x: float, z: float, view: str) -> None:
    """A cyclist seen from the side, the back or the front."""
    helmet = " helmet" if site.dice.chance(0.5) else ""
    bicycle = "bicycle side" if view == "side" else "bicycle end"
    _ridden(site, bicycle, f"cyclist {view}{helmet}", Class.BICYCLE, x, z)


def motorcyclist(site: Site, x: float, z: float, view: str) -> None:
    """A motorcyclist seen from the side, the back or the front."""
    _ridden(site, f"motorcycle {view}", f"motorcyclist {view}", Class.MOTORCYCLE, x, z)
