"""Measures of a run."""

import math
from dataclasses import replace

import pytest

from deepcontrol.workbench.study import measures
from deepcontrol.workbench.study.measures import Curve
from tests.workbench.study.made_up import curve

LINE = Curve(tuple(float(50 - e) for e in range(30)), tuple(1.0 / (e + 1) for e in range(30)))


def test_errors_and_losses() -> None:
    assert measures.final_error(LINE) == pytest.approx(22)  # of 23, 22, 21
    assert measures.mean_error(LINE) == pytest.approx(35.5)
    assert measures.early_error(LINE) == pytest.approx(45.5)
    assert measures.final_loss(LINE) == pytest.approx((1 / 28 + 1 / 29 + 1 / 30) / 3)


def test_one_epoch_is_enough() -> None:
    short = Curve((40.0,), (2.0,))
    assert measures.final_error(short) == measures.early_error(short) == 40
    assert measures.spikes(short) == 0


def test_no_finite_loss_gives_nan() -> None:
    assert math.isnan(measures.final_loss(replace(LINE, losses=())))


def test_no_epoch_gives_nan() -> None:
    empty = Curve((), ())
    for measure in (measures.FINAL, measures.MEAN, measures.EARLY, measures.LOSS):
        assert math.isnan(measure.of(empty))


@pytest.mark.parametrize("count", [0, 1, 4])
def test_spikes_are_counted(count: int) -> None:
    assert measures.spikes(curve(spikes=count)) == count


def test_consecutive_epochs_are_one_spike() -> None:
    errors = [10.0] * 40
    errors[20:23] = [20.0, 15.0, 12.0]
    errors[30] = 12.0
    errors[5] = 30.0  # in the first third
    assert measures.spikes(replace(LINE, errors=tuple(errors))) == 2


def test_a_falling_curve_and_a_step_have_no_spikes() -> None:
    assert measures.spikes(LINE) == 0
    step = replace(LINE, errors=(20.0,) * 15 + (30.0,) * 15)  # gets worse once and stays there
    assert measures.spikes(step) <= 1


def test_a_diverged_run_has_infinite_errors() -> None:
    gone = curve(diverged=3)
    for measure in (measures.FINAL, measures.MEAN, measures.EARLY, measures.LOSS):
        assert measure.of(gone) == math.inf
    assert math.isnan(measures.SPIKES.of(gone))  # a diverged run has no spike count


def test_lambda_by_depth() -> None:
    run = curve(lambdas=(0.95, 0.7, 0.1), reach=(-0.25, 1.75))
    assert measures.LAMBDA_DEEPEST.of(run) == pytest.approx(0.95)
    assert measures.LAMBDA_MIDDLE.of(run) == pytest.approx(0.7, abs=0.05)
    assert measures.LAMBDA_LAST.of(run) == pytest.approx(0.1)
    assert measures.LAMBDA_RISE.of(run) == pytest.approx(0.85)
    assert measures.LAMBDA_LOWEST.of(run) == -0.25
    assert measures.LAMBDA_HIGHEST.of(run) == 1.75


def test_a_run_without_lambda_gives_nan() -> None:
    assert math.isnan(measures.LAMBDA_LAST.of(LINE))
    assert math.isnan(measures.LAMBDA_MIDDLE.of(LINE))
