"""The chart tells what one call measured from what another did."""

from matplotlib.figure import Figure

from deepcontrol.workbench.bench.chart import draw_bars


def test_what_an_earlier_call_measured_is_marked() -> None:
    rows = [
        {"contender": "agc", "engine": "graph", "run": "2026-01-02"},
        {"contender": "agc", "engine": "eager", "run": "2026-01-01"},
    ]
    axes = Figure().subplots()
    draw_bars(axes, rows, [1.0, 2.0])
    assert [text.get_text() for text in axes.texts] == ["1", "~2"]
