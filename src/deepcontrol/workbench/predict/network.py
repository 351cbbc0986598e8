"""The network of a run folder, as predictions need it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.sample import Palette
from ..sizes import Size
from ..train.build import build_model
from ..train.checkpoint import find, load
from ..train.config import load_config
from ..train.saving import load_weights
from .memory import bytes_per_pixel
from .tiles import up_to_multiple

# Norms whose statistics are of the map that they see: a tile's, where there are tiles.
OF_THE_TILE = ("gn", "in", "frn")
OF_WHAT_IS_SEEN = ("agc", *OF_THE_TILE)


@dataclass(frozen=True)
class Network:
    model: nn.Module  # in evaluation mode
    classes: tuple[str, ...]
    palette: Palette
    norm: str
    window: Size | None = None  # to be used in, if it was trained on crops and has their statistics

    @property
    def unit(self) -> int:
        """Tiles begin on multiples of so many pixels."""
        return int(self.model.unit)  # type: ignore[arg-type]

    @property
    def halo(self) -> int:
        """The pixels around a tile that can change what is in it."""
        return up_to_multiple(int(self.model.reach), self.unit)  # type: ignore[arg-type]

    @cached_property
    def bytes_per_pixel(self) -> float:
        """Of memory, while it labels an image."""
        return bytes_per_pixel(self.model, self.unit)


def load_network(run: Path, checkpoint: str, device: torch.device) -> Network:
    """The network that a run has trained: its `best` so far, or its `last`."""
    config, derived = load_config(run)
    folder = find(run, checkpoint)
    try:
        classes, palette = _classes(derived)
        model = build_model(config, len(classes))
        load_weights(model, load(folder).model)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run / 'config.json'}: classes and colors: {error}") from error
    saw_crops = derived.get("image_size", list(config.size)) != list(config.size)
    window = config.window if saw_crops and config.norm in OF_WHAT_IS_SEEN else None
    return Network(model.eval().to(device), classes, palette, config.norm, window)


def _classes(derived: dict[str, Any]) -> tuple[tuple[str, ...], Palette]:
    """The classes' names and colors; whatever else stands there is refused."""
    names = tuple(str(name) for name in derived["classes"])
    colors = [tuple(color) for color in derived["colours"]]
    sound = all(len(c) == 3 and all(v in range(256) for v in c) for c in colors)
    if not sound or len(colors) != len(names) or not 1 <= len(names) < 256:
        raise TypeError("expected a color of three values from 0 to 255 for each class")
    return names, tuple((int(r), int(g), int(b)) for r, g, b in colors)
