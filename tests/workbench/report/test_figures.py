"""Charts: export, heat maps, and the panels of a study."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from deepcontrol.workbench.folders.runfolder import Run, read_run
from deepcontrol.workbench.folders.studyfolder import Line, Metric, Panel
from deepcontrol.workbench.report.figures import (
    COLORS,
    draw_figure,
    draw_line,
    drawing,
    own_ranges,
    paired_ranges,
    save_figure,
    seeds_text,
)
from deepcontrol.workbench.report.layers import STATISTICS, Track, draw_multiples
from tests.workbench.report.conftest import make_run


def test_png_keeps_line_colors(tmp_path: Path) -> None:
    """Colors of few pixels must survive the reduction to 256 colors."""
    with drawing(8, 8) as figure:
        axes = figure.subplots()
        for i in range(60):
            axes.plot([0, 1], [i, i + 30], color=COLORS[i % 3], alpha=0.3 + i / 100)
        for i, color in enumerate(COLORS):
            axes.plot([0, 0.1], [i - 20, i - 20], color=color, label=color)
        axes.legend()
    save_figure(figure, tmp_path, "lines")
    picture = Image.open(tmp_path / "figures" / "lines.png")
    assert picture.mode == "P"  # small
    found = {rgb for _, rgb in picture.convert("RGB").getcolors() or []}
    for color in COLORS:
        rgb = tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))
        nearest = min(max(abs(a - b) for a, b in zip(rgb, f, strict=True)) for f in found)
        assert nearest <= 12, color


def test_lowest_chart_of_each_column_has_epoch_labels() -> None:
    names = [f"layer.{i}" for i in range(5)]
    values = {statistic: np.ones((5, 3)) for statistic in STATISTICS}
    figure = draw_multiples(Track(names, [0, 1, 2], values), "lambda", 1.0, columns=3)
    charts = [axes for axes in figure.axes if axes.get_title(loc="left") or axes.get_title()]
    numbered = [axes.xaxis.get_tick_params()["labelbottom"] for axes in charts]
    assert numbered == [False, False, True, True, True]  # the third column has one chart


@pytest.fixture
def whole(tmp_path: Path) -> Run:
    return read_run(make_run(tmp_path / "whole"))


def cut(run: Run, epoch: int, diverged: bool) -> Run:
    kept = [row for row in run.metrics if row["epoch"] <= epoch]
    return replace(run, metrics=kept, diverged=epoch + 1 if diverged else None)


def test_mean_continues_after_a_run_diverged(whole: Run) -> None:
    axes = Figure().subplots()
    runs = [whole, cut(whole, 1, diverged=True), cut(whole, 0, diverged=True)]
    axes.set_ylim(0, 1)
    assert draw_line(axes, "AGC", runs, "val_error", "#123456") == whole.epochs_done
    (mean,) = [drawn for drawn in axes.lines if drawn.get_label() == "AGC (3 seeds, 2 diverged)"]
    assert list(mean.get_xdata()) == list(range(1, whole.epochs_done + 1))
    # Crosses mark the epochs of divergence, at the top: the errors exceed the axis or are unknown.
    (crosses,) = [drawn for drawn in axes.lines if drawn.get_marker() == "x"]
    assert list(crosses.get_xdata()) == [2, 1]
    assert list(crosses.get_ydata()) == pytest.approx([0.96, 0.96])


def test_legend_shows_a_cross_if_all_runs_diverged(whole: Run) -> None:
    axes = Figure().subplots()
    draw_line(axes, "AGC", [cut(whole, 1, diverged=True)] * 2, "val_error", "#123456")
    (handle,), (label,) = axes.get_legend_handles_labels()
    assert (handle.get_marker(), handle.get_linestyle()) == ("x", "None")
    assert label == "AGC (2 seeds, diverged)"


def with_errors(run: Run, errors: list[float]) -> Run:
    rows = [{**run.metrics[-1], "epoch": e, "val_error": v} for e, v in enumerate(errors, 1)]
    return replace(run, metrics=rows)


def with_losses(run: Run, loss: float) -> Run:
    return replace(run, metrics=[{**row, "val_loss": loss} for row in run.metrics])


def panel(letter: str, metric: Metric = "val_error", runs: Sequence[str] = ()) -> Panel:
    return Panel(letter, "", metric, (Line("AGC", tuple(runs)),))


def test_axis_excludes_spikes_and_is_shared_in_a_row(whole: Run) -> None:
    high = with_errors(whole, [0.5] * 50 + [0.3, 0.2] * 50 + [0.9])
    low = with_errors(whole, [0.1] * 150)
    runs = {"a": high, "b": low, "c": low}
    panels = [panel(letter, runs=[letter]) for letter in "abc"]
    shown = paired_ranges([*panels, panel("d")], runs)
    assert shown["a"] == shown["b"]
    bottom, top = shown["a"] or (0, 0)
    assert bottom < 10
    assert 30 < top < 50
    assert shown["c"] == pytest.approx((9, 11))
    assert shown["d"] is None
    own = own_ranges(panels, runs)
    assert own["a"] != own["b"] == shown["c"]
    losses = [panel(letter, "val_loss", [letter]) for letter in "ab"]
    runs["a"] = with_losses(whole, 3.0)
    # Losses of different networks keep their own axes, as in the paper.
    assert len(set(paired_ranges(losses, runs).values())) == 2


def test_legend_counts_seeds(whole: Run) -> None:
    gone = cut(whole, 0, diverged=True)
    texts = [seeds_text(runs) for runs in ([], [whole], [gone], [whole, whole])]
    assert texts == [": not run", "", " (diverged)", " (2 seeds)"]


def test_odd_number_of_panels(whole: Run) -> None:
    runs = {"whole": whole}
    panels = [panel(letter, runs=["whole"]) for letter in "abc"]
    figure = draw_figure(panels, runs, own_ranges(panels, runs), "subtitle")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["(a) ", "(b) ", "(c) "]
    places = [axes.get_subplotspec() for axes in figure.axes]
    assert [(p.rowspan.start, p.colspan.start) for p in places if p] == [(0, 0), (0, 1), (1, 0)]
