"""What the claims vary beside norm, batch and rate: lambda, gamma, weights, long gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deepcontrol.workbench.data import open_source, prepare
from deepcontrol.workbench.train.build import build_model, fit_to_images_
from deepcontrol.workbench.train.checkpoint import load
from deepcontrol.workbench.train.config import Train
from tests.workbench.train.runs import differences, metrics, tiny, train_here


def test_what_is_fixed_stays_and_the_rest_learns(run: Path) -> None:
    fixed = {"fixed_lambda": 0.5, "fixed_gamma": 0.75}
    train_here(run, epochs=1, **fixed)
    train_here(run, epochs=2)  # a run that goes on keeps them, momentum and all
    weights = load(run / "last").model
    for kind, value in (("mean_scale", 0.5), ("gain", 0.75)):
        found = [w for name, w in weights.items() if name.endswith(kind)]
        assert len(found) == 25
        assert all((w == value).all() for w in found)
    assert all(w.any() for name, w in weights.items() if name.endswith("bias"))


def test_a_unit_start_scales_hes_filters(tmp_path: Path) -> None:
    config = tiny(init="unit")
    cache = prepare(open_source("streets", "train", limit=2), config.size, tmp_path)
    model = build_model(config, 19)
    he = {name: w.clone() for name, w in model.state_dict().items()}
    fit_to_images_(model, config, cache)
    for name, weight in model.state_dict().items():
        factor = (weight / he[name]).nanmean().item() if weight.any() else 1.0
        assert torch.allclose(weight, factor * he[name], rtol=1e-4, atol=1e-7), name
        if name == "classify.weight":
            assert factor == pytest.approx(0.1)
        elif weight.dim() == 4 and "decoder" in name:
            assert factor > 1.1  # He's rule loses a part in every layer


def test_a_unit_start_goes_on_as_it_began(run: Path, tmp_path: Path) -> None:
    train_here(run, epochs=1, init="unit", fixed_lambda=0.5)
    train_here(run, epochs=2)
    at_once = tmp_path / "at-once"
    train_here(at_once, epochs=2, init="unit", fixed_lambda=0.5)
    weights, same = load(run / "last").model, load(at_once / "last").model
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert (weights["encoder.0.convolutions.0.mean_scale"] == 0.5).all()


def test_the_weights_of_classes_act_as_a_rate(run: Path, tmp_path: Path) -> None:
    """Bit for bit, where their scale is a power of two: SGD is linear in the gradient."""
    train_here(run, epochs=1, lr=0.04)
    scaled = tmp_path / "scaled"
    train_here(scaled, epochs=1, lr=0.01, class_weight_scale=4)
    mine, theirs = load(run / "last").model, load(scaled / "last").model
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for a, b in zip(metrics(run), metrics(scaled), strict=True):
        assert b["val_loss"] == pytest.approx(4 * a["val_loss"], rel=1e-6)
        assert a["val_error"] == b["val_error"]


def test_a_long_gradient_is_clipped_and_a_short_one_is_not(whole: Path, run: Path) -> None:
    """Without momentum, no step is longer than the rate times the largest norm."""
    most, rate, steps = 1e-3, 0.5, 4
    train_here(run, epochs=1, lr=rate, momentum=0, clip_grad_norm=most)
    start, end = build_model(tiny(), 19).state_dict(), load(run / "last").model
    moved = torch.stack([(end[n] - start[n]).norm() for n in start]).norm().item()
    assert 0.5 * steps * rate * most < moved < 1.0001 * steps * rate * most
    train_here(run, epochs=2)  # a run that goes on is clipped as before
    further = load(run / "last").model
    moved = torch.stack([(further[n] - end[n]).norm() for n in end]).norm().item()
    assert 0.5 * steps * rate * most < moved < 1.0001 * steps * rate * most
    unmoved = run.with_name("unmoved")
    train_here(unmoved, clip_grad_norm=1e6)
    assert differences(unmoved, whole) == []


def test_the_validation_loss_is_that_of_its_images(whole: Path, tmp_path: Path) -> None:
    """A run of another batch size starts with the same network, and evaluates it alike."""
    single = tmp_path / "single"
    train_here(single, epochs=1, batch_size=1, eval_batch_size=2)
    start, same_start = metrics(whole)[0], metrics(single)[0]
    assert start["val_loss"] == pytest.approx(same_start["val_loss"], rel=1e-6)
    assert 0.5 < start["val_loss"] < 4  # as that of guesses among 19 classes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"fixed_lambda": 0.0, "norm": "bn"}, "--fixed-lambda is for --norm agc, not bn"),
        ({"init": "unit", "norm": "bn"}, "--init unit is for --norm agc, not bn"),
        ({"fixed_gamma": float("nan")}, "--fixed-gamma must be a number, got nan"),
        ({"class_weight_scale": 0.0}, "--class-weight-scale must be positive, got 0.0"),
        ({"clip_grad_norm": 0.0}, "--clip-grad-norm must be positive, got 0.0"),
    ],
)
def test_what_makes_no_sense(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Train(out=Path("x"), **flags)


def test_checkpoints_of_some_epochs(run: Path, whole: Path) -> None:
    """The numbers are the same; of epoch 1 nothing is kept."""
    train_here(run, save_epochs=2)
    assert metrics(run) == metrics(whole)
    states = {name: load(run / name).state["position"] for name in ("previous", "last", "best")}
    assert (states["previous"]["epoch"], states["last"]["epoch"]) == (2, 3)
    errors = {line["epoch"]: line["val_error"] for line in metrics(run)}
    assert states["best"]["best_epoch"] == min((2, 3), key=lambda epoch: errors[epoch])
