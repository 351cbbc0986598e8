"""Studies of the third part, from training to the page, with tiny networks."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.folders.studyfolder import read_study
from deepcontrol.workbench.study import settings

TINY: dict[str, Any] = {
    "data": "streets",
    "size": (32, 64),
    "width": 0.02,
    "epochs": 2,
    "train_limit": 7,
    "val_limit": 3,
    "eval_batch_size": 3,
}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_unrendered")]


def reproduce(name: Any, out: Path, *words: str, seeds: int) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    preset = replace(settings.PRESETS[name], seeds=seeds, **TINY)
    with patch.dict(settings.PRESETS, {name: preset}):
        return main(["reproduce", "--preset", name, "--out", str(out), "--slots", "2", *words])


def test_proposals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims = ("noise-loss-10", "noise-bn-10", "gems", "background-median", "lambda-starts")
    out, packed = tmp_path / "study", tmp_path / "packed"
    only = ("--only", ",".join((*claims, "momentum-0.999")))
    assert reproduce("proposals", out, *only, "--dry-run", seeds=1) == 0
    assert "10 runs to train: 140 images in 100 steps." in capsys.readouterr().out
    assert reproduce("proposals", out, *only, "--pack", str(packed), seeds=1) == 0
    study = read_study(packed)
    assert [claim.id for claim in study.claims] == [*claims[:4], "momentum-0.999", claims[4]]
    assert {entry.state for entry in study.runs} == {"done"}
    assert all(claim.verdict == "undecided" for claim in study.claims)  # one seed
    assert not study.figure1
    assert [panel.letter for panel in study.figure2] == list("abcdefg")
    page = (packed / "index.html").read_text()
    assert "Comparisons" in page
    assert "Figure 1" not in page
    noisy = packed / "runs" / "segnet-agc-b4-lr0.08-noise0.1-s0" / "config.json"
    assert json.loads(noisy.read_text())["config"]["noise"] == 0.1
    assert any("--noise 0.1" in entry.command for entry in study.runs)


def test_recipe_trains_the_best_learning_rates_further(tmp_path: Path) -> None:
    out = tmp_path / "study"
    assert reproduce("segmentation-recipe", out, seeds=2) == 0
    study = read_study(out)
    # The best learning rate of five, and of three with standardized filters, is trained again.
    assert len(study.runs) == 2 * 2 + 2 * (5 + 1) + (3 + 1)
    assert {entry.state for entry in study.runs} <= {"done", "diverged"}
    found = {m.measure for claim in study.claims for m in claim.measurements}
    assert found == {"final error", "final mean IoU", "final loss"}
    ious = [m for m in study.claim("recipe-iou").measurements if m.n == 2]
    assert len(ious) == 3
    assert all(0 <= value <= 100 for m in ious for value in m.values if value is not None)
    text = (out / "index.html").read_text()
    assert "strong augmentation" in text
    assert "no class weights" in text
