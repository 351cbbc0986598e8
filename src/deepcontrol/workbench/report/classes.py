"""A run's classes: legend, IoU or error by class over time, confusion matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib import patheffects
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..folders.runfolder import Run
from .figures import COLORS, FAINT, INK, MARKED, ascii_name, drawing, line_style, tidy

SHOWN_CURVES = 20  # classes with the worst last value
SHOWN_BARS = 30
SHOWN_IN_MATRIX = 30  # labeled classes; of more, only the frequent confusions are listed
NUMBERED = 20  # up to this many classes, the cells have numbers
FREQUENT = 8  # confusions in the list
MIN_SHARE = 0.01  # smallest share of a class for a listed confusion

Series = Mapping[str, tuple[list[int], list[float]]]  # epochs and values by class


@dataclass(frozen=True)
class ClassRow:
    """A row of the table of classes. Values that the run lacks are None."""

    name: str
    color: str | None  # in pictures, "#rrggbb"
    value: float | None  # last IoU, or error in classification
    labeled: float | None  # share of the validation pixels or images with this class


@dataclass(frozen=True)
class Confusion:
    """Pixels or images of one class that are predicted as another."""

    true: str
    predicted: str
    share: float  # fraction of the true class


def class_rows(run: Run) -> list[ClassRow]:
    """Return a row for each class, in the order of the network's outputs."""
    names, values, counts = run.class_names, run.last_by_class, run.confusion
    colors: Sequence[str | None] = [None] * len(names)
    if not run.is_classification and run.class_colors:
        colors = run.class_colors
    total = sum(map(sum, counts))
    labeled = [sum(row) / total if total else None for row in counts] or [None] * len(names)
    return [
        ClassRow(name, color, values.get(name), share)
        for name, color, share in zip(names, colors, labeled, strict=True)
    ]


def frequent_confusions(run: Run) -> list[Confusion]:
    """Return the most frequent confusions, by their share of the true class."""
    found = []
    for name, row in zip(run.class_names, run.confusion, strict=False):
        for other, count in zip(run.class_names, row, strict=True):
            if other != name and count:
                found.append(Confusion(name, other, count / sum(row)))
    found = [confusion for confusion in found if confusion.share >= MIN_SHARE]
    return sorted(found, key=lambda confusion: -confusion.share)[:FREQUENT]


def only_class(run: Run) -> str | None:
    """Return the class that is predicted everywhere although several occur, or None."""
    counts = run.confusion
    predicted = [i for i, column in enumerate(zip(*counts, strict=True)) if any(column)]
    if len(predicted) == 1 and sum(any(row) for row in counts) > 1:
        return run.class_names[predicted[0]]
    return None


def draw_class_curves(run: Run) -> Figure | None:
    """Draw IoU or error of each class over epochs; None if the run recorded none."""
    series = {name: values for name, values in run.class_series().items() if values[0][-1] > 0}
    if not series:
        return None
    is_iou = not run.is_classification
    # The worst classes, in the order of the legend of the pictures.
    by_last = sorted(series, key=lambda name: series[name][1][-1], reverse=not is_iou)
    shown = [name for name in series if name in by_last[:SHOWN_CURVES]]
    colors = dict(zip(run.class_names, run.class_colors, strict=False)) if is_iou else {}
    with drawing(8.6, max(3.2, 0.6 + 0.19 * len(shown))) as figure:
        axes = figure.subplots()
        for i, name in enumerate(shown):
            points = [(e, 100 * v) for e, v in zip(*series[name], strict=True) if e > 0]
            (line,) = axes.plot(
                *zip(*points, strict=True),
                color=colors.get(name) or line_style(i)[0],
                linewidth=1.8,
                label=f"{ascii_name(name)[:28]}  {points[-1][1]:.1f}",
            )
            # An outline keeps light colors visible.
            line.set_path_effects([patheffects.withStroke(linewidth=2.8, foreground=FAINT)])
            if len(points) <= MARKED:
                line.set(marker="o", markersize=2.5)
        left_out = len(series) - len(shown)
        more = f", the worst {len(shown)} of {len(series)} classes" if left_out else ""
        what = "IoU" if is_iou else "Wrong images"
        axes.set(title=f"{what} of each class, %{more}", xlabel="epoch")
        axes.set_ylim(0, 100 if is_iou else None)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes)
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_class_bars(run: Run) -> Figure | None:
    """Draw the last IoU (or error) of each class as bars, the worst at the top."""
    values = run.last_by_class
    if not values:
        return None
    is_iou = not run.is_classification
    shown = sorted(values.items(), key=lambda pair: pair[1], reverse=is_iou)[-SHOWN_BARS:]
    with drawing(5.4, 0.8 + 0.22 * len(shown)) as figure:
        axes = figure.subplots()
        bars = axes.barh(range(len(shown)), [100 * value for _, value in shown], color=COLORS[0])
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
        axes.set_yticks(range(len(shown)), [ascii_name(name)[:40] for name, _ in shown])
        left_out = len(values) - len(shown)
        more = f", the worst {len(shown)} of {len(values)} classes" if left_out else ""
        what = "IoU" if is_iou else "Wrong images"
        axes.set(title=f"{what} of each class, %{more}")
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        if not any(value for _, value in shown):  # an axis around zero would end at 0.05
            axes.set_xlim(right=100)
        tidy(axes)
        axes.grid(visible=False, axis="y")
    return figure


def draw_confusion(run: Run) -> Figure | None:
    """Draw the confusion matrix in percent of each true class; None without one.

    Classes without labels and without predictions are left out.
    """
    counts, names = run.confusion, run.class_names
    columns = list(zip(*counts, strict=True))
    shown = [i for i, row in enumerate(counts) if any(row) or any(columns[i])]
    if not 1 < len(shown) <= SHOWN_IN_MATRIX:
        return None
    totals = [sum(counts[i]) for i in shown]
    shares = [
        [100 * counts[i][j] / total if total else 0.0 for j in shown]
        for i, total in zip(shown, totals, strict=True)
    ]
    side = 1.6 + 0.36 * len(shown)
    with drawing(max(4.4, side + 0.6), max(3.4, side)) as figure:
        axes = figure.subplots()
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
        labels = [ascii_name(names[i])[:18] for i in shown]
        axes.set_xticks(range(len(shown)), labels, rotation=55, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(shown)), labels)
        axes.set(xlabel="predicted", ylabel="true class")
        axes.set_title("Confusion, % of each true class")
        cells = [(x, y, share) for y, row in enumerate(shares) for x, share in enumerate(row)]
        for x, y, share in cells if len(shown) <= NUMBERED else ():
            if share >= 0.5 or x == y:
                color = "white" if share > 55 else INK
                axes.text(x, y, f"{share:.0f}", ha="center", va="center", fontsize=7, color=color)
        figure.colorbar(image, shrink=0.8)
    return figure
