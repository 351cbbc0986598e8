"""Draw the signal propagation plot of a report."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .signal_flags import FlagKind

if TYPE_CHECKING:
    from .signal_report import LayerSignal

RED, INK, FAINT = "#c8321e", "#1c2733", "#aab4be"
STYLE = {
    "font.size": 10.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
}


@dataclass(frozen=True)
class Panel:
    """A number of each layer, drawn in red where one of these flags concerns it."""

    title: str
    value: "Callable[[LayerSignal], float | None]"
    flags: frozenset[str]
    linear: bool = False


PANELS = (
    Panel(
        "Variance of the output",
        lambda layer: layer.variance,
        frozenset(get_args(FlagKind)) - {"gradient explosion", "gradient vanishing"},
    ),
    Panel(
        "Variance of the gradient",
        lambda layer: layer.gradient_variance,
        frozenset({"gradient explosion", "gradient vanishing", "non-finite"}),
    ),
    Panel("Share of open ReLUs", lambda layer: layer.open_share, frozenset({"dead"}), linear=True),
)


def draw_file(
    layers: "Sequence[LayerSignal]",
    path: str | os.PathLike[str],
    open_share: bool,
    label: str | None,
) -> None:
    """Draw the panels into a file."""
    panels = 3 if open_share else 2
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(4.6 * panels, 3.4), layout="constrained")
        axes = list(figure.subplots(1, panels))
        draw(layers, axes, open_share, label)
        if label is not None:
            axes[0].legend(frameon=False)
        figure.savefig(path, dpi=150)


def draw(
    layers: "Sequence[LayerSignal]", axes: Sequence[Axes], open_share: bool, label: str | None
) -> None:
    """Draw one curve into each of the axes."""
    panels = PANELS if open_share else PANELS[:2]
    if len(axes) != len(panels):
        raise ValueError(
            f"expected {len(panels)} axes with open_share={open_share}, got {len(axes)}: pass one "
            "for each of " + ", ".join(panel.title.lower() for panel in panels)
        )
    for ax, panel in zip(axes, panels, strict=True):
        _draw_panel(ax, layers, panel, label)
        ax.set_title(panel.title)
        ax.set_xlabel("layer, in the order of the calls")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(axis="y", color=FAINT, alpha=0.4, linewidth=0.6)
        if panel.linear:
            ax.set_ylim(0, 1)
            ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        else:
            ax.set_yscale("log")


def _draw_panel(
    axes: Axes, layers: "Sequence[LayerSignal]", panel: Panel, label: str | None
) -> None:
    # Zeros, NaN and layers without a value have no place on the axis.
    points = [
        (depth, y, layer)
        for depth, layer in enumerate(layers, 1)
        if (y := panel.value(layer)) is not None and math.isfinite(y) and (y > 0 or panel.linear)
    ]
    # In a residual network the branches lie below the sums: a line through all would be a zigzag.
    is_residual = sum(layer.kind == "add" for layer in layers) > 1
    on_line = [p for p in points if p[2].kind == "add"] if is_residual else points
    depths, values = [p[0] for p in on_line], [p[1] for p in on_line]
    (line,) = axes.plot(depths, values, "-", linewidth=1.0, alpha=0.55, label=label)
    color = line.get_color()
    for is_addition, size in ((False, 5.0), (True, 20.0)):
        shown = [p for p in points if (p[2].kind == "add") == is_addition]
        colors = [RED if panel.flags & set(layer.flags) else color for _, _, layer in shown]
        axes.scatter([p[0] for p in shown], [p[1] for p in shown], size, colors, zorder=3)
