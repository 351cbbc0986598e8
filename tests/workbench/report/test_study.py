"""A study's page from made-up runs: no training, no torch."""

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from deepcontrol.workbench.cli import main
from tests.workbench.report.conftest import make_run
from tests.workbench.report.test_page import Tags


def make_study(folder: Path, **changes: Any) -> Path:
    """Two runs of AGC, which a panel draws, and one of BatchNorm that diverged."""
    make_run(folder / "runs" / "agc-s0")
    make_run(folder / "runs" / "agc-s1")
    gone = make_run(folder / "runs" / "bn-s0", epochs=1, norm="bn")
    (gone / "diverged.json").write_text('{"epoch": 2, "step": 3}')
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


def test_the_page_of_a_study(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study")
    assert main(["report", str(folder)]) == 0
    page = Tags((folder / "index.html").read_text())
    kinds = [source.split(";")[0] for source in page.sources()]
    svg, jpeg = "data:image/svg+xml", "data:image/jpeg"
    assert kinds == [svg] * (8 + 3) + [svg] * 2 + [jpeg]  # panels, lambda, a picture
    alts = [attributes.get("alt") for tag, attributes in page.found if tag == "img"]
    assert alts[7:9] == ["Panel h of figure 1: title h", "Panel a of figure 2: beside a"]
    for text in (
        "1 reproduced", "1 not reproduced", "1 undecided", "3 of 4 runs are done",
        "camvid at 256x512, 150 epochs, up to 2 seeds", "AGC: 9.90 ± 0.10 %",
        "within 1 points of 0",
        "deepcontrol reproduce --preset camvid --out runs/study",
        "deepcontrol train --out runs/bn-s1", "exit code 1: <b>no data</b>",
        "rate 0.64", "1 of 3 diverged", "a note on <this>",
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
        "| *final error*<br>AGC: 9.90 ± 0.10 %<br>BN: 9.70 ± 0.20 % "
        "| final error: differences within 1 points of 0 | not reproduced |"
    ) in table


def test_other_epochs_than_the_preset_has_are_said(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", preset_epochs=300)
    assert main(["report", str(folder)]) == 0
    for name in ("index.html", "verdicts.md"):
        text = unescape((folder / name).read_text())
        assert "150 epochs in place of the preset's 300, up to 2 seeds" in text


def test_a_study_of_which_nothing_has_run(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", runs=[], samples=[], layers=None, beside=[])
    assert main(["report", str(folder), "--out", str(tmp_path / "page")]) == 0
    page = Tags((tmp_path / "page" / "index.html").read_text())
    assert len(page.sources()) == 8
    assert "0 of 0 runs are done" in page.text
    assert "Figure 2" not in page.text
    assert not (tmp_path / "page" / "figures" / "figure2.png").exists()


@pytest.mark.parametrize(
    "changes", [{"format": 2}, {"claims": 3}, {"runs": [{"name": "../../x"}]}, {"panels": None}]
)
def test_a_broken_study_is_one_line(
    tmp_path: Path, changes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_study(tmp_path / "study", **changes)
    assert main(["report", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "study.json cannot be read" in said
    assert said.count("\n") == 1
