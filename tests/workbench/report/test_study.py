"""The page of a study, from made-up runs, for both formats of study.json."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.folders.studyfolder import (
    VERDICTS,
    Cell,
    CheckResult,
    ClaimResult,
    Entry,
    Line,
    Measurement,
    Panel,
    Protocol,
    Study,
    StudyRuns,
    read_study,
    write_study,
)
from tests.workbench.report.conftest import make_run
from tests.workbench.report.test_page import Tags


def make_runs(folder: Path) -> None:
    """Two runs with AGC, and one with BatchNorm that diverged."""
    make_run(folder / "runs" / "agc-s0")
    make_run(folder / "runs" / "agc-s1")
    diverged = make_run(folder / "runs" / "bn-s0", epochs=1, norm="bn")
    (diverged / "diverged.json").write_text('{"epoch": 2, "step": 3}')


def error(norm: str, *values: float | None, diverged: int = 0) -> Measurement:
    return Measurement(
        measure="final error", arm=norm.lower(), settings={"norm": norm}, unit="%", values=values,
        diverged=diverged,
    )  # fmt: skip


def make_study(folder: Path, **changes: Any) -> Path:
    """Write a study with a claim of each verdict."""
    make_runs(folder)
    claims = tuple(
        ClaimResult(
            id=verdict.replace(" ", "-"),
            text=f"It is {verdict}",
            paper="9.73 %",
            verdict=verdict,
            checks=(
                CheckResult(
                    kind="difference", measure="final error", unit="points", low=-1.0, high=1.0,
                    operands=(error("AGC", 9.8, 9.9, 10.0), error("BN", 9.5, 9.7, 9.9)),
                    estimate=0.2, interval_low=-0.1, interval_high=0.5, verdict=verdict,
                ),
            ),
            runs=("agc-s0",),
        )
        for verdict in VERDICTS
    )  # fmt: skip
    lines = (Line("AGC", ("agc-s0", "agc-s1")), Line("BN", ("bn-s0", "bn-s1")))
    study = Study(
        protocol=Protocol(
            name="camvid", data="camvid", classnet_data="camvid", size=(256, 512), epochs=150
        ),
        preset_epochs=150,
        seeds=2,
        note="a note on <this>",
        command="deepcontrol reproduce --preset camvid --out runs/study",
        claims=claims,
        grid=(
            Cell(batch=8, lr=0.16, error=error("AGC", 10.1, 10.3), is_best=True),
            Cell(batch=8, lr=0.64, error=error("AGC", 9.0, 9.0, None, diverged=1), is_best=False),
            Cell(batch=1, lr=0.02, error=error("AGC", 10.2, 10.4), is_best=False),
        ),
        figure1=tuple(
            Panel(
                letter,
                f"title {letter}",
                "val_loss" if letter in "ef" else "val_error",
                lines if letter != "d" else (),
            )
            for letter in "abcdefgh"
        ),
        figure2=tuple(Panel(letter, f"beside {letter}", "val_error", lines) for letter in "abc"),
        runs=tuple(
            Entry(name=name, label=f"label of {name}", state=state, fault=fault,
                  command=f"deepcontrol train --out runs/{name}")
            for name, state, fault in (
                ("agc-s0", "done", ""), ("agc-s1", "done", ""), ("bn-s0", "diverged", ""),
                ("bn-s1", "failed", "exit code 1: <b>no data</b>"),
            )
        ),
        pictured=("agc-s0", "bn-s1"),
        lambda_run="agc-s0",
    )  # fmt: skip
    write_study(folder, replace(study, **changes))
    return folder


def make_format_1(folder: Path, **changes: Any) -> Path:
    """Write the same study in format 1, which stored numbers as text."""
    make_runs(folder)
    check = {
        "quantity": "final error: AGC less BN",
        "region": "within 1 points of 0",
        "rule": "final error: differences within 1 points of 0",
        "found": "0.20 points, 90% within -0.10 and 0.50, 3 seeds",
    }
    claims = [
        {"id": verdict.replace(" ", "-"), "says": f"It is {verdict}", "paper": "9.73 %",
         "ours": [["final error", "AGC", "9.90 ± 0.10 %"], ["final error", "BN", "9.70 ± 0.20 %"]],
         "verdict": verdict,
         "checks": [{**check, "verdict": verdict}], "runs": ["agc-s0"]}
        for verdict in ("reproduced", "not reproduced", "undecided")
    ]  # fmt: skip
    lines = [
        {"label": "AGC", "runs": ["agc-s0", "agc-s1"]},
        {"label": "BN", "runs": ["bn-s0", "bn-s1"]},
    ]
    metrics = {"e": "val_loss", "f": "val_loss"}
    runs = [
        {"name": name, "label": f"label of {name}", "state": state, "fault": fault,
         "diverged": None, "command": f"deepcontrol train --out runs/{name}"}
        for name, state, fault in (
            ("agc-s0", "done", ""), ("agc-s1", "done", ""), ("bn-s0", "diverged", ""),
            ("bn-s1", "failed", "exit code 1: <b>no data</b>"),
        )
    ]  # fmt: skip
    content = {
        "format": 1,
        "protocol": {"name": "camvid", "data": "camvid", "size": [256, 512], "width": 1.0,
                     "epochs": 150, "train_limit": None},
        "preset_epochs": 150,
        "seeds": 2,
        "note": "a note on <this>",
        "command": "deepcontrol reproduce --preset camvid --out runs/study",
        "claims": claims,
        "grid": [
            {"batch": 8, "rate": 0.16, "error": "10.20 ± 0.10", "is_best": True},
            {"batch": 8, "rate": 0.64, "error": "1 of 3 diverged", "is_best": False},
            {"batch": 1, "rate": 0.02, "error": "10.30 ± 0.10", "is_best": False},
        ],
        "panels": [
            {"letter": letter, "title": f"title {letter}", "lines": lines if letter != "d" else [],
             "metric": metrics.get(letter, "val_error")}
            for letter in "abcdefgh"
        ],
        "beside": [
            {"letter": letter, "title": f"beside {letter}", "lines": lines, "metric": "val_error"}
            for letter in "abc"
        ],
        "runs": runs,
        "samples": ["agc-s0", "bn-s1"],
        "layers": "agc-s0",
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps({**content, **changes}))
    return folder


# Function that writes the study; unit and rule as the page shows them.
FORMATS = (
    (make_format_1, "%", "differences within 1 points of 0"),
    (make_study, "% (n=3)", "difference within 1 point of 0"),
)


@pytest.mark.parametrize(("make", "unit", "rule"), FORMATS)
def test_study_page(tmp_path: Path, make: Callable[[Path], Path], unit: str, rule: str) -> None:
    folder = make(tmp_path / "study")
    assert main(["report", str(folder)]) == 0
    page = Tags((folder / "index.html").read_text())
    kinds = [source.split(";")[0] for source in page.sources()]
    svg, jpeg = "data:image/svg+xml", "data:image/jpeg"
    assert kinds == [svg] * (8 + 3) + [svg] * 2 + [jpeg]  # panels, lambda, a picture
    alts = [attributes.get("alt") for tag, attributes in page.found if tag == "img"]
    letters = "abcefghd"  # panel d has no runs and is folded
    assert alts[:8] == [f"Panel {letter} of figure 1: title {letter}" for letter in letters]
    assert alts[8] == "Panel a of figure 2: beside a"
    assert "1 panel with missing runs" in page.text
    for text in (
        "1 reproduced", "1 not reproduced", "1 undecided", "3 of 4 runs finished",
        "camvid at 256x512, 150 epochs, up to 2 seeds", f"AGC: 9.90 ± 0.10 {unit}",
        rule.removeprefix("differences ").removeprefix("difference "),
        "deepcontrol reproduce --preset camvid --out runs/study",
        "deepcontrol train --out runs/bn-s1", "exit code 1: <b>no data</b>",
        "lr 0.64", "1 of 3 diverged", "a note on <this>",
    ):  # fmt: skip
        assert text in page.text, text
    assert {tag for tag, _ in page.found}.isdisjoint({"b", "script", "link", "iframe"})
    names = ("figure1", "figure2", "lambda", "lambda-layers")
    assert sorted(p.name for p in (folder / "figures").iterdir()) == sorted(
        f"{name}.{kind}" for name in names for kind in ("png", "svg")
    )
    table = (folder / "verdicts.md").read_text()
    assert (
        "| **not-reproduced** It is not reproduced | 9.73 % "
        f"| *final error*<br>AGC: 9.90 ± 0.10 {unit}<br>BN: 9.70 ± 0.20 {unit} "
        f"| final error: {rule} | not reproduced |"
    ) in table


def test_changed_epochs_are_noted(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", preset_epochs=300)
    assert main(["report", str(folder)]) == 0
    for name in ("index.html", "verdicts.md"):
        text = unescape((folder / name).read_text())
        assert "150 epochs instead of 300, up to 2 seeds" in text


def test_study_without_runs(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", runs=(), pictured=(), lambda_run=None, figure2=())
    assert main(["report", str(folder), "--out", str(tmp_path / "page")]) == 0
    page = Tags((tmp_path / "page" / "index.html").read_text())
    assert len(page.sources()) == 8
    assert "0 of 0 runs finished" in page.text
    assert "Figure 2" not in page.text
    assert not (tmp_path / "page" / "figures" / "figure2.png").exists()


BROKEN = (
    {"format": 4},
    {"claims": 3},
    {"runs": [{"name": "../../x"}]},
    {"runs": [{"name": "../../x", "label": "", "state": "done", "command": ""}]},
)


@pytest.mark.parametrize("make", [make_format_1, make_study])
@pytest.mark.parametrize("changes", [*BROKEN, {"panels": None, "figure1": None}])
def test_unreadable_study_is_one_error_line(
    tmp_path: Path, make: Callable[[Path], Path], changes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "study")
    content = json.loads((folder / "study.json").read_text())
    content.pop("crc", None)
    (folder / "study.json").write_text(json.dumps({**content, **changes}))
    assert main(["report", str(folder)]) == 1
    said = capsys.readouterr().err
    assert f"cannot read {folder / 'study.json'}" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "link", ["index.html", "verdicts.md", "figures", "figures/figure1.svg", "figures/figure1.png"]
)
def test_links_are_not_followed(
    link: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, elsewhere = make_study(tmp_path / "study"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    (folder / link).parent.mkdir(exist_ok=True)
    (folder / link).symlink_to(elsewhere if link == "figures" else elsewhere / "precious")
    assert main(["report", str(folder)]) == 1
    assert f"{link} is a symbolic link" in capsys.readouterr().err
    assert [(p.name, p.read_text()) for p in elsewhere.iterdir()] == [("precious", "mine")]


def test_runs_behind_links_are_not_shown(tmp_path: Path) -> None:
    """A downloaded study must not put another run of this machine onto its page."""
    folder = make_study(tmp_path / "study")
    (folder / "runs" / "agc-s1").rename(tmp_path / "own")
    (folder / "runs" / "agc-s1").symlink_to(tmp_path / "own")
    study = read_study(folder)
    assert StudyRuns(folder, study).errors == {
        "agc-s1": "its folder is a link out of the study folder"
    }


def test_full_disk_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_study(tmp_path / "study")
    assert main(["report", str(folder)]) == 0
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert main(["report", str(folder)]) == 1
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
