"""Curves of all runs in one chart: training loss, and validation error against epochs."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..runfolder import Run
from .figures import drawing, line_style, tidy

FEW = 40  # epochs up to which each has its dot


def draw_curves(runs: Sequence[Run]) -> Figure:
    with drawing(11, 4.2) as figure:
        loss, error = figure.subplots(1, 2)
        draw(loss, runs, "train_loss", 1.0)
        loss.autoscale(axis="y")  # a loss has no natural lower end
        loss.set(title="Training loss", ylabel="loss, mean of an epoch")
        draw(error, runs, "val_error", 100.0)
        error.set(title="Validation error", ylabel="wrongly labeled pixels, %")
    return figure


def draw(axes: Axes, runs: Sequence[Run], name: str, factor: float) -> None:
    """A line for each run; from epoch 1 on, because the start would press all else together."""
    highest = 0.0
    for i, run in enumerate(runs):
        epochs, values = run.series(name)
        trained = [(e, factor * v) for e, v in zip(epochs, values, strict=True) if e > 0]
        if not trained:
            continue
        color, dashes = line_style(i)
        (line,) = axes.plot(*zip(*trained, strict=True), color=color, linewidth=1.6)
        line.set_dashes(dashes or (None, None))
        if len(trained) <= FEW:
            line.set(marker="o", markersize=2.5)
        highest = max(highest, *(value for _, value in trained))
    if not highest:
        axes.text(0.5, 0.5, "no epoch yet", transform=axes.transAxes, ha="center", va="center")
    axes.set_ylim(0, 1.05 * highest or 1)
    axes.set_xlim(left=0)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes)
