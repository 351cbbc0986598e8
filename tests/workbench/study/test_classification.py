"""Claims on classification and depth: each can be decided either way by made-up curves."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from deepcontrol.workbench.report.text import check_found
from deepcontrol.workbench.study.arms import Arm, Tuned
from deepcontrol.workbench.study.claims import CLAIMS, Claim, judge
from deepcontrol.workbench.study.classification import (
    BATCH_CLAIMS,
    BATCH_LRS,
    BATCH_SWEEP,
    DEPTH_CLAIMS,
    DEPTH_SWEEPS,
    LONG_CLAIMS,
    LONG_SWEEP,
    MLP_CLAIMS,
    MLP_SWEEP,
    PEERS,
    at,
    deep,
    mlp,
    part,
    trained_long,
)
from deepcontrol.workbench.study.measures import Curve
from deepcontrol.workbench.study.rules import Evidence
from tests.workbench.study.made_up import curve

CATALOGS = (BATCH_CLAIMS, DEPTH_CLAIMS, LONG_CLAIMS, MLP_CLAIMS)
SECOND_PART = [claim for claims in CATALOGS for claim in claims]
CLAIM = {claim.id: claim for claim in SECOND_PART}
NUDGES = (-0.05, 0.0, 0.05)  # of three seeds
DIVERGED = float("inf")

Errors = Mapping[Arm | Tuned, float]  # of the contenders whose error is not 10%

WORSE_NONE = {deep("none", f"{kind}{d}"): 14.0 for kind in ("resnet", "plain") for d in (20, 56)}  # type: ignore[arg-type]
TRUE: dict[str, Errors] = {
    "batch-bn": {at("bn", 1): 40, at("bn", 2): 20},
    "batch-bn-middle": {},
    "batch-large": {at("agc+wn", 32): 10.2, at("agc+wn", 128): 5},
    **{
        f"batch-{name}": {at(norm, batch): 12.0 for batch in (1, 2, 4, 8)}
        for name, norm in PEERS.items()
    },
    "batch-large-peers": {},
    "batch-flat": {at("bn", 1): 40, at("agc+wn", 1): 12},
    "weight-norm": {at("agc", 8): 12, at("agc", 128): 12},
    "ws-bn": {at("bn", 1): 40, at("bn", 2): 20},
    "ws-bn-large": {at("agc+ws", 128): 10.2},
    "ws-peers": {at(norm, b): 12.0 for norm in ("gn", "frn", "evonorm-s0") for b in (1, 2, 4, 8)},  # type: ignore[arg-type]
    "ws-wsgn": {at("agc+ws", 1): 10.2},
    "ws-wsbn": {at("agc+ws", 8): 10.2},
    "ws-wn": {at("agc+wn", 8): 12, at("agc+wn", 128): 12},
    "parts-lambda": {part(fixed_lambda=0.0): 40},
    "parts-gamma": {part(fixed_gamma=1.0): 12},
    "depth-bn-20": {deep("agc+wn", "resnet20"): 10.2},
    "depth-bn-56": {deep("agc+wn", "resnet56"): 9},
    "depth-bn-110": {},
    **{f"depth-ws-bn-{d}": {deep("agc+ws", f"resnet{d}"): 10.2} for d in (20, 56, 110)},  # type: ignore[arg-type]
    "depth-gn": {deep("gn", m): 12 for m in ("resnet20", "resnet56", "resnet110")},  # type: ignore[arg-type]
    "depth-none": {deep("none", "resnet110"): DIVERGED},
    "depth-none-shallow": WORSE_NONE,
    "depth-plain": {},
    "depth-plain-bn": {deep("agc+wn", "plain20"): 10.5},
    "depth-plain-deep": {deep("bn", "plain56"): 30},
    "depth-ws-plain": {deep("bn", "plain56"): 30},
    "depth-plain-gn": {deep("gn", m): 12 for m in ("plain20", "plain56", "plain110")},  # type: ignore[arg-type]
    "depth-plain-none": {**WORSE_NONE, deep("none", "plain110"): DIVERGED},
    "long-ws-bn": {trained_long("agc+ws"): 10.3},
    "long-published": {trained_long("bn"): 9.0},
    "mlp-none": {mlp("none", 64): 11, mlp("none", 4): 11},
    "mlp-ln": {},
    "mlp-bn": {mlp("bn", 64): 11},
    "mlp-bn-small": {mlp("bn", 4): 11},
}
FALSE: dict[str, Errors] = {
    "batch-bn": {at("bn", 1): 40, at("bn", 2): 8},
    "batch-bn-middle": {at("agc+wn", 4): 12},
    "batch-large": {at("agc+wn", 32): 10.2, at("agc+wn", 128): 11},
    **{f"batch-{name}": {at(norm, 4): 8.0} for name, norm in PEERS.items()},
    "batch-large-peers": {at("frn", 32): 8},
    "batch-flat": {at("bn", 1): 40, at("agc+wn", 1): 14},
    "weight-norm": {at("agc", 8): 12, at("agc", 128): 9},
    "ws-bn": {at("bn", 1): 40, at("bn", 2): 8},
    "ws-bn-large": {at("agc+ws", 8): 12},
    "ws-peers": {at("gn", 1): 12, at("frn", 8): 8},
    "ws-wsgn": {at("agc+ws", 32): 12},
    "ws-wsbn": {at("ws+bn", 128): 9},
    "ws-wn": {at("agc+wn", 8): 12, at("agc+wn", 128): 9},
    "parts-lambda": {part(fixed_lambda=0.0): 10.2},
    "parts-gamma": {part(fixed_gamma=1.0): 9},
    "depth-bn-20": {deep("agc+wn", "resnet20"): 12},
    "depth-bn-56": {deep("agc+wn", "resnet56"): DIVERGED},
    "depth-bn-110": {deep("agc+wn", "resnet110"): 12},
    **{f"depth-ws-bn-{d}": {deep("agc+ws", f"resnet{d}"): 12.0} for d in (20, 56, 110)},  # type: ignore[arg-type]
    "depth-gn": {deep("gn", "resnet56"): 8},
    "depth-none": {},
    "depth-none-shallow": {},
    "depth-plain": {deep("agc+wn", "plain56"): 90},
    "depth-plain-bn": {deep("agc+wn", "plain20"): 13},
    "depth-plain-deep": {deep("agc+wn", "plain110"): 13},
    "depth-ws-plain": {deep("agc+ws", "plain110"): 13},
    "depth-plain-gn": {deep("gn", "plain110"): 8},
    "depth-plain-none": {},
    "long-ws-bn": {trained_long("agc+ws"): 10.8},
    "long-published": {trained_long("bn"): 9.8},
    "mlp-none": {mlp("none", 4): 9},
    "mlp-ln": {mlp("agc", 4): 11},
    "mlp-bn": {mlp("agc", 64): 11},
    "mlp-bn-small": {mlp("bn", 4): 9},
}


def run(error: float, seed: int, nudge: float) -> Curve:
    """Return a finished run whose final error is `error`, or one that diverged."""
    made = curve(error + nudge - 0.5, diverged=1 if error == DIVERGED else None)
    return replace(made, seed=seed, schedule="cosine")  # 20 / 40 above its limit


def evidence(claim: Claim, errors: Errors, nudges: tuple[float, ...] = NUDGES) -> Evidence:
    """Return runs over seeds. The second learning rate of each grid is the best."""
    curves: dict[Arm, list[Curve]] = {}
    for contender in claim.contenders:
        error = errors.get(contender, 10.0)
        if isinstance(contender, Arm):
            curves[contender] = [run(error, i, by) for i, by in enumerate(nudges)]
            continue
        for i, arm in enumerate(contender.arms):
            if i == 1 and error != DIVERGED:  # divergence has no best learning rate
                curves[arm] = [run(error, seed, by) for seed, by in enumerate(nudges)]
            else:
                curves[arm] = [run(error + 3, 0, 0.0)]
    return Evidence(curves)


def test_every_claim_has_cases() -> None:
    assert set(TRUE) == set(FALSE) == set(CLAIM)
    assert len(CLAIM) == len(SECOND_PART)
    assert not set(CLAIM) & {claim.id for claim in CLAIMS}
    assert all(claim.beyond_paper for claim in SECOND_PART)


@pytest.mark.parametrize("claim_id", TRUE)
def test_true_claims_are_reproduced(claim_id: str) -> None:
    judged = judge(CLAIM[claim_id], evidence(CLAIM[claim_id], TRUE[claim_id]))
    assert judged.verdict == "reproduced", judged.checks


@pytest.mark.parametrize("claim_id", FALSE)
def test_false_claims_are_not_reproduced(claim_id: str) -> None:
    judged = judge(CLAIM[claim_id], evidence(CLAIM[claim_id], FALSE[claim_id]))
    # Two learning rates that diverged are too few runs to decide.
    expected = "undecided" if claim_id == "depth-bn-56" else "not reproduced"
    assert judged.verdict == expected, judged.checks


@pytest.mark.parametrize("claim_id", TRUE)
def test_one_seed_or_none_is_undecided(claim_id: str) -> None:
    for found in (evidence(CLAIM[claim_id], {}, (0.0,)), Evidence()):
        assert judge(CLAIM[claim_id], found).verdict == "undecided"
    assert "no finished run of" in check_found(judge(CLAIM[claim_id], Evidence()).checks[0])


@pytest.mark.parametrize("claims", CATALOGS)
def test_names_and_labels_of_arms_are_unique(claims: tuple[Claim, ...]) -> None:
    arms = {arm for claim in claims for arm in claim.arms}
    assert len({arm.name for arm in arms}) == len({str(arm) for arm in arms}) == len(arms)


def test_claims_train_every_point_of_the_sweeps() -> None:
    drawn_by = ((BATCH_SWEEP,), DEPTH_SWEEPS, (LONG_SWEEP,), (MLP_SWEEP,))
    for claims, sweeps in zip(CATALOGS, drawn_by, strict=True):
        trained = {contender for claim in claims for contender in claim.contenders}
        drawn = {point for sweep in sweeps for _, points in sweep.series for _, point in points}
        # trained at 8 and 128
        partly = {at(norm, batch) for norm in ("agc", "ws+bn") for batch in BATCH_LRS}  # type: ignore[arg-type]
        assert drawn - trained <= partly
        assert {c for c in trained if isinstance(c, Tuned)} <= drawn


def test_all_contenders_share_a_grid() -> None:
    for _, points in BATCH_SWEEP.series:
        for batch, contender in points:
            assert tuple(arm.lr for arm in contender.arms) == BATCH_LRS[batch]
