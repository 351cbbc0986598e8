"""Per-layer statistics over a run: arrays from layers.jsonl, and heat maps.

In a heat map, rows are layers, from the image at the top to the logits at the bottom, and columns
are epochs. White is the initial value. A layer's mean can stay constant while its filters spread,
so a second heat map shows their distance to the initial value, and a third chart their
distribution in the last epoch. Small multiples show the distribution of each layer by epoch.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ..folders.runfolder import LAYERS, Run, finite_number
from ..folders.storage import Row
from .figures import FAINT, INK, ascii_name, drawing

Values = NDArray[np.float64]
T = TypeVar("T")

STATISTICS = ("mean", "min", "max", "q05", "q25", "q50", "q75", "q95")
REDUNDANT = ("convolutions", "layers")  # parts of layer names that carry no information
# Largest chart. A resnet110 has 110 layers; a file may claim any number, and 5,000 take minutes.
MAX_LAYERS = 120
MAX_EPOCHS = 1000
MAX_NAME = 40  # characters


@dataclass(frozen=True)
class Track:
    """Statistics of one parameter over the filters of each layer, by epoch."""

    names: list[str]  # layers with this parameter, in forward order
    epochs: list[int]
    values: dict[str, Values]  # by statistic: (layers, epochs), NaN where there is no record

    @property
    def mean(self) -> Values:
        return self.values["mean"]


def track(run: Run, parameter: str) -> Track | None:
    """Collect mean_scale, gain or bias of all layers; None if no layer has it."""
    names, rows = thinned(_names(run, parameter), MAX_LAYERS), thinned(run.layers, MAX_EPOCHS)
    if not names:
        return None
    values = {statistic: _table(rows, names, (parameter, statistic)) for statistic in STATISTICS}
    return Track(names, [row["epoch"] for row in rows], values)


def track_open(run: Run) -> Track | None:
    """Collect the fraction of active ReLUs of each layer."""
    names, rows = thinned(_names(run, "open"), MAX_LAYERS), thinned(run.layers, MAX_EPOCHS)
    if not names:
        return None
    return Track(names, [row["epoch"] for row in rows], {"mean": _table(rows, names, ("open",))})


def thinned(values: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of the values, equally spaced, with first and last.

    >>> thinned(range(100), 4), thinned([1, 2], 4)
    ([0, 33, 66, 99], [1, 2])
    """
    if len(values) <= count:
        return list(values)
    return [values[i * (len(values) - 1) // (count - 1)] for i in range(count)]


def left_out(run: Run) -> list[str]:
    """Return a note if a run has more layers or epochs than the charts show."""
    layers = len(run.layers[-1]["layers"]) if run.layers else 0
    return [
        f"{LAYERS} has {found:,} {things}; the charts show {most:,} of them"
        for things, found, most in (
            ("layers", layers, MAX_LAYERS),
            ("epochs", len(run.layers), MAX_EPOCHS),
        )
        if found > most
    ]


def short_name(name: str) -> str:
    """Shorten a layer's name.

    >>> short_name("encoder.0.convolutions.1")
    'encoder.0.1'
    """
    return ".".join(part for part in name.split(".") if part not in REDUNDANT)[:MAX_NAME]


def _names(run: Run, parameter: str) -> list[str]:
    """Return the layers with this parameter, in the order of the last record."""
    last = run.layers[-1]["layers"] if run.layers else {}
    return [name for name, layer in last.items() if isinstance(layer, dict) and parameter in layer]


def _table(rows: Sequence[Row], names: Sequence[str], path: Sequence[str]) -> Values:
    table = np.full((len(names), len(rows)), np.nan)
    for column, row in enumerate(rows):
        for line, name in enumerate(names):
            value: object = row["layers"].get(name)
            for part in path:
                value = value.get(part) if isinstance(value, dict) else None
            found = finite_number(value)
            if found is not None:
                table[line, column] = found
    return table


# Heat maps

ROW = 0.19  # inches per layer
LEAST_RANGE = 0.02  # smaller ranges would show noise


@dataclass(frozen=True)
class Scale:
    """The values at both ends of a color map."""

    low: float
    high: float
    colors: str

    @classmethod
    def around(cls, start: float, tables: Sequence[Values]) -> "Scale":
        """Return a diverging scale that is symmetric around the initial value."""
        reach = _reach([np.abs(table - start) for table in tables])
        return cls(start - reach, start + reach, "RdBu_r")

    @classmethod
    def up_from_0(cls, tables: Sequence[Values]) -> "Scale":
        return cls(0.0, _reach(tables), "OrRd")


FRACTION = Scale(0.0, 1.0, "viridis")


def _reach(tables: Sequence[Values]) -> float:
    """Return the 98% quantile, so that one outlying layer does not bleach all others."""
    values = np.concatenate([LEAST_RANGE * np.ones(1), *(table.ravel() for table in tables)])
    return max(LEAST_RANGE, float(np.nanquantile(values, 0.98)))


def _widen(limits: tuple[float, float], start: float) -> tuple[float, float]:
    """Widen the limits of an axis to the least range around the initial value."""
    return min(limits[0], start - LEAST_RANGE), max(limits[1], start + LEAST_RANGE)


def start_of(lam: Track) -> float:
    """Return the initial lambda of most layers.

    It is that of epoch 0, or 1 without a record of it.
    """
    first = lam.mean[:, 0] if lam.epochs[:1] == [0] else np.empty(0)
    known = np.sort(first[np.isfinite(first)])
    return round(float(known[len(known) // 2]), 3) if known.size else 1.0


def departure(track: Track, start: float) -> Values:
    """Return the largest distance of 90% of the filters to `start`.

    The shape is (layers, epochs).
    """
    return np.maximum(np.abs(track.values["q05"] - start), np.abs(track.values["q95"] - start))


def draw_depth(
    track: Track, symbol: str, start: float, mean_scale: Scale, departure_scale: Scale
) -> Figure:
    """Draw heat maps of means and distances, and the distribution in the last epoch."""
    with drawing(11, 1.6 + ROW * len(track.names)) as figure:
        left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 0.8], sharey=True)
        add_bar(heat(left, track, track.mean, mean_scale), left, "both")
        left.set_title(f"{symbol}, mean of each layer")
        add_bar(heat(middle, track, departure(track, start), departure_scale), middle, "max")
        middle.set_title(f"largest distance from {start:g} of 90% of the filters")
        name_layers(left, track)
        draw_spread(right, track, start)
        right.set_title(f"filters after epoch {track.epochs[-1]}")
    return figure


def draw_heats(tracks: Sequence[tuple[str, Track, Scale]]) -> Figure:
    """Draw heat maps of means side by side."""
    with drawing(11, 1.3 + 0.8 * ROW * max(len(t.names) for _, t, _ in tracks)) as figure:
        row = figure.subplots(1, len(tracks), sharey=True, squeeze=False)[0]
        for axes, (title, track, scale) in zip(row, tracks, strict=True):
            add_bar(
                heat(axes, track, track.mean, scale),
                axes,
                "neither" if scale is FRACTION else "both",
            )
            axes.set_title(title)
        name_layers(row[0], tracks[0][1], size=6.5)
    return figure


def heat(axes: Axes, track: Track, values: Values, scale: Scale) -> QuadMesh:
    """Draw layers by epochs, with a line between encoder and decoder."""
    edges = np.arange(len(track.names) + 1) - 0.5
    mesh = axes.pcolormesh(
        edges_of(track.epochs),
        edges,
        np.ma.masked_invalid(values),
        cmap=scale.colors,
        vmin=scale.low,
        vmax=scale.high,
        rasterized=True,  # vector graphics would make the page large
    )
    axes.set_facecolor("#dddddd")  # missing values, since white is the initial value
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(track.names) - 0.5, -0.5)
    parts = [name.split(".")[0] for name in track.names]
    for row, (above, below) in enumerate(itertools.pairwise(parts)):
        if above != below:
            axes.axhline(row + 0.5, color=INK, linewidth=0.8)
    return mesh


def add_bar(mesh: QuadMesh, axes: Axes, extend: Literal["neither", "both", "max"]) -> None:
    """Add a color bar below, pointed where values exceed it."""
    figure = axes.get_figure()
    assert figure is not None
    figure.colorbar(
        mesh,
        ax=axes,
        location="bottom",
        extend=extend,
        ticks=MaxNLocator(5),
        pad=0.01,
        fraction=0.04,
        aspect=35,
    )


def name_layers(axes: Axes, track: Track, size: float = 7.5) -> None:
    names = [ascii_name(short_name(name)) for name in track.names]
    axes.set_yticks(range(len(names)), names, fontsize=size)


def edges_of(epochs: Sequence[int]) -> np.ndarray:
    """Return the borders between epochs, halfway to the next.

    >>> edges_of([0, 1, 2]).tolist(), edges_of([0, 1, 5]).tolist(), edges_of([3]).tolist()
    ([-0.5, 0.5, 1.5, 2.5], [-0.5, 0.5, 3.0, 7.0], [2.5, 3.5])
    """
    at = np.asarray(epochs, float)
    if len(at) == 1:
        return np.array([at[0] - 0.5, at[0] + 0.5])
    between = (at[1:] + at[:-1]) / 2
    first, last = 2 * at[0] - between[0], 2 * at[-1] - between[-1]
    return np.array([first, *between, last])


def draw_spread(axes: Axes, track: Track, start: float) -> None:
    """Draw the filters of each layer: range, 90% and 50% as bars, median as a tick."""
    last = {name: values[:, -1] for name, values in track.values.items()}
    rows = np.arange(len(track.names))
    axes.axvline(start, color=FAINT, linewidth=1, zorder=0)
    for low, high, width, color in (
        ("min", "max", 0.8, FAINT),
        ("q05", "q95", 3.0, "#a9c3dd"),
        ("q25", "q75", 6.0, "#4a86b8"),
    ):
        axes.hlines(rows, last[low], last[high], linewidth=width, color=color)
    axes.plot(last["q50"], rows, linestyle="", marker="|", markersize=8, color=INK)
    axes.set_xlim(*_widen(axes.get_xlim(), start))
    axes.set_xlabel("all, 90%, 50%, median")
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw_multiples(track: Track, symbol: str, start: float, columns: int = 7) -> Figure:
    """Draw quantiles over the filters by epoch, one small chart per layer."""
    rows = math.ceil(len(track.names) / columns)
    with drawing(11, 0.5 + 1.15 * rows) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, index in zip(grid.flat, range(rows * columns), strict=True):
            if index < len(track.names):
                _draw_layer(axes, track, index, start)
                lowest = index + columns >= len(track.names)  # no chart below
                axes.tick_params(labelbottom=lowest)
            else:
                axes.set_axis_off()
        grid[0, 0].set_ylim(*_widen(grid[0, 0].get_ylim(), start))  # shared by all charts
        figure.supxlabel("epoch", fontsize=8)
        figure.supylabel(symbol, fontsize=8)
    return figure


def _draw_layer(axes: Axes, track: Track, index: int, start: float) -> None:
    of_layer = {name: values[index] for name, values in track.values.items()}
    axes.axhline(start, color=FAINT, linewidth=0.8)
    for low, high, alpha in (("min", "max", 0.12), ("q05", "q95", 0.2), ("q25", "q75", 0.4)):
        axes.fill_between(
            track.epochs, of_layer[low], of_layer[high], color="#0072b2", alpha=alpha, linewidth=0
        )
    axes.plot(track.epochs, of_layer["q50"], color=INK, linewidth=1)
    axes.set_title(ascii_name(short_name(track.names[index])), fontsize=7, pad=2)
    axes.tick_params(labelsize=6.5, length=2)
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.spines[["top", "right"]].set_visible(False)
