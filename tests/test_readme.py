"""The README's Python runs as it stands, and its tree names files that exist."""

import json
import re
import runpy
from pathlib import Path
from statistics import fmean

import pytest

from deepcontrol.workbench.studyfolder import read_study

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_code_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)  # noqa: S102


def test_tree_is_true() -> None:
    tree = README.split("## How it is made")[1].split("Development:")[0]
    package = ROOT / "src" / "deepcontrol"
    for folder in (p for p in package.iterdir() if p.is_dir() and p.name != "__pycache__"):
        assert f"{folder.name}/" in tree, f"{folder.name}/ is missing from the README's tree"
    named = re.findall(r"[\w/]+\.py", tree)
    there = {p.name for p in package.rglob("*.py")}
    assert set(named) <= there, set(named) - there


def test_verdicts_are_those_of_the_committed_study() -> None:
    script = runpy.run_path(str(ROOT / "results" / "readme.py"))
    study = read_study(ROOT / "results" / "camvid")
    assert script["with_study"](README, study) == README, "make readme"


def test_main_figures_are_of_the_runs_that_they_name() -> None:
    for batch, rate in ((1, 0.02), (4, 0.08), (8, 0.16)):
        agc, bn = (_final_error(norm, batch, rate) for norm in ("agc", "bn"))
        row = rf"\| wrong pixels, batch {batch} \| {agc:.2f} ± \S+ % \| {bn:.2f} ± \S+ % \|"
        assert re.search(row, README), row


def _final_error(norm: str, batch: int, rate: float) -> float:
    """In per cent, over the last 15 epochs of all seeds there are."""
    runs = (ROOT / "results" / "camvid" / "runs").glob(f"segnet-{norm}-b{batch}-lr{rate}-s?")
    errors = []
    for run in runs:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        errors += [json.loads(line)["val_error"] for line in lines[-15:]]
    return 100 * fmean(errors)
