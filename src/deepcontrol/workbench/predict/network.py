"""Load the network of a run folder for inference."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.sample import Palette
from ..sizes import Size
from ..train.build import build_model
from ..train.checkpoint import find, load, load_weights
from ..train.config import load_config
from .tiling import bytes_per_pixel, round_up

# Norms with statistics of the input that tiles cannot share.
PER_TILE_NORMS = ("gn", "in", "ln", "frn", "evonorm-s0", "ws+gn")
# Norms with statistics of the input in evaluation too. The outputs depend on the crop.
CROP_DEPENDENT_NORMS = ("agc", *PER_TILE_NORMS)


@dataclass(frozen=True)
class Network:
    """A trained network and the properties that inference needs."""

    model: nn.Module  # in eval mode
    classes: tuple[str, ...]
    palette: Palette
    norm: str
    window: Size | None = None  # crop size of the training, if outputs depend on the crop

    @property
    def total_stride(self) -> int:
        """Input pixels per position of the deepest map. Tiles start at its multiples."""
        return int(self.model.total_stride)  # type: ignore[arg-type]

    @property
    def halo(self) -> int:
        """Width of the border around a tile that can affect the outputs inside."""
        return round_up(int(self.model.receptive_radius), self.total_stride)  # type: ignore[arg-type]

    @cached_property
    def bytes_per_pixel(self) -> float:
        """Peak memory of a forward pass per input pixel."""
        return bytes_per_pixel(self.model, self.total_stride)


def load_network(run: Path, checkpoint: str, device: torch.device) -> Network:
    """Load the `best` or the `last` checkpoint of a run folder, in eval mode.

    Raises:
        ValueError: The folder is not a run folder, has no such checkpoint, or has invalid classes.
    """
    config, derived = load_config(run)
    folder = find(run, checkpoint)
    try:
        classes, palette = _classes(derived)
        model = build_model(config, len(classes))
        load_weights(model, load(folder).model)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run / 'config.json'}: invalid classes and colors: {error}") from error
    trained_on_crops = derived.get("image_size", list(config.image_size)) != list(config.image_size)
    needs_window = trained_on_crops and config.norm in CROP_DEPENDENT_NORMS
    window = config.window if needs_window else None
    return Network(model.eval().to(device), classes, palette, config.norm, window)


def _classes(derived: dict[str, Any]) -> tuple[tuple[str, ...], Palette]:
    """Return the names and colors of the classes; raise KeyError or TypeError if invalid."""
    names = tuple(str(name) for name in derived["classes"])
    colors = [tuple(color) for color in derived["colors"]]
    valid = all(len(c) == 3 and all(v in range(256) for v in c) for c in colors)
    if not valid or len(colors) != len(names) or not 1 <= len(names) < 256:
        raise TypeError("expected one color of three values from 0 to 255 for each class")
    return names, tuple((int(r), int(g), int(b)) for r, g, b in colors)
