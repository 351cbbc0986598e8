"""A study with tuned learning rates, end to end on a tiny Fashion-MNIST."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.folders.studyfolder import read_study
from deepcontrol.workbench.study import settings
from tests.workbench.data.classification import write_idx

TINY = replace(
    settings.PRESETS["fashion-mlp"], width=0.02, epochs=1, seeds=2, claims=("mlp-bn-small",)
)
GRIDS = {f"mlp-{norm}-b4-lr{lr:g}" for norm in ("agc", "bn") for lr in (0.001, 0.003, 0.01)}


def reproduce(root: Path, out: Path, *words: str) -> int:
    with patch.dict(settings.PRESETS, {"fashion-mlp": TINY}):
        asked = ["reproduce", "--preset", "fashion-mlp", "--data-root", str(root), "--slots", "1"]
        return main([*asked, "--out", str(out), *words])


@pytest.mark.slow
@pytest.mark.usefixtures("_unrendered")
def test_a_tuned_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out, packed = tmp_path / "data", tmp_path / "study", tmp_path / "packed"
    write_idx(root)
    assert reproduce(root, out, "--dry-run") == 0
    said = capsys.readouterr().out
    assert all(f"{name}-s0" in said for name in GRIDS)
    assert "0 of 6 runs finished" in said
    assert "Further seeds of each best learning rate follow." in said

    assert reproduce(root, out, "--pack", str(packed)) == 0
    assert "8 of 8 runs finished." in capsys.readouterr().out
    study = read_study(out)
    names = [run.name for run in study.runs]
    assert {name.removesuffix("-s0") for name in names if name.endswith("-s0")} == GRIDS
    further = [name.removesuffix("-s1") for name in names if name.endswith("-s1")]
    (sweep,) = study.sweeps
    chosen = {series.label: series.points[0] for series in sweep.series}
    assert set(chosen) == {"AGC", "BatchNorm"}  # LayerNorm and none are not part of the claim
    assert {f"mlp-{norm}-b4-lr{chosen[label].lr:g}" for label, norm in
            (("AGC", "agc"), ("BatchNorm", "bn"))} == set(further)  # fmt: skip
    for label, point in chosen.items():
        assert (point.x, point.error.n, point.error.diverged) == (4, 2, 0), label
        assert [cell.error.n for cell in point.tried].count(1) == 2
        first = [cell.error.values[0] for cell in point.tried]
        best = [cell.error.values[0] for cell in point.tried if cell.is_best]
        assert best == [min(value for value in first if value is not None)]
    (claim,) = study.claims
    assert {m.arm for m in claim.measurements} == set(further)
    assert study.protocol.schedule == "cosine"
    assert study.figure1 == ()
    assert read_study(packed).claims == study.claims
    assert read_study(packed).sweeps == study.sweeps
    assert all((packed / "figures" / f"sweep1.{kind}").exists() for kind in ("png", "svg"))
    assert "## Fully connected network: error by batch size" in (packed / "verdicts.md").read_text()

    # Another call trains nothing, and a packed study can be continued.
    before = {p: p.stat().st_mtime_ns for p in out.glob("runs/*/metrics.jsonl")}
    assert reproduce(root, out) == reproduce(root, packed) == 0
    assert {p: p.stat().st_mtime_ns for p in out.glob("runs/*/metrics.jsonl")} == before
    # One seed more: only the chosen learning rates gain one.
    assert reproduce(root, packed, "--seeds", "3") == 0
    runs = json.loads((packed / "study.json").read_text())["runs"]
    assert sorted(run["name"] for run in runs if run["name"].endswith("-s2")) == sorted(
        f"{name}-s2" for name in further
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_unrendered")
def test_a_tuned_study_of_ensembles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = tmp_path / "data", tmp_path / "study"
    write_idx(root)
    assert reproduce(root, out, "--at-once", "6") == 0
    said = capsys.readouterr().out
    assert (
        "8 of 8 runs finished." in said
    )  # of each norm: 3 learning rates, then the best once more
    assert "with 2 others" in said
    study = read_study(out)
    (sweep,) = study.sweeps
    for series in sweep.series:
        (point,) = series.points
        first = [cell.error.values[0] for cell in point.tried]
        assert point.error.values[0] == min(value for value in first if value is not None)
        assert point.error.n == 2
    # Without ensembles the study is the same: nothing is left to train.
    before = {p: p.stat().st_mtime_ns for p in out.glob("runs/*/metrics.jsonl")}
    assert reproduce(root, out) == 0
    assert {p: p.stat().st_mtime_ns for p in out.glob("runs/*/metrics.jsonl")} == before
    assert [c.checks for c in read_study(out).claims] == [c.checks for c in study.claims]
