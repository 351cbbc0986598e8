"""A study's figures: panels of curves over epochs, every line over several seeds."""

import math
from collections.abc import Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..runfolder import Run
from .figures import drawing, line_style, tidy
from .study import Line, Panel

LABELS = {"val_error": "validation error, %", "val_loss": "validation loss"}
FACTORS = {"val_error": 100.0, "val_loss": 1.0}

Points = dict[int, float]  # by epoch
Range = tuple[float, float]
Ranges = dict[str, Range | None]  # what to show, by a panel's letter; None of one without values

USUAL = 0.99  # of the later values are shown; single spikes may leave a panel at its top


def draw_figure(panels: Sequence[Panel], shown: Ranges, words: str) -> Figure:
    """All panels, two in a row as the paper has them; words: what they are of."""
    rows = math.ceil(len(panels) / 2)
    with drawing(11, 3.75 * rows) as figure:
        lines = "Bold: means over seeds. Thin: the seeds. Crosses: runs that diverged."
        figure.suptitle(f"{words}\n{lines}", fontsize=9)
        for i, panel in enumerate(panels, 1):
            draw_panel(figure.add_subplot(rows, 2, i), panel, shown[panel.letter])
    return figure


def draw_one(panel: Panel, shown: Range | None) -> Figure:
    """A panel by itself, for a page that puts them side by side where there is room."""
    with drawing(4.8, 3.2) as figure:
        draw_panel(figure.subplots(), panel, shown)
    return figure


def ranges(panels: Sequence[Panel]) -> Ranges:
    return {panel.letter: usual_range(panel) for panel in panels}


def common_ranges(panels: Sequence[Panel]) -> Ranges:
    """Two panels of errors in a row have one axis: in figure 1 they are there to be compared."""
    found = ranges(panels)
    for pair in zip(panels[::2], panels[1::2], strict=True):
        left, right = (found[panel.letter] for panel in pair)
        if left and right and all(panel.metric == "val_error" for panel in pair):
            both = min(left[0], right[0]), max(left[1], right[1])
            found |= {panel.letter: both for panel in pair}
    return found


def usual_range(panel: Panel) -> Range | None:
    """All values after the first third of the epochs, but for the highest few."""
    seeds = [p for line in panel.lines for run in line.runs if (p := points(run, panel.metric))]
    if not seeds:
        return None
    longest = max(max(of_one) for of_one in seeds)
    late = sorted(v for of_one in seeds for e, v in of_one.items() if e > longest / 3)
    values = late or sorted(v for of_one in seeds for v in of_one.values())
    low, high = values[0], values[round(USUAL * (len(values) - 1))]
    margin = 0.06 * (high - low) or 1.0
    return low - margin, high + margin


def draw_panel(axes: Axes, panel: Panel, shown: Range | None) -> None:
    """Each seed as a thin line and their mean as a bold one; a cross where a run diverged."""
    axes.set_title(f"({panel.letter}) {panel.title}")
    axes.set(xlabel="epoch", ylabel=LABELS[panel.metric])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes)
    if shown is None:
        axes.set(xticks=[], yticks=[])
        gone = any(run.diverged is not None for line in panel.lines for run in line.runs)
        words = "diverged in the first epoch" if gone else "not run"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center")
        return
    axes.set_ylim(*shown)
    drawn = [
        draw_line(axes, line, panel.metric, line_style(i)[0]) for i, line in enumerate(panel.lines)
    ]
    axes.set_xlim(0, max(drawn) * 1.02)
    axes.legend(fontsize=8, framealpha=0.85, edgecolor="none")


def draw_line(axes: Axes, line: Line, metric: str, color: str) -> int:
    """Draw a line's seeds, their mean and its crosses; returns the last epoch of all."""
    label = line.label + how_many(line)
    of_runs = [(run, points(run, metric)) for run in line.runs]
    seeds = [of_one for _, of_one in of_runs if of_one]
    for of_one in seeds if len(seeds) > 1 else []:
        axes.plot(list(of_one), list(of_one.values()), color=color, alpha=0.5, linewidth=0.8)
    # The mean is of those that came furthest: one that ended early must not end it, nor bend it.
    furthest = max((max(of_one) for of_one in seeds), default=0)
    whole = [of_one for of_one in seeds if furthest in of_one]
    common = [e for e in (whole[0] if whole else {}) if all(e in of_one for of_one in whole)]
    means = [fmean(of_one[e] for of_one in whole) for e in common]
    crosses = [
        (run.diverged, of_one[max(of_one)] if of_one else math.inf)
        for run, of_one in of_runs
        if run.diverged is not None
    ]
    # Where all diverged the legend has their cross: of the line there is nothing to be seen.
    lost = crosses and not any(of_one and run.diverged is None for run, of_one in of_runs)
    axes.plot(common, means, color=color, linewidth=1.8, label=None if lost else label)
    draw_crosses(axes, crosses, color, label if lost else None)
    return max([furthest, *(epoch for epoch, _ in crosses)])


def draw_crosses(
    axes: Axes, at: Sequence[tuple[int, float]], color: str, label: str | None
) -> None:
    """At epochs and values, and at the top if those are above it."""
    bottom, edge = axes.get_ylim()
    top = edge - 0.04 * (edge - bottom)
    x, y = [epoch for epoch, _ in at], [min(value, top) for _, value in at]
    if at:
        axes.plot(x, y, "x", markersize=7, mew=1.6, color=color, label=label)


def how_many(line: Line) -> str:
    """Over how many seeds a line goes, for the legend."""
    diverged = sum(run.diverged is not None for run in line.runs)
    count = sum(run.epochs_done > 0 or run.diverged is not None for run in line.runs)
    if not count:
        return ": not run"
    seeds = f"{count} seeds" * (count > 1)
    gone = ("diverged" if diverged == count else f"{diverged} diverged") * (diverged > 0)
    words = ", ".join(filter(None, (seeds, gone)))
    return f" ({words})" if words else ""


def points(run: Run, metric: str) -> Points:
    """From epoch 1 on: the start would press all else together."""
    pairs = zip(*run.series(metric), strict=True)
    return {epoch: FACTORS[metric] * value for epoch, value in pairs if epoch > 0}
