"""What layers.jsonl says, as arrays of layers by epochs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..runfolder import Run, finite_number

Values = NDArray[np.float64]

STATISTICS = ("mean", "min", "max", "q05", "q25", "q50", "q75", "q95")
DULL = ("convolutions", "layers")  # parts of a layer's name that say nothing


@dataclass(frozen=True)
class Track:
    """One parameter of all layers through a run: statistics over a layer's filters."""

    names: list[str]  # of the layers that have it, in forward order
    epochs: list[int]
    values: dict[str, Values]  # by statistic: (layers, epochs), NaN where nothing stands

    @property
    def mean(self) -> Values:
        return self.values["mean"]


def track(run: Run, parameter: str) -> Track | None:
    """mean_scale, gain or bias of all layers that have one; None if none has."""
    names = _names(run, parameter)
    if not names:
        return None
    values = {statistic: _table(run, names, (parameter, statistic)) for statistic in STATISTICS}
    return Track(names, [row["epoch"] for row in run.layers], values)


def track_open(run: Run) -> Track | None:
    """The share of open activations of each layer."""
    names = _names(run, "open")
    if not names:
        return None
    return Track(
        names, [row["epoch"] for row in run.layers], {"mean": _table(run, names, ("open",))}
    )


def short(name: str) -> str:
    """A layer's name without what all of them have.

    >>> short("encoder.0.convolutions.1")
    'encoder.0.1'
    """
    return ".".join(part for part in name.split(".") if part not in DULL)


def _names(run: Run, parameter: str) -> list[str]:
    """Layers with this parameter, in the order of the last line."""
    last = run.layers[-1]["layers"] if run.layers else {}
    return [name for name, layer in last.items() if isinstance(layer, dict) and parameter in layer]


def _table(run: Run, names: Sequence[str], path: Sequence[str]) -> Values:
    table = np.full((len(names), len(run.layers)), np.nan)
    for column, row in enumerate(run.layers):
        for line, name in enumerate(names):
            value: object = row["layers"].get(name)
            for part in path:
                value = value.get(part) if isinstance(value, dict) else None
            found = finite_number(value)
            if found is not None:
                table[line, column] = found
    return table
