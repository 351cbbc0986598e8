"""The site: what every builder of a scene works with."""

from dataclasses import dataclass, field

from .camera import Camera
from .randomness import Dice
from .stage import Stage
from .street import Street


@dataclass
class Site:
    """Stage, dice and plan; `lamps` says whether lights are on, `leaves` are the leaf palettes."""

    stage: Stage
    dice: Dice
    street: Street
    camera: Camera
    lamps: bool
    soil: int
    leaves: list[int] = field(default_factory=list)
