"""Figure 1's panels: what a line is the mean of, and what its legend says."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from deepcontrol.workbench.report.panels import (
    common_ranges,
    draw_figure,
    draw_line,
    how_many,
    ranges,
)
from deepcontrol.workbench.report.study import Line, Panel
from deepcontrol.workbench.runfolder import Run, read_run
from tests.workbench.report.conftest import make_run


@pytest.fixture
def whole(tmp_path: Path) -> Run:
    return read_run(make_run(tmp_path / "whole"))


def cut(run: Run, epoch: int, diverged: bool) -> Run:
    kept = [row for row in run.metrics if row["epoch"] <= epoch]
    return replace(run, metrics=kept, diverged=epoch + 1 if diverged else None)


def test_a_run_that_ended_early_does_not_end_the_mean(whole: Run) -> None:
    axes = Figure().subplots()
    line = Line("AGC", [whole, cut(whole, 1, diverged=True), cut(whole, 0, diverged=True)])
    axes.set_ylim(0, 1)
    assert draw_line(axes, line, "val_error", "#123456") == whole.epochs_done
    (mean,) = [drawn for drawn in axes.lines if drawn.get_label() == "AGC (3 seeds, 2 diverged)"]
    assert list(mean.get_xdata()) == list(range(1, whole.epochs_done + 1))
    # At the epochs in which they diverged, and at the top: the errors are above it, or not known.
    (crosses,) = [drawn for drawn in axes.lines if drawn.get_marker() == "x"]
    assert list(crosses.get_xdata()) == [2, 1]
    assert list(crosses.get_ydata()) == pytest.approx([0.96, 0.96])


def test_where_all_diverged_the_legend_shows_a_cross(whole: Run) -> None:
    axes = Figure().subplots()
    draw_line(axes, Line("AGC", [cut(whole, 1, diverged=True)] * 2), "val_error", "#123456")
    (handle,), (label,) = axes.get_legend_handles_labels()
    assert (handle.get_marker(), handle.get_linestyle()) == ("x", "None")
    assert label == "AGC (2 seeds, diverged)"


def with_errors(run: Run, errors: list[float]) -> Run:
    rows = [{**run.metrics[-1], "epoch": e, "val_error": v} for e, v in enumerate(errors, 1)]
    return replace(run, metrics=rows)


def with_losses(run: Run, loss: float) -> Run:
    return replace(run, metrics=[{**row, "val_loss": loss} for row in run.metrics])


def test_a_spike_leaves_and_neighbors_share_their_axis(whole: Run) -> None:
    high = with_errors(whole, [0.5] * 50 + [0.3, 0.2] * 50 + [0.9])
    low = with_errors(whole, [0.1] * 150)
    kinds = {"a": ("val_error", high), "b": ("val_error", low), "c": ("val_error", low)}
    panels = [Panel(k, "", m, [Line("", [run])]) for k, (m, run) in kinds.items()]
    shown = common_ranges([*panels, Panel("d", "", "val_error", [Line("", [])])])
    assert shown["a"] == shown["b"]
    bottom, top = shown["a"] or (0, 0)
    assert bottom < 10
    assert 30 < top < 50
    assert shown["c"] == pytest.approx((9, 11))
    assert shown["d"] is None
    assert ranges(panels)["a"] != ranges(panels)["b"] == shown["c"]  # unless they are by themselves
    losses = [replace(panel, metric="val_loss") for panel in panels[:2]]
    losses[0] = replace(losses[0], lines=[Line("", [with_losses(whole, 3.0)])])
    assert len(set(common_ranges(losses).values())) == 2  # of different networks, as in the paper


def test_legends(whole: Run) -> None:
    gone = cut(whole, 0, diverged=True)
    said = [how_many(Line("", runs)) for runs in ([], [whole], [gone], [whole, whole])]
    assert said == [": not run", "", " (diverged)", " (2 seeds)"]


def test_an_odd_panel_has_a_row_to_itself(whole: Run) -> None:
    panels = [Panel(letter, "", "val_error", [Line("AGC", [whole])]) for letter in "abc"]
    figure = draw_figure(panels, ranges(panels), "words")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["(a) ", "(b) ", "(c) "]
    places = [axes.get_subplotspec() for axes in figure.axes]
    assert [(p.rowspan.start, p.colspan.start) for p in places if p] == [(0, 0), (0, 1), (1, 0)]
