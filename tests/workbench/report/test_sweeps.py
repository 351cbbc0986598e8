"""The page of a study with sweeps: the chart, its grid, and the edges of the grid."""

from dataclasses import replace
from pathlib import Path

import pytest

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.folders.studyfolder import (
    Cell,
    Measurement,
    Point,
    Protocol,
    Series,
    Sweep,
    read_study,
    write_study,
)
from deepcontrol.workbench.report.figures import draw_sweep
from deepcontrol.workbench.report.summary import study_summary
from deepcontrol.workbench.report.text import edges_text, protocol_text, sweep_rows, sweep_table
from tests.workbench.report.test_page import Tags
from tests.workbench.report.test_study import error, make_study


def point(x: int, lrs: tuple[float, ...], chosen: int | None, measured: Measurement) -> Point:
    single = error("one", 50.0)
    cells = [
        Cell(batch=x, lr=lr, error=measured if i == chosen else single, is_best=i == chosen)
        for i, lr in enumerate(lrs)
    ]
    return Point(x, measured, tuple(cells))


SMALL, LARGE = (0.003, 0.01, 0.03), (0.1, 0.3, 1.0)
SWEEP = Sweep(
    "ResNet-20: error by batch size",
    "batch size",
    (
        Series(
            "AGC",
            (
                point(1, SMALL, 1, error("AGC", 30.0, 32.0, 34.0)),
                point(128, LARGE, 2, error("AGC", 20.0, 21.0, 22.0)),
            ),
        ),
        Series(
            "BatchNorm",
            (
                point(1, SMALL, None, error("BN", None, None, None, diverged=3)),
                point(128, LARGE, 1, error("BN", 20.5, 21.5, 22.5)),
            ),
        ),
        Series("GroupNorm", (point(1, SMALL, None, error("GN")),)),  # not chosen yet
    ),
)
PROTOCOL = Protocol(
    name="cifar-batch", data="cifar10", classnet_data="cifar10", size=(32, 32), epochs=3,
    schedule="cosine", warmup_epochs=0.25, weight_decay=5e-4, eval_batch_size=1000,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_study(
        tmp_path / "study",
        sweeps=(SWEEP, SWEEP),
        grid=(),
        figure1=(),
        figure2=(),
        protocol=PROTOCOL,
        preset_epochs=3,
    )


def test_page_with_sweeps(folder: Path) -> None:
    assert main(["report", str(folder)]) == 0
    page = Tags((folder / "index.html").read_text())
    alts = [attributes.get("alt") for tag, attributes in page.found if tag == "img"]
    assert alts[:2] == [SWEEP.title, SWEEP.title]  # the first one leads
    for text in (
        "ResNet-20 by batch size on CIFAR-10", "batch size", "lr 1)", "32.00 ± 2.00 (n=3)",
        "AGC at batch",
        "The final error is that of the last epoch", "fixed before the first run of this study",
        "cosine schedule, warm-up of 0.25 epochs, weight decay 0.0005",
    ):  # fmt: skip
        assert text in page.text, text
    for text in ("Figure 1", "last tenth", "SegNet"):
        assert text not in page.text, text
    best = [a for tag, a in page.found if tag == "td" and a.get("class") == "best"]
    assert len(best) == 2 * 3
    names = {path.name for path in (folder / "figures").iterdir()}
    assert {"sweep1.svg", "sweep1.png", "sweep2.svg"} <= names
    assert "figure1.png" not in names
    assert sweep_table(SWEEP) in (folder / "verdicts.md").read_text()


def test_sweeps_survive_a_round_trip(folder: Path, tmp_path: Path) -> None:
    study = read_study(folder)
    assert study.sweeps == (SWEEP, SWEEP)
    assert study.protocol == PROTOCOL
    write_study(tmp_path, study)
    assert read_study(tmp_path) == study


def test_studies_without_the_new_settings_have_the_papers(tmp_path: Path) -> None:
    protocol = read_study(make_study(tmp_path / "study")).protocol
    assert (protocol.schedule, protocol.warmup_epochs, protocol.weight_decay) == ("constant", 0, 0)
    assert protocol.augment is None
    assert "schedule" not in protocol_text(read_study(tmp_path / "study"))
    assert "schedule" not in (tmp_path / "study" / "study.json").read_text()


def test_table_and_edges() -> None:
    assert sweep_table(SWEEP).splitlines() == [
        "| batch size | AGC | BatchNorm | GroupNorm |",
        "| --- | --- | --- | --- |",
        "| 1 | 32.00 ± 2.00 % (n=3), lr 0.01 | 3 of 3 diverged | not run |",
        "| 128 | 21.00 ± 1.00 % (n=3), lr 1 | 21.50 ± 1.00 % (n=3), lr 0.3 |  |",
    ]
    assert edges_text(SWEEP).endswith("AGC at batch size 128 (lr 1).")
    rows = sweep_rows(SWEEP)
    assert [(x, lr) for x, lr, _ in rows] == [*((1, r) for r in SMALL), *((128, r) for r in LARGE)]
    assert [cell is not None for cell in rows[-1][2]] == [True, True, False]


def test_summary_names_the_lowest_errors(folder: Path) -> None:
    assert study_summary(read_study(folder), {}).startswith(
        "ResNet-20: error by batch size, lowest with AGC at 1 and 128 (21.0 to 32.0%). "
    )
    agc, bn, _ = SWEEP.series
    good = point(1, SMALL, 0, error("BN", 19.0))
    mixed = replace(SWEEP, series=(agc, replace(bn, points=(good, *bn.points[1:]))))
    study = replace(read_study(folder), sweeps=(mixed,), claims=())
    assert study_summary(study, {}) == (
        "ResNet-20: error by batch size, lowest with BatchNorm at 1 (19.0%) and with AGC at 128 "
        "(21.0%)."
    )
    alone = replace(SWEEP, series=(agc,))  # nothing to compare
    assert study_summary(replace(study, sweeps=(alone,)), {}) == ""


def test_chart_of_a_sweep() -> None:
    axes = draw_sweep(SWEEP).axes[0]
    lines = {c.get_label(): c.lines[0] for c in axes.containers}
    assert lines["AGC"].get_xydata().tolist() == [[1, 32], [128, 21]]
    assert lines["BatchNorm"].get_xydata().tolist() == [[128, 21.5]]
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [list(cross.get_xdata()) for cross in crosses] == [[1]]
    assert crosses[0].get_color() == lines["BatchNorm"].get_color()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "128"]
    assert draw_sweep(Sweep("empty", "x", ())).axes[0].get_title(loc="left") == "empty"


def test_sweeps_without_runs_are_left_out(folder: Path) -> None:
    empty = replace(SWEEP, title="Plain networks: error by depth", series=())
    write_study(folder, replace(read_study(folder), sweeps=(SWEEP, empty)))
    assert main(["report", str(folder)]) == 0
    for page in ("index.html", "verdicts.md"):
        text = (folder / page).read_text()
        assert SWEEP.title in text
        assert empty.title not in text
