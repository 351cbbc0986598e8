"""Every claim's rule on artificial curves: reproduced, not reproduced, undecided."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from deepcontrol.workbench.report.text import (
    check_found,
    check_quantity,
    check_region,
    check_rule,
    measurement_line,
)
from deepcontrol.workbench.study.arms import Arm, agc, bn, gn
from deepcontrol.workbench.study.claims import (
    CLAIMS,
    CLASSNET_AGC,
    CLASSNET_BN,
    HEAVY,
    LIGHT,
    judge,
)
from deepcontrol.workbench.study.figure import FIGURE_1
from deepcontrol.workbench.study.measures import FINAL
from deepcontrol.workbench.study.rules import (
    Check,
    Evidence,
    Interval,
    combine,
    decide,
    difference_interval,
)
from tests.workbench.study.made_up import curve

Runs = Mapping[Arm, Mapping[str, Any]]
CLAIM = {claim.id: claim for claim in CLAIMS}
NUDGES = (-0.1, 0.0, 0.1)  # of three seeds

# The arms of each claim if it is true, and if it is false; other values are those of `curve`.
TRUE: dict[str, Runs] = {
    "fig1b": {},
    "fig1a": {bn(1): {"error": 12}},
    "fig1a-alike": {bn(8): {"error": 10.4}},
    "fig1c": {agc(4): {"error": 10.2}},
    "fig1e": {agc(4): {"loss": 0.9}},
    "spikes": {bn(4): {"spikes": 4}},
    "single-sample": {agc(1): {"error": 9}},
    "fig1h": {agc(8, 0.08): {"error": 11}, agc(8, 0.64): {"diverged": 2}},
    "fig1h-highest": {agc(8, 0.64): {"error": 14}},
    "fig1g": {bn(8, 0.08): {"error": 10.5}},
    "lambda-middle": {agc(4): {"lambdas": (1, 0.8, 0)}},
    "lambda-deepest": {agc(4): {"lambdas": (1.1, 0, 0)}},
    "lambda-last": {agc(4): {"lambdas": (1, 1, 0.05)}},
    "lambda-depth": {agc(4): {"lambdas": (1, 0.8, 0.1)}},
    "lambda-range": {agc(4): {"reach": (0.1, 1.9)}},
    "fig1d": {CLASSNET_AGC: {"error": 5.34}, CLASSNET_BN: {"error": 5.53}},
    "fig1f": {CLASSNET_AGC: {"loss": 0.9}},
    "spikes-classnet": {CLASSNET_BN: {"spikes": 3}},
    "lambda-learned": {agc(4, fixed_lambda=0.0): {"error": 40}},
    "gamma-learned": {agc(4, fixed_gamma=1.0): {"error": 12}},
    "identity": {agc(4): {"early": 5}},
    "rate-batch": {agc(1, 0.16): {"error": 30}, agc(8, 0.02): {"error": 14}},
    "class-weights": {LIGHT: {"error": 13}},
    "identity-rates": {agc(8, 0.32): {"error": 12}},
    "clipped-rates": {agc(8, 0.32): {"error": 12}},
    "clipped-elsewhere": {},
    "identity-clipped": {agc(4): {"error": 12}, agc(8, 0.32): {"error": 12}},
    "identity-clipped-single": {agc(1): {"error": 12}},
    "unit-start": {agc(4): {"early": 5}},
    "unit-start-rates": {agc(8, 0.32): {"error": 12}},
    "groupnorm": {gn(batch): {"error": 12} for batch in (1, 4, 8)},
}
FALSE: dict[str, Runs] = {
    "fig1b": {agc(1): {"error": 13}},
    "fig1a": {},
    "fig1a-alike": {bn(8): {"error": 13}},
    "fig1c": {agc(4): {"error": 12}},
    "fig1e": {bn(4): {"loss": 0.9}},
    "spikes": {agc(4): {"spikes": 4}},
    "single-sample": {agc(1): {"error": 14}},
    "fig1h": {agc(8, 0.08): {"error": 8}},
    "fig1h-highest": {agc(8, 0.64): {"diverged": 2}},
    "fig1g": {bn(8, 0.08): {"error": 14}},
    "lambda-middle": {agc(4): {"lambdas": (1, 1, 1)}},  # the initial value
    "lambda-deepest": {agc(4): {"lambdas": (1, 1.1, 1)}},  # near 1 at all depths
    "lambda-last": {agc(4): {"lambdas": (1, 1, 1)}},
    "lambda-depth": {agc(4): {"lambdas": (1, 1, 1)}},
    "lambda-range": {agc(4): {"reach": (0.9, 1.1)}},
    "fig1d": {CLASSNET_AGC: {"diverged": 9}},
    "fig1f": {CLASSNET_BN: {"loss": 0.9}},
    "spikes-classnet": {CLASSNET_AGC: {"spikes": 3}},
    "lambda-learned": {agc(4, fixed_lambda=0.0): {"error": 9}},
    "gamma-learned": {agc(4): {"error": 12}},
    "identity": {},
    "rate-batch": {agc(1, 0.16): {"error": 6}, agc(8, 0.02): {"error": 14}},
    "class-weights": {HEAVY: {"error": 15}},
    "identity-rates": {agc(8, 0.64, init="identity"): {"diverged": 2}},
    "clipped-rates": {agc(8, 0.64, clip_grad_norm=1.0): {"error": 14}},
    "clipped-elsewhere": {agc(1, clip_grad_norm=1.0): {"error": 12}},
    "identity-clipped": {agc(4): {"error": 8}, agc(8, 0.32): {"error": 12}},
    "identity-clipped-single": {agc(1): {"error": 8}},
    "unit-start": {},
    "unit-start-rates": {agc(8, 0.64, init="unit"): {"diverged": 2}},
    "groupnorm": {gn(1): {"error": 8}, gn(4): {"error": 12}, gn(8): {"error": 12}},
}
TRAINED = [claim for claim in CLAIMS if claim.arms]
MEASURED = [claim for claim in CLAIMS if not claim.arms]


def evidence(claim_id: str, runs: Runs, nudges: tuple[float, ...] = NUDGES) -> Evidence:
    """Return runs over seeds. Each nudge shifts all values of a seed."""
    curves = {}
    for arm in CLAIM[claim_id].arms:
        about = {"error": 10.0, "loss": 0.5, "lambdas": (1.0, 0.8, 0.0), "reach": (0.0, 2.0)}
        about |= {"spikes": 0, **runs.get(arm, {})}
        curves[arm] = [
            curve(**{
                **about,
                "error": about["error"] + nudge,
                "loss": about["loss"] + nudge,
                "lambdas": tuple(
                    v + by * nudge for v, by in zip(about["lambdas"], (0.3, 0.2, 0.1), strict=True)
                ),
                "reach": tuple(v + 0.2 * nudge for v in about["reach"]),
                "spikes": about["spikes"] + i % 2,
            })
            for i, nudge in enumerate(nudges)
        ]  # fmt: skip
    return Evidence(curves)


def test_every_trained_claim_has_cases() -> None:
    assert set(TRUE) == set(FALSE) == {claim.id for claim in TRAINED}
    assert len(CLAIM) == len(CLAIMS)


@pytest.mark.parametrize("claim_id", TRUE)
def test_true_claims_are_reproduced(claim_id: str) -> None:
    judged = judge(CLAIM[claim_id], evidence(claim_id, TRUE[claim_id]))
    assert judged.verdict == "reproduced", judged.checks


@pytest.mark.parametrize("claim_id", FALSE)
def test_false_claims_are_not_reproduced(claim_id: str) -> None:
    judged = judge(CLAIM[claim_id], evidence(claim_id, FALSE[claim_id]))
    assert judged.verdict == "not reproduced", judged.checks


def test_the_deepest_lambda_must_also_be_near_1() -> None:
    far = {agc(4): {"lambdas": (0.2, 0.0, 0.0)}}  # above half depth, but not near 1
    judged = judge(CLAIM["lambda-deepest"], evidence("lambda-deepest", far))
    assert [check.verdict for check in judged.checks] == ["not reproduced", "reproduced"]
    assert judged.verdict == "not reproduced"


def is_insensitive(claim_id: str) -> bool:
    """Return whether the claim's measure does not depend on the nudges."""
    return claim_id in ("spikes", "spikes-classnet")


@pytest.mark.parametrize("claim_id", [c for c in TRUE if not is_insensitive(c)])
def test_a_large_variance_is_undecided(claim_id: str) -> None:
    judged = judge(CLAIM[claim_id], evidence(claim_id, TRUE[claim_id], (-9.0, 0.0, 9.0)))
    assert judged.verdict == "undecided", judged.checks


@pytest.mark.parametrize("claim_id", TRUE)
def test_one_seed_is_undecided(claim_id: str) -> None:
    judged = judge(CLAIM[claim_id], evidence(claim_id, TRUE[claim_id], (0.0,)))
    assert judged.verdict == "undecided", judged.checks


@pytest.mark.parametrize("claim_id", TRUE)
def test_missing_runs_are_undecided(claim_id: str) -> None:
    judged = judge(CLAIM[claim_id], Evidence())
    assert judged.verdict == "undecided"
    assert "no finished run of" in check_found(judged.checks[0])


@pytest.mark.parametrize(
    ("bn_value", "verdict"), [(13.0, "reproduced"), (10.0, "not reproduced"), (None, "undecided")]
)
@pytest.mark.parametrize("claim", MEASURED, ids=lambda c: c.id)
def test_benchmark_claims(claim: Any, bn_value: float | None, verdict: str) -> None:
    check = claim.checks[0]
    columns = {"ms": ("ms_p20", "ms_p50", "ms_p80")}.get(check.column, (check.column,))
    common = {"group": check.group, "batch": str(check.batch), "engine": "graph"}
    common |= {"dtype": "bf16", "width": "1", "size": "256x512"}
    values = {check.under: 10.0, check.over: bn_value}
    rows = [
        {**common, "contender": who, **{column: str(value) for column in columns}}
        for who, value in values.items()
        if value is not None
    ]
    assert judge(claim, Evidence(bench=rows)).verdict == verdict


def test_each_contender_uses_its_best_engine() -> None:
    common = {"group": "segnet", "batch": "8", "dtype": "bf16", "width": "1", "size": "256x512"}
    rows = [
        {**common, "contender": who, "engine": engine, "ms_p20": ms, "ms_p50": ms, "ms_p80": ms}
        for who, engine, ms in (
            ("agc", "eager", "44"), ("agc", "graph", "10"), ("bn", "eager", "18"),
            ("bn", "graph", "12.5"),
        )
    ]  # fmt: skip
    judged = judge(CLAIM["speed"], Evidence(bench=rows))
    assert check_found(judged.checks[0]) == "1.25"
    assert tuple(map(measurement_line, judged.measurements)) == (
        "step time, BN (graph): 12.5 ms",
        "step time, AGC (graph): 10 ms",
    )


def test_times_of_two_benchmark_calls_are_not_compared() -> None:
    common = {"group": "segnet", "batch": "8", "dtype": "bf16", "width": "1", "size": "256x512"}
    rows = [
        {**common, "contender": who, "engine": how, "ms_p20": ms, "ms_p50": ms, "ms_p80": ms}
        for who, how, ms in (
            ("agc", "eager", "22"), ("agc", "graph", "9"), ("bn", "eager", "18"),
            ("bn", "graph", "12"),
        )
    ]  # fmt: skip
    for later, verdict in (((), "reproduced"), ((0, 2), "reproduced"), ((3,), "undecided")):
        calls = [{**row, "run": "b" if i in later else "a"} for i, row in enumerate(rows)]
        check = judge(CLAIM["speed"], Evidence(bench=calls)).checks[0]
        assert check.verdict == verdict  # depends on the two best rows only
        assert check_found(check) == "1.33" or "two benchmark calls" in check_found(check)


# 95% quantiles of Student's t by degrees of freedom, from published tables.
T = {1: 6.313751515, 2: 2.919985580, 4: 2.131846786, 39: 1.684875122}


def test_intervals() -> None:
    inf = math.inf
    assert difference_interval([1.0], [3.0]) == Interval(-2, -inf, inf)
    assert difference_interval([1.0, 1.0], [3.0]) == Interval(-2, -inf, inf)
    # Without any spread there is no interval.
    assert difference_interval([1.0, 1.0], [3.0, 3.0]) == Interval(-2, -inf, inf)
    assert difference_interval([1.0, 3.0], [5.0, 7.0]).high == pytest.approx(
        -4 + T[2] * math.sqrt(2)
    )
    # With three values (Welch), a side without variance adds no degrees of freedom.
    assert difference_interval([1.0, 2.0, 3.0], [5.0] * 3).high == pytest.approx(
        -3 + T[2] / math.sqrt(3)
    )
    assert difference_interval([1.0, 2.0, 3.0], [5.0, 6.0, 7.0]).high == pytest.approx(
        -4 + T[4] * math.sqrt(2 / 3)
    )
    assert difference_interval([1.0] * 3, [3.0] * 3) == Interval(-2, -inf, inf)
    assert math.isnan(difference_interval([inf], [inf]).middle)
    assert difference_interval([1.0, 3.0], None) == pytest.approx(Interval(2, 2 - T[1], 2 + T[1]))
    assert difference_interval([0.0, 2.0] * 20, None).high == pytest.approx(
        1 + T[39] * math.sqrt(40 / 39 / 40)
    )


@pytest.mark.parametrize(
    ("a", "b", "certain"),
    [
        ([math.inf] * 3, [8.0, 9.0, 8.0], True),
        ([8.0, 9.0, 8.0], [math.inf, math.inf, math.inf, 9.0], True),
        ([math.inf, math.inf, 9.0], [8.0, 9.0, 8.0], False),  # two of three
        ([math.inf] * 2, [8.0, 9.0, 8.0], False),  # too few
        ([math.inf] * 3, [8.0, 9.0], False),
        ([math.inf] * 3, [math.inf, 8.0, 9.0], False),
        ([math.inf] * 3, None, True),
    ],
)
def test_divergence_decides_only_if_most_runs_diverged(
    a: list[float], b: list[float] | None, certain: bool
) -> None:
    interval = difference_interval(a, b)
    assert (interval.low == interval.high) == certain
    assert (decide(interval, 0, math.inf) == "undecided") == (not certain)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.5, 0.5, "reproduced"),
        (-1.0, 0.5, "undecided"),  # the region is open
        (-1.5, 1.5, "undecided"),
        (1.0, 1.5, "not reproduced"),
        (-3.0, -1.0, "not reproduced"),
        (-math.inf, math.inf, "undecided"),
    ],
)
def test_decision_by_interval(low: float, high: float, verdict: str) -> None:
    assert decide(Interval((low + high) / 2, low, high), -1, 1) == verdict


def test_one_failed_check_fails_the_claim() -> None:
    assert combine(["reproduced", "undecided", "not reproduced"]) == "not reproduced"
    assert combine(["reproduced", "undecided"]) == "undecided"
    assert combine(["reproduced", "reproduced"]) == "reproduced"
    assert combine([]) == "undecided"


def test_a_check_result_has_the_numbers() -> None:
    check = Check(measure=FINAL, arm=bn(1), against=bn(4), low=1)
    curves = {bn(1): [curve(12.0), curve(14.0)], bn(4): [curve(9.0), curve(11.0)]}
    result = check.judge(Evidence(curves))
    assert (result.kind, result.measure, result.unit) == ("difference", "final error", "points")
    assert (result.low, result.high, result.problem) == (1, None, "")
    assert result.estimate == pytest.approx(3)
    assert result.interval_low == pytest.approx(3 - 2.92 * math.sqrt(2), abs=1e-3)
    assert result.interval_high == pytest.approx(3 + 2.92 * math.sqrt(2), abs=1e-3)
    arm, against = result.operands
    assert (arm.arm, against.arm) == ("segnet-bn-b1-lr0.02", "segnet-bn-b4-lr0.08")
    assert (arm.n, arm.diverged) == (2, 0)
    assert arm.mean == pytest.approx(13.52, abs=0.005)
    assert arm.std == pytest.approx(math.sqrt(2))


def test_check_results_as_text() -> None:
    check = Check(measure=FINAL, arm=bn(1), against=bn(4), low=1)
    curves = {bn(1): [curve(12.0), curve(14.0)], bn(4): [curve(9.0), curve(11.0)]}
    result = check.judge(Evidence(curves))
    assert check_quantity(result) == "final error: BN, batch 1, lr 0.02 minus BN, batch 4, lr 0.08"
    assert check_region(result) == "above 1 point"
    assert check_rule(result) == "final error: difference above 1 point"
    assert check_found(result) == "3.00 points (90% interval -1.13 to 7.13, 2 seeds)"
    who = "final error, BN, batch 1, lr 0.02"
    assert measurement_line(result.operands[0]) == f"{who}: 13.52 ± 1.41 % (n=2)"
    more = {bn(1): [curve(diverged=2)] * 3, bn(4): [curve(10.0)] * 3}
    diverged = check.judge(Evidence(more))
    assert check_found(diverged) == "worse without bound: runs diverged"
    assert measurement_line(diverged.operands[0]) == f"{who}: 3 of 3 diverged"
    one = check.judge(Evidence({**curves, bn(1): [curve(diverged=2), curve(10.0)]}))
    assert check_found(one) == "too few runs to decide (2 seeds): some diverged"
    assert one.verdict == "undecided"
    assert measurement_line(one.operands[0]) == f"{who}: 1 of 2 diverged"


def test_names_and_labels_of_arms_are_unique() -> None:
    arms = {arm for claim in CLAIMS for arm in claim.arms}
    assert len({arm.name for arm in arms}) == len({str(arm) for arm in arms}) == len(arms)


def test_figure_1_draws_only_arms_of_claims() -> None:
    drawn = {arm for panel in FIGURE_1 for arm in panel.arms}
    assert drawn <= {arm for claim in CLAIMS for arm in claim.arms}
    assert [panel.letter for panel in FIGURE_1] == list("abcdefgh")
