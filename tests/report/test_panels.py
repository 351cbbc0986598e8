"""Figure 1's panels: what a line is the mean of, and what its legend says."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from deepcontrol.report.panels import draw_crosses, draw_line, how_many
from deepcontrol.report.runs import Run, read_run
from deepcontrol.report.study import Line
from tests.report.conftest import make_run


@pytest.fixture
def whole(tmp_path: Path) -> Run:
    return read_run(make_run(tmp_path / "whole"))


def cut(run: Run, epoch: int, diverged: bool) -> Run:
    kept = [row for row in run.metrics if row["epoch"] <= epoch]
    return replace(run, metrics=kept, diverged=epoch + 1 if diverged else None)


def test_a_run_that_ended_early_does_not_end_the_mean(whole: Run) -> None:
    axes = Figure().subplots()
    line = Line("AGC", [whole, cut(whole, 1, diverged=True), cut(whole, 0, diverged=True)])
    draw_line(axes, line, "val_error", "#123456")
    (mean,) = [drawn for drawn in axes.lines if drawn.get_label() == "AGC (3 seeds, 2 diverged)"]
    assert list(mean.get_xdata()) == list(range(1, whole.epochs_done + 1))
    axes.set_ylim(0, 1)
    draw_crosses(axes, line, "val_error", "#123456")
    # One run has a place to put it: at the top, since the error is above it.
    (cross,) = [drawn for drawn in axes.lines if drawn.get_marker() == "x"]
    assert cross.get_ydata()[0] == pytest.approx(0.96)


def test_legends(whole: Run) -> None:
    gone = cut(whole, 0, diverged=True)
    said = [how_many(Line("", runs)) for runs in ([], [whole], [gone], [whole, whole])]
    assert said == [": not run", "", " (diverged)", " (2 seeds)"]
