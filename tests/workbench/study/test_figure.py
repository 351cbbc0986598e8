"""Which lines the figures have, and what tells them apart."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from deepcontrol.workbench.study.arms import agc, bn
from deepcontrol.workbench.study.claims import CLAIMS
from deepcontrol.workbench.study.figure import FIGURE_1, FIGURE_2, Panel
from deepcontrol.workbench.study.jobs import plan
from deepcontrol.workbench.study.presets import PRESETS, Preset
from deepcontrol.workbench.study.record import panels_beside


@pytest.mark.parametrize("panel", FIGURE_1 + FIGURE_2)
def test_no_two_lines_of_a_panel_have_one_label(panel: Panel) -> None:
    labels = [panel.label(arm) for arm in panel.lines]
    assert len(set(labels)) == len(labels) > 1


def test_a_study_that_trains_every_arm_draws_every_arm(tmp_path: Path) -> None:
    trained = {arm for claim in CLAIMS for arm in claim.arms}
    assert {arm for panel in FIGURE_1 + FIGURE_2 for arm in panel.lines} == trained
    jobs = plan(CLAIMS, PRESETS["camvid"], tmp_path, None)
    panels = panels_beside(jobs, 1.0)
    assert [(p["letter"], len(p["lines"])) for p in panels] == [
        (panel.letter, len(panel.lines)) for panel in FIGURE_2
    ]
    assert all(len(line["runs"]) >= 3 for panel in panels for line in panel["lines"])


def beside(names: Sequence[str], preset: Preset, out: Path) -> dict[str, dict[str, list[str]]]:
    """Of a study of some claims: figure 2's panels, and each line's runs by its label."""
    times = preset.rates_times
    claims = tuple(claim.at_rates_times(times) for claim in CLAIMS if claim.id in names)
    panels = panels_beside(plan(claims, preset, out, None), times)
    return {p["letter"]: {line["label"]: line["runs"] for line in p["lines"]} for p in panels}


def test_a_quick_study_has_one_panel_beside_figure_1(tmp_path: Path) -> None:
    preset = PRESETS["quick"]
    arms = {"AGC": agc(1), "BN": bn(1)}
    names = {label: arm.at_rate_times(preset.rates_times).name for label, arm in arms.items()}
    assert beside(preset.claims, preset, tmp_path) == {
        "a": {label: [f"{name}-s0", f"{name}-s1"] for label, name in names.items()}
    }


def test_a_panel_draws_what_is_trained(tmp_path: Path) -> None:
    panels = beside(["identity"], PRESETS["camvid"], tmp_path)
    assert {letter: [*lines] for letter, lines in panels.items()} == {
        "b": ["He's, all learned", "identity"]
    }
