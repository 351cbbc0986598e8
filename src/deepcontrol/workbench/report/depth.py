"""Depth against epochs: how a parameter moves in each layer of a network through a run.

The paper asks how lambda moves, and shows no such plot. Rows are layers, from the image on top to
the logits below; columns are epochs; white is where lambda started, so whatever is colored has
left it. A layer's mean may stay while its filters part, so a second heat map shows how far they
went, and beside it stands where they are at the end. Small multiples show that through time.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .figures import FAINT, INK, drawing, plain
from .layers import Track, Values, short

ROW = 0.19  # inches a layer
LEAST_RANGE = 0.02  # below it colors would show noise


@dataclass(frozen=True)
class Scale:
    """Which values the ends of a range of colors stand for."""

    low: float
    high: float
    colors: str

    @classmethod
    def around(cls, start: float, tables: Sequence[Values]) -> "Scale":
        """Diverging, as far to both sides of its start as nearly all values went."""
        reach = _reach([np.abs(table - start) for table in tables])
        return cls(start - reach, start + reach, "RdBu_r")

    @classmethod
    def up_from_0(cls, tables: Sequence[Values]) -> "Scale":
        return cls(0.0, _reach(tables), "OrRd")


SHARE = Scale(0.0, 1.0, "viridis")


def _reach(tables: Sequence[Values]) -> float:
    """What 98% of the values stay below: one wild layer must not bleach all others."""
    values = np.concatenate([LEAST_RANGE * np.ones(1), *(table.ravel() for table in tables)])
    return max(LEAST_RANGE, float(np.nanquantile(values, 0.98)))


def departure(track: Track, start: float) -> Values:
    """How far from its start 90% of a layer's filters are at most: (layers, epochs)."""
    return np.maximum(np.abs(track.values["q05"] - start), np.abs(track.values["q95"] - start))


def draw_depth(
    track: Track, symbol: str, start: float, mean_scale: Scale, departure_scale: Scale
) -> Figure:
    """Heat maps of the layers' means and departures, and their filters in the last epoch."""
    with drawing(11, 1.6 + ROW * len(track.names)) as figure:
        left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 0.8], sharey=True)
        add_bar(heat(left, track, track.mean, mean_scale), left, "both")
        left.set_title(f"{symbol}, mean of each layer")
        add_bar(heat(middle, track, departure(track, start), departure_scale), middle, "max")
        middle.set_title(f"how far from {start:g} are 90% of its filters")
        name_layers(left, track)
        draw_spread(right, track, start)
        right.set_title(f"the filters after epoch {track.epochs[-1]}")
    return figure


def draw_heats(tracks: Sequence[tuple[str, Track, Scale]]) -> Figure:
    """Heat maps of means side by side, with the layers' names on the left."""
    with drawing(11, 1.3 + 0.8 * ROW * max(len(t.names) for _, t, _ in tracks)) as figure:
        row = figure.subplots(1, len(tracks), sharey=True, squeeze=False)[0]
        for axes, (title, track, scale) in zip(row, tracks, strict=True):
            add_bar(
                heat(axes, track, track.mean, scale), axes, "neither" if scale is SHARE else "both"
            )
            axes.set_title(title)
        name_layers(row[0], tracks[0][1], size=6.5)
    return figure


def heat(axes: Axes, track: Track, values: Values, scale: Scale) -> QuadMesh:
    """Layers by epochs; a line wherever a network's next part begins."""
    edges = np.arange(len(track.names) + 1) - 0.5
    mesh = axes.pcolormesh(
        edges_of(track.epochs),
        edges,
        np.ma.masked_invalid(values),
        cmap=scale.colors,
        vmin=scale.low,
        vmax=scale.high,
        rasterized=True,  # a rectangle for each layer and epoch would make a large page
    )
    axes.set_facecolor("#dddddd")  # what is not there is not white
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
    """What the colors mean, below; pointed where values go beyond."""
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
    names = [plain(short(name)) for name in track.names]
    axes.set_yticks(range(len(names)), names, fontsize=size)


def edges_of(epochs: Sequence[int]) -> np.ndarray:
    """Borders between epochs, halfway to the next.

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
    """Of each layer: all filters as a line, 90% and half of them as bars, the median as a tick."""
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
    axes.set_xlabel("all, 90%, 50%, median")
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw_multiples(track: Track, symbol: str, start: float, columns: int = 7) -> Figure:
    """A small chart for each layer: its filters' quantiles through the run, on common axes."""
    rows = math.ceil(len(track.names) / columns)
    with drawing(11, 0.5 + 1.15 * rows) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, index in zip(grid.flat, range(rows * columns), strict=True):
            if index < len(track.names):
                draw_layer(axes, track, index, start)
                lowest = index + columns >= len(track.names)  # below it there may be no chart
                axes.tick_params(labelbottom=lowest)
            else:
                axes.set_axis_off()
        figure.supxlabel("epoch", fontsize=8)
        figure.supylabel(symbol, fontsize=8)
    return figure


def draw_layer(axes: Axes, track: Track, index: int, start: float) -> None:
    of_layer = {name: values[index] for name, values in track.values.items()}
    axes.axhline(start, color=FAINT, linewidth=0.8)
    for low, high, alpha in (("min", "max", 0.12), ("q05", "q95", 0.2), ("q25", "q75", 0.4)):
        axes.fill_between(
            track.epochs, of_layer[low], of_layer[high], color="#0072b2", alpha=alpha, linewidth=0
        )
    axes.plot(track.epochs, of_layer["q50"], color=INK, linewidth=1)
    axes.set_title(plain(short(track.names[index])), fontsize=7, pad=2)
    axes.tick_params(labelsize=6.5, length=2)
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.spines[["top", "right"]].set_visible(False)
