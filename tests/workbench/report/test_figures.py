"""Charts as files."""

from pathlib import Path

import numpy as np
from PIL import Image

from deepcontrol.workbench.report.depth import draw_multiples
from deepcontrol.workbench.report.figures import COLORS, drawing, save_figure
from deepcontrol.workbench.report.layers import STATISTICS, Track


def test_a_line_keeps_its_color_in_a_png(tmp_path: Path) -> None:
    """However few of its pixels there are beside the others' shades."""
    with drawing(8, 8) as figure:
        axes = figure.subplots()
        for i in range(60):
            axes.plot([0, 1], [i, i + 30], color=COLORS[i % 3], alpha=0.3 + i / 100)
        for i, color in enumerate(COLORS):
            axes.plot([0, 0.1], [i - 20, i - 20], color=color, label=color)
        axes.legend()
    save_figure(figure, tmp_path / "lines")
    picture = Image.open(tmp_path / "lines.png")
    assert picture.mode == "P"  # small
    found = {rgb for _, rgb in picture.convert("RGB").getcolors() or []}
    for color in COLORS:
        rgb = tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))
        nearest = min(max(abs(a - b) for a, b in zip(rgb, f, strict=True)) for f in found)
        assert nearest <= 12, color


def test_the_lowest_chart_of_each_column_has_its_epochs() -> None:
    names = [f"layer.{i}" for i in range(5)]
    values = {statistic: np.ones((5, 3)) for statistic in STATISTICS}
    figure = draw_multiples(Track(names, [0, 1, 2], values), "lambda", 1.0, columns=3)
    charts = [axes for axes in figure.axes if axes.get_title(loc="left") or axes.get_title()]
    numbered = [axes.xaxis.get_tick_params()["labelbottom"] for axes in charts]
    assert numbered == [False, False, True, True, True]  # of the third column it is the first
