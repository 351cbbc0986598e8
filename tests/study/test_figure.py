"""Which lines the figures have, and what tells them apart."""

from pathlib import Path

import pytest

from deepcontrol.study.arms import agc, bn
from deepcontrol.study.claims import CLAIMS
from deepcontrol.study.figure import FIGURE_1, FIGURE_2, Panel
from deepcontrol.study.jobs import plan
from deepcontrol.study.presets import PRESETS
from deepcontrol.study.record import panels_beside


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


def test_beside_figure_1_is_only_what_can_be_compared(tmp_path: Path) -> None:
    preset = PRESETS["quick"]
    claims = [claim for claim in CLAIMS if claim.id in preset.claims]
    times = preset.rates_times
    claims = [claim.at_rates_times(times) for claim in claims]
    (batch_1,) = (panel for panel in panels_beside(plan(claims, preset, tmp_path, None), times)
                  if panel["letter"] == "a")  # fmt: skip
    runs = [line["runs"][0] for line in batch_1["lines"]]
    assert runs == [f"{arm.at_rate_times(times).name}-s0" for arm in (agc(1), bn(1))]
    assert [line["label"] for line in batch_1["lines"]] == ["AGC", "BN"]
