"""Claims on the paper's proposals and on the recipe: made-up curves decide each either way."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepcontrol.workbench.study.arms import Arm, Tuned, agc, bn, varied
from deepcontrol.workbench.study.claims import CLAIMS, Claim, judge
from deepcontrol.workbench.study.jobs import plan
from deepcontrol.workbench.study.measures import Curve
from deepcontrol.workbench.study.proposals import (
    BACKGROUNDS,
    GEMS,
    GEMS_CONTROL,
    MOMENTA,
    PROPOSAL_CLAIMS,
    PROPOSAL_PANELS,
    RECIPE_CLAIMS,
    RECIPE_PANELS,
    STANDARDIZED,
    STANDARDIZED_BN,
    best_bn,
    dropped,
    fast_lambda,
    noisy,
    with_momentum,
)
from deepcontrol.workbench.study.rules import Evidence
from deepcontrol.workbench.study.settings import PRESETS
from deepcontrol.workbench.train.config import Train
from tests.workbench.study.made_up import curve

CLAIM = {claim.id: claim for claim in (*PROPOSAL_CLAIMS, *RECIPE_CLAIMS)}
NUDGES = (-1, 0, 1)  # of three seeds
Changes = Mapping[Arm | Tuned, dict[str, Any]]  # error, loss, early, iou, lambdas

START_0, START_2 = varied(agc(1), lambda_start=0.0), varied(agc(1), lambda_start=2.0)
UNWEIGHTED, LONG = varied(agc(1), class_weights="none"), varied(agc(1), epochs=120)
MIDDLE = {"lambdas": (1.0, 0.8, 0.0)}
UNMOVED = {"lambdas": (1.0, 1.0, 0.95)}


def background(name: str) -> Arm:
    return varied(agc(1), background=name)


TRUE: dict[str, Changes] = {
    "noise-gap": {agc(4): {"loss": 0.6}},
    **{f"noise-loss-{p}": {noisy(agc(4), p / 100): {"loss": 0.4}} for p in (10, 30)},
    **{f"noise-closes-{p}": {agc(4): {"loss": 0.6}} for p in (10, 30)},
    **{f"noise-error-{p}": {noisy(agc(4), p / 100): {"error": 9.0}} for p in (10, 30)},
    **{f"noise-bn-{p}": {} for p in (10, 30)},
    "noise-dropout": {noisy(agc(4), 0.1): {"loss": 0.4}},
    "gems": {GEMS: {"error": 9.0}},
    "gems-early": {GEMS: {"early": -2.0}},
    "gems-control": {GEMS: {"error": 9.0}},
    **{f"background-{n.partition(':')[0]}": {background(n): {"error": 9.0}} for n in BACKGROUNDS},
    "background-same": {},
    "momentum-same": {with_momentum(0.97): {"error": 10.3}},
    "momentum-0.997": {with_momentum(0.997): {"error": 10.5}},
    "momentum-0.999": {with_momentum(0.999): {"error": 9.0}},
    "momentum-better": {with_momentum(0.99): {"error": 9.0}},
    "lambda-plain": {agc(1): MIDDLE},
    "lambda-lr": {fast_lambda(): MIDDLE},
    "lambda-starts": {},
    "lambda-start-0": {START_0: MIDDLE},
    "lambda-start-2": {START_2: MIDDLE},
    "lambda-weights": {UNWEIGHTED: MIDDLE},
    "lambda-epochs": {LONG: MIDDLE},
    "lambda-last-lr": {fast_lambda(): MIDDLE},
    "lambda-error": {},
    "recipe-error": {agc(1): {"error": 10.1}},
    "recipe-iou": {agc(1): {"iou": 59.5}},
    "recipe-loss": {agc(1): {"loss": 0.45}},
    "recipe-better": {agc(1): {"error": 9.0}},
    "recipe-ws-error": {STANDARDIZED: {"error": 10.1}},
    "recipe-ws-iou": {STANDARDIZED: {"iou": 59.5}},
    "recipe-ws-loss": {STANDARDIZED: {"loss": 0.45}},
    "recipe-ws-better": {STANDARDIZED: {"error": 9.0}},
    "recipe-ws": {STANDARDIZED: {"error": 9.0}},
    "recipe-ws-bn": {STANDARDIZED: {"error": 10.1}},
}
FALSE: dict[str, Changes] = {
    "noise-gap": {agc(4): {"loss": 0.4}},
    **{f"noise-loss-{p}": {noisy(agc(4), p / 100): {"loss": 0.6}} for p in (10, 30)},
    **{f"noise-closes-{p}": {noisy(agc(4), p / 100): {"loss": 0.6}} for p in (10, 30)},
    **{f"noise-error-{p}": {noisy(agc(4), p / 100): {"error": 11.0}} for p in (10, 30)},
    **{f"noise-bn-{p}": {noisy(bn(4), p / 100): {"loss": 0.4}} for p in (10, 30)},
    "noise-dropout": {noisy(agc(4), 0.1): {"loss": 0.4}, dropped(0.5): {"loss": 0.3}},
    "gems": {GEMS: {"error": 11.0}},
    "gems-early": {},
    "gems-control": {GEMS_CONTROL: {"error": 9.0}},
    **{f"background-{n.partition(':')[0]}": {background(n): {"error": 11.0}} for n in BACKGROUNDS},
    "background-same": {background("median"): {"error": 7.0}},
    "momentum-same": {with_momentum(0.99): {"error": 12.0}},
    "momentum-0.997": {with_momentum(0.997): {"error": 12.0}},
    "momentum-0.999": {with_momentum(0.999): {"error": 30.0}},
    "momentum-better": {with_momentum(0.99): {"error": 11.0}},
    "lambda-plain": {agc(1): UNMOVED},
    "lambda-lr": {fast_lambda(): UNMOVED},
    "lambda-starts": {fast_lambda(2.0): {"lambdas": (2.0, 1.8, 1.5)}},
    "lambda-start-0": {START_0: {"lambdas": (0.0, 0.1, 0.0)}},
    "lambda-start-2": {START_2: {"lambdas": (2.0, 1.9, 2.0)}},
    "lambda-weights": {UNWEIGHTED: UNMOVED},
    "lambda-epochs": {LONG: UNMOVED},
    "lambda-last-lr": {fast_lambda(): UNMOVED},
    "lambda-error": {fast_lambda(): {"error": 12.0}},
    "recipe-error": {best_bn(8): {"error": 9.0}},
    "recipe-iou": {best_bn(4): {"iou": 65.0}},
    "recipe-loss": {best_bn(8): {"loss": 0.3}},
    "recipe-better": {best_bn(4): {"error": 9.0}},
    "recipe-ws-error": {best_bn(8): {"error": 9.0}},
    "recipe-ws-iou": {best_bn(4): {"iou": 65.0}},
    "recipe-ws-loss": {best_bn(8): {"loss": 0.3}},
    "recipe-ws-better": {best_bn(4): {"error": 9.0}},
    "recipe-ws": {STANDARDIZED: {"error": 11.0}},
    "recipe-ws-bn": {STANDARDIZED_BN: {"error": 9.0}},
}


def run(
    seed: int, nudge: float, error: float = 10.0, loss: float = 0.5, iou: float = 60.0,
    early: float = 0.0, lambdas: tuple[float, float, float] = (1.0, 0.8, 0.0),
) -> Curve:  # fmt: skip
    """Return a finished run. The nudge is far below each margin."""
    of_layers = tuple(value + 0.002 * nudge * (1 + i) for i, value in enumerate(lambdas))
    made = curve(error + 0.03 * nudge - 0.5, loss=loss + 0.001 * nudge, early=early)
    shape = curve(lambdas=of_layers)  # type: ignore[arg-type]
    ious = (iou + 0.1 * nudge,) * len(made.errors)
    return replace(made, lambdas=shape.lambdas, seed=seed, schedule="cosine", ious=ious)


def evidence(claim: Claim, changes: Changes, nudges: tuple[int, ...] = NUDGES) -> Evidence:
    """Return runs over seeds. The second learning rate of each grid is the best."""
    curves: dict[Arm, list[Curve]] = {}
    for contender in claim.contenders:
        change = changes.get(contender, {})
        seeds = [run(seed, nudge, **change) for seed, nudge in enumerate(nudges)]
        if isinstance(contender, Arm):
            curves[contender] = seeds
            continue
        for i, arm in enumerate(contender.arms):
            curves[arm] = seeds if i == 1 else [run(0, 0, 15.0)]
    return Evidence(curves)


def test_every_claim_has_cases() -> None:
    assert set(TRUE) == set(FALSE) == set(CLAIM)
    assert len(CLAIM) == len(PROPOSAL_CLAIMS) + len(RECIPE_CLAIMS)
    assert not set(CLAIM) & {claim.id for claim in CLAIMS}
    assert all(claim.beyond_paper for claim in CLAIM.values())


@pytest.mark.parametrize("claim_id", TRUE)
def test_true_claims_are_reproduced(claim_id: str) -> None:
    judged = judge(CLAIM[claim_id], evidence(CLAIM[claim_id], TRUE[claim_id]))
    assert judged.verdict == "reproduced", judged.checks


@pytest.mark.parametrize("claim_id", FALSE)
def test_false_claims_are_not_reproduced(claim_id: str) -> None:
    judged = judge(CLAIM[claim_id], evidence(CLAIM[claim_id], FALSE[claim_id]))
    assert judged.verdict == "not reproduced", judged.checks


@pytest.mark.parametrize("claim_id", TRUE)
def test_one_seed_or_none_is_undecided(claim_id: str) -> None:
    for found in (evidence(CLAIM[claim_id], {}, (0,)), Evidence()):
        assert judge(CLAIM[claim_id], found).verdict == "undecided"


def test_a_diverged_run_has_no_iou() -> None:
    claim = CLAIM["recipe-iou"]
    found = evidence(claim, {})
    found.curves[agc(1)][:] = [replace(c, diverged=3) for c in found.curves[agc(1)]]  # type: ignore[index]
    assert judge(claim, found).verdict == "not reproduced"


@pytest.mark.parametrize("claims", [PROPOSAL_CLAIMS, RECIPE_CLAIMS])
def test_names_and_labels_of_arms_are_unique(claims: tuple[Claim, ...]) -> None:
    arms = {arm for claim in claims for arm in claim.arms}
    assert len({arm.name for arm in arms}) == len({str(arm) for arm in arms}) == len(arms)


def test_claims_train_every_line_of_the_panels() -> None:
    for claims, panels in (
        (PROPOSAL_CLAIMS, PROPOSAL_PANELS),
        (RECIPE_CLAIMS, RECIPE_PANELS),
    ):
        trained = {arm for claim in claims for arm in claim.arms}
        assert {arm for panel in panels for arm in panel.arms} <= trained


def test_momentum_has_the_step_length_of_the_paper() -> None:
    for momentum in MOMENTA:
        assert with_momentum(momentum).lr / (1 - momentum) == pytest.approx(0.02 / 0.1)


@pytest.mark.parametrize(
    ("name", "runs"), [("proposals", 78), ("proposals-small", 78), ("segmentation-recipe", 19)]
)
def test_plan_follows_the_claims(name: Any, runs: int, tmp_path: Path) -> None:
    """An interrupted study has the runs of the first claims, and all seeds of these."""
    preset = PRESETS[name]
    jobs = plan(preset.catalog, preset, tmp_path, tmp_path)
    assert len(jobs) == runs
    finished: list[str] = []
    for claim in preset.catalog:
        own = [job.name for job in jobs if job.arm in claim.arms]
        finished += [job for job in own if job not in finished]
        assert set(finished) == {job.name for job in jobs[: len(finished)]}
    seeds = [job.seed for job in jobs[:6]]
    assert seeds == sorted(seeds)


def test_recipe_is_that_of_train(tmp_path: Path) -> None:
    preset = PRESETS["segmentation-recipe"]
    for arm in (agc(1), bn(4)):
        mine = preset.config(arm, 0, tmp_path, tmp_path)
        best = Train(
            out=tmp_path, data="camvid", data_root=tmp_path, recipe="best", epochs=40,
            norm=arm.norm, batch_size=arm.batch, eval_batch_size=16, save_epochs=1000,
            lr=arm.lr, sample_epochs=(1, 40),
        )  # fmt: skip
        assert replace(mine, recipe="best", size=None) == best


def test_options_reach_the_run(tmp_path: Path) -> None:
    preset = PRESETS["proposals"]
    arm = varied(agc(1), epochs=120, gems="on", background="median", noise=0.1, lambda_lr=10.0)
    config = preset.config(arm, 2, tmp_path, tmp_path)
    found = (config.epochs, config.gems, config.background, config.noise, config.lambda_lr)
    assert found == (120, "on", "median", 0.1, 10.0)
    with pytest.raises(ValueError, match="no label for loss"):
        varied(agc(1), loss="dice")
