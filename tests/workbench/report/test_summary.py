"""The lead of a study's page: summary, final errors by batch size, short verdict rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.folders.runfolder import read_run
from deepcontrol.workbench.folders.studyfolder import (
    VERDICTS,
    CheckResult,
    ClaimResult,
    Entry,
    Line,
    Measurement,
    Panel,
    Study,
    StudyRuns,
    Verdict,
    read_study,
    write_study,
)
from deepcontrol.workbench.report.figures import draw_contenders, draw_final_errors
from deepcontrol.workbench.report.summary import (
    contenders,
    final_errors,
    runs_summary,
    study_summary,
)
from deepcontrol.workbench.report.text import (
    deciding_values,
    grouped_claims,
    measurement_label,
    short_labels,
)
from deepcontrol.workbench.study.arms import Arm, agc, bn
from deepcontrol.workbench.study.measures import FINAL
from deepcontrol.workbench.study.rules import measure_arm
from tests.workbench.report.conftest import make_run
from tests.workbench.report.test_page import Tags
from tests.workbench.report.test_study import make_study

VALUES = {  # final errors by arm
    "segnet-agc-b1-lr0.02": (7.5, 7.7),
    "segnet-agc-b4-lr0.08": (7.3, 7.5),
    "segnet-bn-b1-lr0.02": (9.0, 11.0),
    "segnet-bn-b4-lr0.08": (7.6, 7.6),
}


def settings(arm: str) -> dict[str, str]:
    """Return those of "AGC, batch 1, lr 0.02" for "segnet-agc-b1-lr0.02"."""
    _, norm, batch, lr = arm.split("-")
    return {"norm": norm.upper(), "batch": f"batch {batch[1:]}", "lr": f"lr {lr[2:]}"}


def measurement(arm: str, *values: float | None, diverged: int = 0) -> Measurement:
    return Measurement(
        measure="final error", arm=arm, settings=settings(arm), unit="%", values=values,
        diverged=diverged,
    )  # fmt: skip


def claim(verdict: Verdict, *operands: Measurement, beyond_paper: bool = False) -> ClaimResult:
    check = CheckResult(
        kind="difference", measure="final error", operands=operands, estimate=0.1, verdict=verdict
    )
    return ClaimResult(
        id=f"{verdict}-{beyond_paper}".replace(" ", "-"), text=f"It is {verdict}", paper="a number",
        beyond_paper=beyond_paper, verdict=verdict, checks=(check,),
    )  # fmt: skip


def make_batch_study(folder: Path) -> Path:
    """Write a study of AGC and BatchNorm at batch sizes 1 and 4."""
    lines: dict[str, list[Line]] = {"agc": [], "bn": []}
    for arm in VALUES:
        norm, batch, lr = arm.split("-")[1:]
        name = f"{arm}-s0"
        make_run(folder / "runs" / name, norm=norm, batch_size=int(batch[1:]), lr=float(lr[2:]))
        lines[norm].append(Line(f"batch {batch[1:]}", (name,)))
    make_study(folder / "other")
    study = read_study(folder / "other")
    agc, bn = ([measurement(a, *v) for a, v in VALUES.items() if n in a] for n in ("agc", "bn"))
    time = [
        Measurement(
            measure="step time",
            arm=norm,
            settings={"norm": norm},
            source="benchmark",
            values=(ms,),
        )
        for norm, ms in (("bn", 12.604), ("agc", 9.963))
    ]
    memory = [
        replace(m, measure="activation memory", values=(v,))
        for m, v in zip(time, (2560.0, 1280.0), strict=True)
    ]
    claims = (
        claim("reproduced", *agc),
        claim("not reproduced", *bn),
        claim("reproduced", *time, beyond_paper=True),
        claim("undecided", *memory, beyond_paper=True),
    )  # fmt: skip
    both = tuple(line for norm in lines for line in lines[norm][1:])
    panels = (
        Panel("a", "BN: batch sizes", "val_error", tuple(lines["bn"])),
        Panel("b", "AGC: batch sizes", "val_error", tuple(lines["agc"])),
        Panel("c", "AGC and BN, batch 4", "val_error", both),
        Panel("d", "not run", "val_error", (Line("AGC", ("gone-s0",)),)),
    )
    entries = tuple(
        Entry(name=f"{arm}-s0", label=arm, state="done", command="deepcontrol train")
        for arm in VALUES
    )
    write_study(
        folder,
        replace(study, claims=claims, figure1=panels, figure2=(), runs=entries, grid=(),
                pictured=(entries[0].name,), lambda_run=entries[0].name),
    )  # fmt: skip
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_batch_study(tmp_path / "study")


def read(folder: Path) -> tuple[Study, StudyRuns]:
    study = read_study(folder)
    return study, StudyRuns(folder, study)


def test_final_errors_by_norm_and_batch_size(folder: Path) -> None:
    errors = final_errors(*read(folder))
    means = {norm: {b: m.mean for b, m in of.items()} for norm, of in errors.items()}
    assert list(means) == ["agc", "bn"]
    assert means["agc"] == pytest.approx({1: 7.6, 4: 7.4})
    assert means["bn"] == pytest.approx({1: 10.0, 4: 7.6})


def test_study_without_batch_sizes_has_no_final_errors(tmp_path: Path) -> None:
    study, runs = read(make_study(tmp_path / "study"))
    assert final_errors(study, runs) == {}
    assert study_summary(study, {}) == (
        "Of the paper's 3 claims, 1 is reproduced, 1 is not reproduced and 1 is undecided."
    )


@pytest.mark.parametrize("value", [None, "4", -1, 0])
def test_wrong_settings_are_ignored(folder: Path, value: object) -> None:
    study, runs = read(folder)
    for run in runs.found.values():
        run.config["batch_size"] = value
    assert final_errors(study, runs) == {}


def test_summary_of_a_study(folder: Path) -> None:
    study, runs = read(folder)
    assert study_summary(study, final_errors(study, runs)) == (
        "SegNet on CamVid, 150 epochs: AGC ends at 7.6 and 7.4% wrong pixels at batch sizes 1 and "
        "4; BatchNorm at 10.0 and 7.6%. Between the batch sizes, the error differs by 0.2 points "
        "with AGC and 2.4 points with BatchNorm. On the benchmark's GPU at batch size 8, a "
        "training step takes 10.0 ms with AGC and 12.6 ms with BatchNorm, and the activations take "
        "1.2 and 2.5 GiB. Of the paper's 2 claims, 1 is reproduced and 1 is not reproduced. Of 2 "
        "claims beyond the paper, 1 is reproduced and 1 is undecided."
    )


def test_summary_names_divergence(folder: Path) -> None:
    study, _ = read(folder)
    bn = {
        1: measurement("segnet-bn-b1-lr0.02", None, 9.0, diverged=1),
        4: measurement("segnet-bn-b4-lr0.08", 7.6),
    }
    agc = {batch: measurement("segnet-agc-b1-lr0.02", 7.5) for batch in (1, 4)}
    assert study_summary(replace(study, claims=()), {"agc": agc, "bn": bn}) == (
        "SegNet on CamVid, 150 epochs: AGC ends at 7.5 and 7.5% wrong pixels at batch sizes 1 and "
        "4; BatchNorm at 7.6% at batch size 4. BatchNorm diverged in 1 of 2 runs at batch size 1."
    )
    (axes,) = draw_final_errors({"agc": agc, "bn": bn}).axes
    assert sorted(text.get_text() for text in axes.texts) == ["7.5", "7.5", "7.6", "diverged"]


def test_page_starts_with_summary_and_pictures(folder: Path) -> None:
    assert main(["report", str(folder)]) == 0
    html = (folder / "index.html").read_text()
    order = [
        "<h1", 'id="summary"', 'id="final-errors"', 'id="figure-1"', 'id="verdicts"',
        'id="group-reproduced"', 'id="group-not-reproduced"', 'id="group-beyond-the-paper"',
        'id="lambda"', 'id="predictions"', 'id="runs"', 'id="methods"',
    ]  # fmt: skip
    places = [html.index(part) for part in order]
    assert places == sorted(places)
    page = Tags(html)
    alts = [attributes.get("alt") for tag, attributes in page.found if tag == "img"]
    assert alts[0] == "Final error of SegNet by batch size and norm"
    assert alts[4] == "Panel d of figure 1: not run"
    assert "1 panel with missing runs" in page.text
    folded = [attributes for tag, attributes in page.found if tag == "details"]
    assert [a["id"] for a in folded if "open" in a] == [
        "group-reproduced", "group-not-reproduced", "group-beyond-the-paper",
    ]  # fmt: skip


def test_study_of_our_claims(folder: Path) -> None:
    """Claims are grouped by verdict, those without runs are folded, and bars lead the page."""
    study, _ = read(folder)
    agc, bn = (measurement(f"segnet-{norm}-b4-lr0.08", 7.0 + i, 7.5 + i) for i, norm in
               enumerate(("agc", "bn")))  # fmt: skip
    waiting = claim("undecided", agc, measurement("segnet-gn-b4-lr0.08"), beyond_paper=True)
    waiting = replace(
        waiting, id="waiting", checks=(replace(waiting.checks[0], problem="not run"),)
    )
    claims = tuple(
        replace(claim("reproduced", agc, bn, beyond_paper=True), id=f"c{i}", verdict=verdict)
        for i, verdict in enumerate(VERDICTS)
    )
    study = replace(
        study, claims=(waiting, *claims), figure1=(), figure2=study.figure1[:1],
        protocol=replace(study.protocol, name="segmentation-recipe"),
    )  # fmt: skip
    assert list(grouped_claims(study)) == [*VERDICTS, "missing runs"]
    assert [m.arm for m in contenders(study)] == ["segnet-agc-b4-lr0.08", "segnet-bn-b4-lr0.08"]
    write_study(folder, study)
    assert main(["report", str(folder)]) == 0
    page = Tags((folder / "index.html").read_text())
    assert "One recipe for segmentation on CamVid" in page.text
    assert "the lowest final error is 7.2%, with AGC, batch 4, lr 0.08" in page.text
    alts = [attributes.get("alt") for tag, attributes in page.found if tag == "img"]
    assert alts[0] == "Final error of each setting, lowest first"
    assert "paper" not in [a.get("data-label") for _, a in page.found]  # the same for all claims
    folded = [a for tag, a in page.found if tag == "details" and "group" in a.get("class", "")]
    assert [a["id"] for a in folded if "open" not in a] == ["group-missing-runs"]


def test_chart_of_contenders() -> None:
    measured = [
        measurement("segnet-agc+ws-b1-lr0.02", 8.0, 8.5), measurement("segnet-agc-b1-lr0.02", 11.0)
    ]  # fmt: skip
    (axes,) = draw_contenders(measured).axes
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["AGC+WS", "AGC"]
    assert [bar.get_width() for bar in axes.patches] == [8.25, 11.0]
    assert [text.get_text() for text in axes.texts] == ["8.2", "11.0"]
    batches = [measurement(f"segnet-agc-b{batch}-lr0.02", 8.0) for batch in (1, 4)]
    (axes,) = draw_contenders(batches).axes
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["AGC, batch 1", "AGC, batch 4"]


def test_short_row_shows_the_deciding_values() -> None:
    one, four = (measurement(arm, *values) for arm, values in list(VALUES.items())[:2])
    slow = [replace(m, measure="mean error over all epochs", values=(12.0,)) for m in (one, four)]
    good, bad = claim("reproduced", one, four), claim("undecided", *slow)
    mixed = replace(bad, checks=(*good.checks, *bad.checks))
    assert deciding_values(good) == ("final error", [("batch 1", "7.60 %"), ("batch 4", "7.40 %")])
    assert deciding_values(mixed)[0] == "mean error over all epochs"
    assert deciding_values(replace(good, checks=(replace(good.checks[0], operands=()),))) == (
        "",
        [],
    )


def test_short_labels_keep_learning_rates_that_differ_at_one_batch_size() -> None:
    arms = [agc(4), agc(8, 0.64, init="unit"), agc(8, 0.32)]
    assert short_labels([measure_arm(FINAL, arm, ()) for arm in arms]) == [
        "batch 4, lr 0.08", "batch 8, lr 0.64, unit init", "batch 8, lr 0.32",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        ([agc(1), agc(4)], ["batch 1", "batch 4"]),
        ([agc(4), agc(4, 0.16, init="unit")], ["lr 0.08", "lr 0.16, unit init"]),
        ([agc(4), agc(4, init="unit")], ["default", "unit init"]),
        ([agc(4), bn(4)], ["AGC", "BN"]),
        ([agc(4)], [""]),
    ],
)
def test_short_labels(arms: list[Arm], expected: list[str]) -> None:
    assert short_labels([measure_arm(FINAL, arm, ()) for arm in arms]) == expected


def test_short_labels_name_the_engine_of_a_benchmark() -> None:
    agc_step, bn_step = (
        Measurement(measure="", arm=norm, settings={"norm": norm}, engine="graph")
        for norm in ("AGC", "BN")
    )
    assert short_labels([agc_step, bn_step]) == ["AGC (graph)", "BN (graph)"]
    assert measurement_label(agc_step) == "AGC (graph)"


def test_summary_of_runs(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    assert runs_summary([run]) == "The lowest validation error is 25.00% after epoch 2."
    assert runs_summary([replace(run, metrics=[])]) == ""
