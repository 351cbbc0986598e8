"""Figure 1 of the paper: eight panels of curves over epochs, every line over several seeds."""

from collections.abc import Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .figures import drawing, line_style, tidy
from .runs import Run
from .study import Line, Panel

LABELS = {"val_error": "validation error, %", "val_loss": "validation loss"}
FACTORS = {"val_error": 100.0, "val_loss": 1.0}

Points = dict[int, float]  # by epoch


def draw_figure_1(panels: Sequence[Panel]) -> Figure:
    """All panels in the paper's arrangement, two in a row."""
    with drawing(11, 15) as figure:
        for axes, panel in zip(figure.subplots(4, 2).flat, panels, strict=True):
            draw_panel(axes, panel)
    return figure


def draw_one(panel: Panel) -> Figure:
    """A panel by itself, for a page that puts them side by side where there is room."""
    with drawing(4.8, 3.2) as figure:
        draw_panel(figure.subplots(), panel)
    return figure


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Each seed as a thin line and their mean as a bold one; a cross where a run diverged."""
    axes.set_title(f"({panel.letter}) {panel.title}")
    drawn: list[Points] = []
    for i, line in enumerate(panel.lines):
        drawn += draw_line(axes, line, panel.metric, line_style(i)[0])
    axes.set(xlabel="epoch", ylabel=LABELS[panel.metric])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes)
    if drawn:
        fit(axes, drawn)
        for i, line in enumerate(panel.lines):
            draw_crosses(axes, line, panel.metric, line_style(i)[0])
        axes.legend(fontsize=8, framealpha=0.8, edgecolor="none")
    else:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", va="center")


def draw_line(axes: Axes, line: Line, metric: str, colour: str) -> list[Points]:
    """The seeds' points, which are drawn."""
    seeds = [p for run in line.runs if (p := points(run, metric))]
    for of_one in seeds if len(seeds) > 1 else []:
        axes.plot(list(of_one), list(of_one.values()), color=colour, alpha=0.5, linewidth=0.8)
    # The mean is of those that came furthest: one that ended early must not end it, nor bend it.
    furthest = max((max(of_one) for of_one in seeds), default=0)
    whole = [of_one for of_one in seeds if furthest in of_one]
    common = [e for e in (whole[0] if whole else {}) if all(e in of_one for of_one in whole)]
    means = [fmean(of_one[e] for of_one in whole) for e in common]
    axes.plot(common, means, color=colour, linewidth=1.8, label=line.label + how_many(line))
    return seeds


def draw_crosses(axes: Axes, line: Line, metric: str, colour: str) -> None:
    """Where runs diverged; at the top if that is above it."""
    bottom, edge = axes.get_ylim()
    top = edge - 0.04 * (edge - bottom)
    for run in line.runs:
        if run.diverged is not None and (of_one := points(run, metric)):
            last = max(of_one)
            at = (last, min(of_one[last], top))
            axes.plot(*at, marker="x", markersize=9, color=colour, mew=2)


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


def fit(axes: Axes, drawn: Sequence[Points]) -> None:
    """Show all after the first third; what comes before may leave at the top."""
    longest = max(max(of_one) for of_one in drawn)
    late = [v for of_one in drawn for e, v in of_one.items() if e > longest / 3]
    shown = late or [v for of_one in drawn for v in of_one.values()]
    low, high = min(shown), max(shown)
    margin = 0.06 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(0, longest * 1.02)
