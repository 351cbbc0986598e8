"""Draw step time and memory by contender and engine, one row of panels per cell.

A ~ marks values from an earlier run than the latest of their panel.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .results import ENGINE_NAMES, Row, cell_title, cells, contender_name

COLORS = {"eager": "#9aa5b1", "compile": "#5b8db8", "graph": "#e0a030", "compile+graph": "#b5482f"}
MEMORY = ("activations_mib", "saved_mib")


def draw(rows: Sequence[Row], path: Path) -> bool:
    """Draw the timed steps to a PNG, or return False if there are none."""
    panels = [timed for members in cells(rows) if (timed := [r for r in members if "ms_p50" in r])]
    if not panels:
        return False
    heights = [1.1 + 0.2 * len(members) for members in panels]
    figure = Figure(figsize=(11, sum(heights) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 2, height_ratios=heights, squeeze=False)
    for (left, right), members in zip(axes, panels, strict=True):
        draw_times(left, members)
        draw_memory(right, members)
    engines = [engine for engine in COLORS if any(r["engine"] == engine for m in panels for r in m)]
    handles = [Patch(color=COLORS[engine], label=ENGINE_NAMES[engine]) for engine in engines]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(engines), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def draw_times(axes: Axes, members: Sequence[Row]) -> None:
    """Draw the median step times with whiskers from p20 to p80."""
    p20, p50, p80 = ([float(row[f"ms_p{p}"]) for row in members] for p in (20, 50, 80))
    below = [b - a for a, b in zip(p20, p50, strict=True)]
    above = [b - a for a, b in zip(p50, p80, strict=True)]
    whiskers = {"xerr": [below, above], "error_kw": {"elinewidth": 1.0, "capsize": 2}}
    draw_bars(axes, members, p50, **whiskers)
    axes.set_title(cell_title(members[0]), loc="left", fontsize=10)
    axes.set_xlabel("step time, ms (median; whiskers: p20 to p80)", fontsize=8)


def draw_memory(axes: Axes, members: Sequence[Row]) -> None:
    """Draw the memory of a step; nothing for inference, which saves no tensors."""
    values = [float(next((row[k] for k in MEMORY if k in row), 0)) for row in members]
    if not any(values):
        axes.set_axis_off()
        return
    draw_bars(axes, members, values)
    saved = any("saved_mib" in row for row in members)
    axes.set_xlabel("saved for backward, MiB" if saved else "activations, MiB", fontsize=8)


def draw_bars(axes: Axes, members: Sequence[Row], values: Sequence[float], **more: object) -> None:
    """Draw a bar per row. The engines of a contender share one label."""
    at: list[float] = []
    ticks: dict[str, list[float]] = {}
    y = 0.0
    for i, row in enumerate(members):
        y += 1.0 if i and row["contender"] == members[i - 1]["contender"] else 1.5
        at.append(y)
        ticks.setdefault(contender_name(row), []).append(y)
    colors = [COLORS.get(row["engine"], "black") for row in members]
    axes.barh(at, values, height=0.9, color=colors, **more)  # type: ignore[arg-type]
    axes.set_yticks([sum(ys) / len(ys) for ys in ticks.values()], list(ticks), fontsize=8)
    axes.invert_yaxis()
    latest = max(row.get("run", "") for row in members)
    marks = ["" if row.get("run", "") == latest else "~" for row in members]  # as in the table
    labels = [f"{mark}{v:.4g}" for mark, v in zip(marks, values, strict=True)]
    axes.bar_label(axes.containers[-1], labels, fontsize=7, padding=3)  # type: ignore[arg-type]
    axes.margins(x=0.15)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
