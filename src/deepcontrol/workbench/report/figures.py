"""Charts: common style, curves of runs, panels of a study, export as SVG and PNG."""

import base64
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from ..folders.runfolder import Run
from ..folders.storage import replacing, write_atomic
from ..folders.studyfolder import FIGURES, Line, Measurement, Panel, Sweep
from .text import NORM_NAMES, short_labels

# Style

# Okabe and Ito's colors, which color-blind readers can tell apart; then the same with dashes.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#444444", "#8b4fc4")
DASHES = ((), (6, 2), (2, 2), (6, 2, 2, 2))

INK, FAINT = "#1c2733", "#8794a3"
_STYLE: Any = {
    "font.size": 9.0,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "svg.hashsalt": "deepcontrol",  # the same run folder gives the same page
    "text.parse_math": False,  # a name may contain dollar signs
}


def line_style(index: int) -> tuple[str, tuple[int, ...]]:
    """Return the color and the dashes of run `index`."""
    return COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]


@contextmanager
def drawing(width: float, height: float) -> Iterator[Figure]:
    """Create a figure of this size in inches, in the report's style."""
    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def ascii_name(text: str) -> str:
    """Replace characters that the font may lack."""
    return text.encode("ascii", "replace").decode()


# Export


def data_uri(figure: Figure) -> str:
    """Return a figure as an SVG data URI for <img>."""
    return _as_uri(_svg(figure))


def save_figure(figure: Figure, out: Path, name: str, shaded: bool = False) -> str:
    """Save a figure as SVG and PNG in a study's figure folder; return its data URI.

    Args:
        figure: The figure.
        out: Folder of the study's page.
        name: File name without suffix.
        shaded: The figure has smooth shades, as a heat map has, and needs more than 256 colors.
    """
    svg = _svg(figure)
    write_atomic(out / FIGURES / f"{name}.svg", svg, inside=out)
    figure.set_layout_engine("none")  # already laid out, which takes as long as drawing
    with replacing(out / FIGURES / f"{name}.png", inside=out) as file:
        _save_png(figure, file, shaded)
    return _as_uri(svg)


def _save_png(figure: Figure, out: BinaryIO, shaded: bool) -> None:
    file = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(file, format="png", dpi=150)
    picture = Image.open(file).convert("RGB")
    if not shaded:  # 256 colors take less than half of the bytes
        # Other methods drop colors of few pixels, such as that of a line in the legend only.
        picture = picture.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    picture.save(out, "PNG", optimize=True)


_PATH = re.compile(rb'<path (id="m\w*" )?d="[^"]*"')  # lines and areas, not glyphs
_DECIMALS = re.compile(rb"(\d\.\d\d)\d+")


def _svg(figure: Figure) -> bytes:
    with matplotlib.rc_context(_STYLE):
        file = io.BytesIO()
        figure.savefig(file, format="svg", dpi=150, metadata={"Date": None})
    # Two decimals of a point are enough, and save a quarter of the bytes.
    return _PATH.sub(lambda path: _DECIMALS.sub(rb"\1", path[0]), file.getvalue())


def _as_uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


# Curves of runs

MARKED = 40  # up to this many epochs, each has a marker


def draw_error(runs: Sequence[Run]) -> Figure:
    """Draw the validation error of all runs."""
    with drawing(5.4, 3.6) as figure:
        axes = figure.subplots()
        _draw_metric(axes, runs, "val_error", 100.0)
        axes.set(title="Validation error", ylabel=f"wrong {labeled_things(runs)}, %")
    return figure


def labeled_things(runs: Sequence[Run]) -> str:
    """Return the unit of the runs' errors: "pixels", "images", or "pixels or images"."""
    found = sorted({"images" if run.is_classification else "pixels" for run in runs}, reverse=True)
    return " or ".join(found)


def draw_loss(runs: Sequence[Run]) -> Figure:
    """Draw the training loss of all runs."""
    with drawing(5.4, 3.6) as figure:
        axes = figure.subplots()
        _draw_metric(axes, runs, "train_loss", 1.0)
        axes.autoscale(axis="y")  # unlike an error, a loss has no natural lower end
        axes.set(title="Training loss", ylabel="loss, mean of an epoch")
    return figure


def _draw_metric(axes: Axes, runs: Sequence[Run], name: str, factor: float) -> None:
    """Draw a line for each run from epoch 1 on. Epoch 0 would compress the scale."""
    highest = 0.0
    for i, run in enumerate(runs):
        epochs, values = run.series(name)
        trained = [(e, factor * v) for e, v in zip(epochs, values, strict=True) if e > 0]
        if not trained:
            continue
        color, dashes = line_style(i)
        (line,) = axes.plot(*zip(*trained, strict=True), color=color, linewidth=1.6)
        line.set_dashes(dashes or (None, None))
        if len(trained) <= MARKED:
            line.set(marker="o", markersize=2.5)
        highest = max(highest, *(value for _, value in trained))
    if not highest:
        axes.text(0.5, 0.5, "no epoch yet", transform=axes.transAxes, ha="center", va="center")
    axes.set_ylim(0, 1.05 * highest or 1)
    axes.set_xlim(left=0)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes)


# A study at a glance

NORM_COLORS = dict(zip(NORM_NAMES, COLORS, strict=False))  # as in the panels of AGC and BN


def draw_final_errors(errors: Mapping[str, Mapping[int, Measurement]]) -> Figure:
    """Draw the final error by norm and batch size: bars for means, dots for seeds."""
    batches = sorted({batch for by_batch in errors.values() for batch in by_batch})
    width = 0.8 / max(1, len(errors))
    with drawing(5.6, 3.4) as figure:
        axes = figure.subplots()
        for i, (norm, by_batch) in enumerate(errors.items()):
            left = (i - (len(errors) - 1) / 2) * width
            for batch, error in by_batch.items():
                _draw_bar(axes, batches.index(batch) + left, width, error, NORM_COLORS[norm])
            axes.bar(0, 0, color=NORM_COLORS[norm], label=NORM_NAMES[norm])
        axes.set_xticks(range(len(batches)), [f"batch size {batch}" for batch in batches])
        axes.set_title("Wrong pixels at the end of training, %")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.2)  # space for the legend
        tidy(axes)
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", length=0, labelsize=9)
        axes.legend(
            loc="upper right", ncols=len(errors), fontsize=9, framealpha=0.85, edgecolor="none"
        )
    return figure


def _draw_bar(axes: Axes, x: float, width: float, error: Measurement, color: str) -> None:
    if error.mean is None:
        words = "diverged" if error.diverged else "no value"
        axes.annotate(words, (x, 0), (0, 3), textcoords="offset points", ha="center", color=color)
        return
    axes.bar(x, error.mean, 0.92 * width, color=color, alpha=0.8)
    seeds = [value for value in error.values if value is not None]
    if len(seeds) > 1:
        spread = [x + 0.4 * width * (i / (len(seeds) - 1) - 0.5) for i in range(len(seeds))]
        axes.plot(spread, seeds, "o", markersize=2.5, color=INK, alpha=0.6)
    top = max(seeds)
    axes.annotate(
        f"{error.mean:.1f}",
        (x, top),
        (0, 4),
        textcoords="offset points",
        ha="center",
        weight="bold",
    )


def draw_contenders(measured: Sequence[Measurement]) -> Figure:
    """Draw final errors as horizontal bars, with dots for seeds."""
    norms = [each.settings.get("norm", "") for each in measured]
    labels = short_labels(measured)
    if len(set(norms)) == 1:
        labels = [f"{norms[0]}, {label}" for label in labels]
    with drawing(5.6, 1.0 + 0.32 * len(measured)) as figure:
        axes = figure.subplots()
        for y, each in enumerate(measured):
            color = NORM_COLORS["agc"] if norms[y].startswith(NORM_NAMES["agc"]) else FAINT
            axes.barh(y, each.mean or 0.0, 0.72, color=color, alpha=0.8)
            seeds = [value for value in each.values if value is not None]
            if len(seeds) > 1:
                axes.plot(seeds, [y] * len(seeds), "o", markersize=2.5, color=INK, alpha=0.6)
            axes.annotate(
                f"{each.mean:.1f}",
                (max(seeds), y),
                (4, 0),
                textcoords="offset points",
                va="center",
                weight="bold",
            )
        axes.set_yticks(range(len(measured)), [ascii_name(label) for label in labels])
        axes.invert_yaxis()
        axes.set_title("Final error, %")
        axes.margins(x=0.12)
        tidy(axes)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0, labelsize=9)
    return figure


# The same color for a norm in all charts; variants of AGC differ in their dashes.
SERIES_STYLES = {
    "AGC+WS": (COLORS[0], DASHES[0]),
    "AGC+WN": (COLORS[0], DASHES[1]),
    "AGC": (COLORS[0], DASHES[2]),
    "BatchNorm": (COLORS[1], DASHES[0]),
    "WS+BN": (COLORS[1], DASHES[1]),
    "GroupNorm": (COLORS[2], DASHES[0]),
    "WS+GN": (COLORS[7], DASHES[0]),
    "FRN": (COLORS[5], DASHES[0]),
    "EvoNorm-S0": (COLORS[6], DASHES[0]),
    "LayerNorm": (COLORS[4], DASHES[0]),
    "no normalization": (COLORS[3], DASHES[0]),
}


def draw_sweep(sweep: Sweep) -> Figure:
    """Draw the final error over batch sizes or depths: a line of means for each norm.

    Bars are standard deviations over seeds. Crosses at the top mark points whose runs diverged.
    """
    xs = sorted({point.x for series in sweep.series for point in series.points})
    with drawing(7.0, 3.9) as figure:
        axes = figure.subplots()
        axes.set(title=sweep.title, xlabel=sweep.x_label, ylabel="final error, %")
        tidy(axes)
        diverged = []
        for i, series in enumerate(sweep.series):
            color, dashes = SERIES_STYLES.get(series.label, line_style(i))
            diverged += [(point.x, color) for point in series.points if point.error.diverged]
            points = [(p.x, m, p.error.std or 0.0) for p in series.points if (m := p.error.mean)]
            drawn = axes.errorbar(
                [x for x, _, _ in points],
                [mean for _, mean, _ in points],
                [std for _, _, std in points],
                color=color,
                marker="o",
                markersize=3.5,
                linewidth=1.6,
                capsize=3,
                label=series.label,
            )
            drawn.lines[0].set_dashes(dashes or (None, None))
        for x, color in diverged:
            axes.plot(x, 0.97, "x", color=color, mew=1.6, transform=axes.get_xaxis_transform())
        if xs:
            axes.set_xscale("log", base=2)
            axes.set_xticks(xs, [str(x) for x in xs])
            axes.minorticks_off()
            # Beside the lines, which may fill the whole chart.
            axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


# Panels of a study: a line is an arm over several seeds

METRIC_LABELS = {"val_error": "validation error, %", "val_loss": "validation loss"}
FACTORS = {"val_error": 100.0, "val_loss": 1.0}
IN_CHART = 5  # up to this many entries, the legend is inside of the chart
USUAL = 0.99  # fraction of the later values inside the axis range; single spikes leave it

Runs = Mapping[str, Run]  # by name
Points = dict[int, float]  # by epoch
Range = tuple[float, float]
Ranges = dict[str, Range | None]  # y range of each panel by its letter; None without values


def draw_figure(panels: Sequence[Panel], runs: Runs, ranges: Ranges, subtitle: str) -> Figure:
    """Draw all panels in one figure, two in a row as in the paper."""
    rows = math.ceil(len(panels) / 2)
    with drawing(11, 3.75 * rows) as figure:
        legend = "Bold: mean over seeds. Thin: single seeds. Crosses: runs that diverged."
        figure.suptitle(f"{subtitle}\n{legend}", fontsize=9)
        for i, panel in enumerate(panels, 1):
            draw_panel(figure.add_subplot(rows, 2, i), panel, runs, ranges[panel.letter])
    return figure


def draw_one(panel: Panel, runs: Runs, shown: Range | None) -> Figure:
    """Draw a single panel, for a page that arranges panels by its width."""
    entries = legend_entries(panel, runs)
    below = math.ceil(entries / 2) if entries > IN_CHART else 0  # rows of the legend
    with drawing(5.2, 3.0 + 0.17 * below) as figure:
        draw_panel(figure.subplots(), panel, runs, shown)
    return figure


def own_ranges(panels: Sequence[Panel], runs: Runs) -> Ranges:
    """Return a range of the y axis for each panel."""
    return {panel.letter: usual_range(panel, runs) for panel in panels}


def paired_ranges(panels: Sequence[Panel], runs: Runs) -> Ranges:
    """Return ranges in which two error panels of a row share one axis."""
    found = own_ranges(panels, runs)
    for pair in zip(panels[::2], panels[1::2], strict=True):
        left, right = (found[panel.letter] for panel in pair)
        if left and right and all(panel.metric == "val_error" for panel in pair):
            both = min(left[0], right[0]), max(left[1], right[1])
            found |= {panel.letter: both for panel in pair}
    return found


def usual_range(panel: Panel, runs: Runs) -> Range | None:
    """Return the range after the first third of the epochs, without spikes."""
    lines = [runs_of(line, runs) for line in panel.lines]
    seeds = [p for of_line in lines for run in of_line if (p := points(run, panel.metric))]
    if not seeds:
        return None
    longest = max(max(of_run) for of_run in seeds)
    late = sorted(v for of_run in seeds for e, v in of_run.items() if e > longest / 3)
    values = late or sorted(v for of_run in seeds for v in of_run.values())
    low, high = values[0], values[round(USUAL * (len(values) - 1))]
    margin = 0.06 * (high - low) or 1.0
    return low - margin, high + margin


def draw_panel(axes: Axes, panel: Panel, runs: Runs, shown: Range | None) -> None:
    """Draw seeds as thin lines, their mean as a bold one, diverged runs as crosses."""
    axes.set_title(f"({panel.letter}) {panel.title}")
    axes.set(xlabel="epoch", ylabel=METRIC_LABELS[panel.metric])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes)
    if shown is None:
        axes.set(xticks=[], yticks=[])
        found = [run for line in panel.lines for run in runs_of(line, runs)]
        diverged = any(run.diverged is not None for run in found)
        words = "diverged in the first epoch" if diverged else "not run"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center")
        return
    axes.set_ylim(*shown)
    missing = [line for line in panel.lines if not runs_of(line, runs)]
    last = [
        draw_line(axes, line.label, runs_of(line, runs), panel.metric, line_style(i)[0])
        for i, line in enumerate(panel.lines)
        if len(missing) < 2 or line not in missing
    ]
    if len(missing) > 1:  # their labels would cover the curves
        axes.plot([], [], " ", label=f"{len(missing)} not run")
    axes.set_xlim(0, max(last) * 1.02)
    if legend_entries(panel, runs) <= IN_CHART:
        axes.legend(fontsize=8, framealpha=0.85, edgecolor="none")
    else:  # it would cover the curves
        below = (0.5, -0.16)
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=below, ncols=2)


def legend_entries(panel: Panel, runs: Runs) -> int:
    """Return a legend's number of entries; missing lines share one."""
    missing = sum(not runs_of(line, runs) for line in panel.lines)
    return len(panel.lines) - missing + min(missing, 1)


def draw_line(axes: Axes, label: str, runs: Sequence[Run], metric: str, color: str) -> int:
    """Draw the seeds of an arm, their mean and the crosses; return the last epoch."""
    label += seeds_text(runs)
    of_runs = [(run, points(run, metric)) for run in runs]
    seeds = [of_run for _, of_run in of_runs if of_run]
    for of_run in seeds if len(seeds) > 1 else []:
        axes.plot(list(of_run), list(of_run.values()), color=color, alpha=0.5, linewidth=0.8)
    # The mean is over the longest runs. A run that ended early must neither end nor bend it.
    longest = max((max(of_run) for of_run in seeds), default=0)
    complete = [of_run for of_run in seeds if longest in of_run]
    common = [e for e in (complete[0] if complete else {}) if all(e in of for of in complete)]
    means = [fmean(of_run[e] for of_run in complete) for e in common]
    crosses = [
        (run.diverged, of_run[max(of_run)] if of_run else math.inf)
        for run, of_run in of_runs
        if run.diverged is not None
    ]
    # If all runs diverged, the legend shows their cross, since the line is hardly visible.
    all_diverged = crosses and not any(of and run.diverged is None for run, of in of_runs)
    axes.plot(common, means, color=color, linewidth=1.8, label=None if all_diverged else label)
    _draw_crosses(axes, crosses, color, label if all_diverged else None)
    return max([longest, *(epoch for epoch, _ in crosses)])


def _draw_crosses(
    axes: Axes, at: Sequence[tuple[int, float]], color: str, label: str | None
) -> None:
    """Draw crosses at epochs and values; move those above the axis to its top."""
    bottom, edge = axes.get_ylim()
    top = edge - 0.04 * (edge - bottom)
    x, y = [epoch for epoch, _ in at], [min(value, top) for _, value in at]
    if at:
        axes.plot(x, y, "x", markersize=7, mew=1.6, color=color, label=label)


def seeds_text(runs: Sequence[Run]) -> str:
    """Return the number of seeds for the legend, such as " (3 seeds, 1 diverged)"."""
    diverged = sum(run.diverged is not None for run in runs)
    count = sum(run.epochs_done > 0 or run.diverged is not None for run in runs)
    if not count:
        return ": not run"
    seeds = f"{count} seeds" * (count > 1)
    ended = ("diverged" if diverged == count else f"{diverged} diverged") * (diverged > 0)
    words = ", ".join(filter(None, (seeds, ended)))
    return f" ({words})" if words else ""


def runs_of(line: Line, runs: Runs) -> list[Run]:
    """Return those runs of a line that have a record."""
    return [runs[name] for name in line.runs if name in runs and runs[name].metrics]


def points(run: Run, metric: str) -> Points:
    """Return a metric from epoch 1 on. Epoch 0 would compress the scale."""
    pairs = zip(*run.series(metric), strict=True)
    return {epoch: FACTORS[metric] * value for epoch, value in pairs if epoch > 0}
