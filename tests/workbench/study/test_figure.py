"""Panels of the figures, and the grid of learning rates."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from deepcontrol.workbench.folders.studyfolder import Panel
from deepcontrol.workbench.report.text import measurement_text
from deepcontrol.workbench.study.arms import agc, bn
from deepcontrol.workbench.study.claims import CLAIMS
from deepcontrol.workbench.study.figure import FIGURE_1, FIGURE_2, PanelSpec, figure_2, lr_grid
from deepcontrol.workbench.study.jobs import Job, plan
from deepcontrol.workbench.study.settings import PRESETS, Preset
from tests.workbench.study.made_up import curve


@pytest.mark.parametrize("panel", FIGURE_1 + FIGURE_2)
def test_labels_within_a_panel_are_unique(panel: PanelSpec) -> None:
    labels = [panel.label(arm) for arm in panel.arms]
    assert len(set(labels)) == len(labels) > 1


def test_every_arm_is_drawn(tmp_path: Path) -> None:
    trained = {arm for claim in CLAIMS for arm in claim.arms}
    assert {arm for panel in FIGURE_1 + FIGURE_2 for arm in panel.arms} == trained
    jobs = plan(CLAIMS, PRESETS["camvid"], tmp_path, None)
    panels = figure_2_of(jobs, 1.0)
    assert [(p.letter, len(p.lines)) for p in panels] == [
        (panel.letter, len(panel.arms)) for panel in FIGURE_2
    ]
    assert all(len(line.runs) >= 3 for panel in panels for line in panel.lines)


def figure_2_of(jobs: Sequence[Job], lr_scale: float) -> tuple[Panel, ...]:
    runs = {job.arm: [j.name for j in jobs if j.arm == job.arm] for job in jobs}
    return figure_2(runs, lr_scale)


def of_claims(names: Sequence[str], preset: Preset, out: Path) -> dict[str, dict[str, list[str]]]:
    """Return figure 2 of a study of some claims: each line's runs by panel and label."""
    scale = preset.lr_scale
    claims = tuple(claim.scale_lr(scale) for claim in CLAIMS if claim.id in names)
    panels = figure_2_of(plan(claims, preset, out, None), scale)
    return {p.letter: {line.label: list(line.runs) for line in p.lines} for p in panels}


def test_a_quick_study_has_one_panel_in_figure_2(tmp_path: Path) -> None:
    preset = PRESETS["quick"]
    arms = {"AGC": agc(1), "BN": bn(1)}
    names = {label: arm.scale_lr(preset.lr_scale).name for label, arm in arms.items()}
    assert of_claims(preset.claims, preset, tmp_path) == {
        "a": {label: [f"{name}-s0", f"{name}-s1"] for label, name in names.items()}
    }


def test_a_panel_draws_only_trained_arms(tmp_path: Path) -> None:
    panels = of_claims(["identity"], PRESETS["camvid"], tmp_path)
    assert {letter: [*lines] for letter, lines in panels.items()} == {
        "b": ["default", "identity init"]
    }


def test_the_lowest_error_of_each_batch_size_is_best() -> None:
    curves = {
        agc(8, 0.64): [curve(9.0), curve(diverged=3)],
        agc(8): [curve(9.5), curve(10.5)],
        agc(8, 0.08): [curve(12.0)],
        agc(1): [curve(10.0)],
        agc(8, 0.32, init="identity"): [curve(1.0)],  # not the paper's initialization
        bn(8): [curve(1.0)],
        agc(4): [],
    }
    found = lr_grid(curves)
    assert [(cell.batch, cell.lr, cell.is_best) for cell in found] == [
        (1, 0.02, False),  # no other learning rate to compare with
        (8, 0.08, False),
        (8, 0.16, True),
        (8, 0.64, False),
    ]
    assert measurement_text(found[2].error) == "10.52 ± 0.71 % (n=2)"
    assert measurement_text(found[3].error) == "1 of 2 diverged"


def test_no_cell_is_best_if_all_diverged() -> None:
    found = lr_grid({agc(1): [curve(diverged=1)], agc(1, 0.16): [curve(diverged=1)]})
    assert [(cell.batch, cell.lr, cell.is_best) for cell in found] == [
        (1, 0.02, False),
        (1, 0.16, False),
    ]
    assert {measurement_text(cell.error) for cell in found} == {"1 of 1 diverged"}


def test_one_learning_rate_per_batch_size_gives_no_grid() -> None:
    assert lr_grid({agc(1): [curve()], agc(4): [curve()]}) == ()
