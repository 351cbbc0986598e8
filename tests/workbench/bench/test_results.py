"""CSV files, tables and the chart."""

from pathlib import Path

from matplotlib.figure import Figure

from deepcontrol.workbench.bench.cases import Case
from deepcontrol.workbench.bench.measure import percentiles
from deepcontrol.workbench.bench.results import (
    draw_bars,
    draw_chart,
    has_row,
    read_rows,
    step_table,
    tables,
    write_rows,
)

COMMITTED = Path(__file__).parents[3] / "benchmarks" / "results"


def row(contender: str, engine: str, ms: float, **more: str) -> dict[str, str]:
    case = Case("segnet", contender, engine, 8, (256, 512), "bf16")
    return {**case.key, **percentiles("ms", [ms]), "activations_mib": "10.0", "run": "a", **more}


def test_has_row_needs_all_values_in_one_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    assert not has_row(out, {"seed": 0})  # no file
    write_rows(out, [{"seed": 0, "rate": 0.5, "error": 0.1}, {"seed": 1, "rate": 0.25}])
    assert has_row(out, {"seed": 0, "rate": 0.5})
    assert has_row(out, {"seed": 1})
    assert not has_row(out, {"seed": 1, "rate": 0.5})  # both values, but in two rows
    assert not has_row(out, {"seed": 1, "error": 0.1})


def test_values_of_earlier_versions_are_read_with_their_new_names(tmp_path: Path) -> None:
    old = [
        {"group": "fit", "contender": "agc"},
        {"group": "shares", "contender": "agc", "part": "optimiser"},
        {"group": "segnet", "contender": "agc"},
    ]
    write_rows(tmp_path / "old.csv", old)
    assert read_rows(tmp_path / "old.csv") == [
        {"group": "max-batch", "contender": "agc"},
        {"group": "profile", "contender": "agc", "part": "optimizer"},
        {"group": "segnet", "contender": "agc"},
    ]


def test_committed_results_are_readable() -> None:
    rows = read_rows(COMMITTED / "bench-cuda.csv")
    groups = {r["group"] for r in rows}
    assert groups == {"segnet", "resnet50", "unet3d", "ops", "profile", "max-batch"}
    assert "optimizer" in {r.get("part") for r in rows}
    titles = [str(table.title) for table in tables(rows)]
    assert titles[0] == "SegNet, 256x512, batch 8, bf16"
    assert titles[-1] == "Largest batch in 12 GiB (SegNet, 256x512)"


def test_ratios_are_relative_to_batchnorm_and_its_fastest_engine() -> None:
    rows = [
        row("agc", "graph", 6.0),
        row("bn", "eager", 12.0),
        row("bn", "compile+graph", 8.0, run="b"),
    ]
    table = step_table(rows)
    cells = [list(column.cells) for column in table.columns]
    assert cells[4] == ["0.500", "1.000", "~0.667"]
    assert cells[5] == ["~0.750", "~1.500", "1.000"]


def test_chart_shows_timed_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "chart.png"
    failed = {**Case("segnet", "gn", "eager", 8, (256, 512), "bf16").key, "error": "no memory"}
    assert not draw_chart([failed], path)
    assert draw_chart([row("agc", "graph", 6.0), row("bn", "eager", 12.0), failed], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(list(tables([row("agc", "graph", 6.0), failed]))) == 1


def test_chart_marks_values_of_an_earlier_run() -> None:
    rows = [
        {"contender": "agc", "engine": "graph", "run": "2026-01-02"},
        {"contender": "agc", "engine": "eager", "run": "2026-01-01"},
    ]
    axes = Figure().subplots()
    draw_bars(axes, rows, [1.0, 2.0])
    assert [text.get_text() for text in axes.texts] == ["1", "~2"]
