"""The study folder: study.json is written and read without loss, in both formats."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepcontrol.workbench.folders.studyfolder import (
    Measurement,
    StudyRuns,
    is_study,
    read_outline,
    read_study,
    write_study,
)
from tests.workbench.report.test_study import make_format_1, make_study

CAMVID = Path(__file__).parents[3] / "results" / "camvid"


def test_numbers_survive_a_round_trip(tmp_path: Path) -> None:
    study = read_study(make_study(tmp_path / "a"))
    (check,) = study.claims[0].checks
    assert (check.low, check.high, check.estimate) == (-1.0, 1.0, 0.2)
    assert check.operands[0].values == (9.8, 9.9, 10.0)
    assert study.grid[1].error.values == (9.0, 9.0, None)


def test_mean_and_standard_deviation() -> None:
    found = Measurement(measure="final error", arm="a", settings={"norm": "A"}, values=(1.0, 3.0))
    assert (found.n, found.mean, found.std) == (2, 2.0, pytest.approx(2**0.5))
    assert replace(found, values=(1.0,)).std is None
    incomplete = replace(found, values=(1.0, None), diverged=1)
    assert (incomplete.n, incomplete.mean, incomplete.std) == (2, None, None)
    assert replace(found, values=()).mean is None


def test_lookup_of_claims_and_measurements() -> None:
    study = read_study(CAMVID)
    error = study.measurement("segnet-agc-b1-lr0.02", "final error")
    assert error in study.claim("fig1b").measurements
    assert (error.n, error.unit) == (5, "%")
    with (CAMVID / "bench.csv").open() as file:
        steps = {(r["contender"], r["engine"]): r["ms_p50"] for r in csv.DictReader(file)}
    assert study.measurement("agc", "step time").values == (float(steps["agc", "graph"]),)
    assert study.claim("groupnorm").beyond_paper
    assert not study.claim("fig1a").beyond_paper
    for find in (lambda: study.claim("fig9"), lambda: study.measurement("agc", "fun")):
        with pytest.raises(KeyError):
            find()


def test_the_committed_study_survives_a_round_trip(tmp_path: Path) -> None:
    study = read_study(CAMVID)
    write_study(tmp_path, study)
    assert read_study(tmp_path) == study
    assert (tmp_path / "study.json").read_text() == (CAMVID / "study.json").read_text()


def test_format_2_has_labels_in_place_of_settings(tmp_path: Path) -> None:
    folder = CAMVID.with_name("cifar-batch")
    content = json.loads((folder / "study.json").read_text())
    assert content["format"] == 2
    labels = {
        operand["label"]
        for claim in content["claims"]
        for check in claim["checks"]
        for operand in check["operands"]
    }
    study = read_study(folder)
    found = {m.label: m.settings for claim in study.claims for m in claim.measurements}
    assert found.keys() == labels
    assert found["ResNet-20, BN, batch 128, lr 0.3"] == {
        "model": "ResNet-20", "norm": "BN", "batch": "batch 128", "lr": "lr 0.3",
    }  # fmt: skip
    write_study(tmp_path, study)
    assert json.loads((tmp_path / "study.json").read_text())["format"] == 3
    assert read_study(tmp_path) == study


def test_format_1_keeps_its_text(tmp_path: Path) -> None:
    study = read_study(make_format_1(tmp_path / "old"))
    claim = study.claims[0]
    assert [(m.label, m.text) for m in claim.measurements] == [
        ("AGC", "9.90 ± 0.10 %"),
        ("BN", "9.70 ± 0.20 %"),
    ]
    assert claim.checks[0].text["region"] == "within 1 points of 0"
    assert [cell.lr for cell in study.grid] == [0.16, 0.64, 0.02]
    assert study.protocol.lr_scale == 1.0
    assert read_outline(tmp_path / "old") == (study.protocol, {c.id for c in study.claims})


def test_a_value_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study")
    content = json.loads((folder / "study.json").read_text())
    del content["crc"]
    content["claims"][1]["checks"][0]["estimate"] = "0.20 points"
    (folder / "study.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"claims\[1\].checks\[0\].estimate is '0.20 points'"):
        read_study(folder)


def test_folders_without_a_study(tmp_path: Path) -> None:
    assert not is_study(tmp_path)
    assert read_outline(tmp_path) is None
    assert read_outline(tmp_path / "missing") is None
    with pytest.raises(ValueError, match=r"not a study folder: it has no study.json"):
        read_study(tmp_path)


def test_damaged_runs_are_described(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study")
    (folder / "runs" / "agc-s1" / "config.json").write_text("{")
    study = read_study(folder)
    runs = StudyRuns(folder, study)
    damage = {entry.name: runs.damage(entry) for entry in study.runs}
    assert "has no error and loss of epoch" in damage["agc-s0"]  # 3 of 5 epochs
    assert "cannot read" in damage["agc-s1"]
    assert damage["bn-s0"] == damage["bn-s1"] == ""  # diverged, failed
