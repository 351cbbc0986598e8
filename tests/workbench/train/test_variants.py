"""Settings that the claims vary: lambda, gamma, initialization, class weights, clipping."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deepcontrol.workbench.data import Batches, open_source, prepare
from deepcontrol.workbench.train.build import build_model, scale_to_images_
from deepcontrol.workbench.train.checkpoint import load
from deepcontrol.workbench.train.config import Train
from tests.workbench.train.runs import differences, metrics, tiny, train_here


def test_fixed_parameters_stay_and_the_others_learn(run: Path) -> None:
    fixed = {"fixed_lambda": 0.5, "fixed_gamma": 0.75}
    train_here(run, epochs=1, **fixed)
    train_here(run, epochs=2)  # a resumed run keeps them fixed
    weights = load(run / "last").model
    for kind, value in (("mean_scale", 0.5), ("gain", 0.75)):
        found = [w for name, w in weights.items() if name.endswith(kind)]
        assert len(found) == 25
        assert all((w == value).all() for w in found)
    assert all(w.any() for name, w in weights.items() if name.endswith("bias"))


def test_unit_init_scales_the_filters_of_he_init(tmp_path: Path) -> None:
    config = tiny(init="unit")
    cache = prepare(open_source("streets", "train", limit=2), config.size, tmp_path)
    model = build_model(config, 19)
    he = {name: w.clone() for name, w in model.state_dict().items()}
    scale_to_images_(model, config, Batches(cache, 1))
    for name, weight in model.state_dict().items():
        factor = (weight / he[name]).nanmean().item() if weight.any() else 1.0
        assert torch.allclose(weight, factor * he[name], rtol=1e-4, atol=1e-7), name
        if name == "classify.weight":
            assert factor == pytest.approx(0.1)
        elif weight.dim() == 4 and "decoder" in name:
            assert factor > 1.1  # He's rule loses variance in every layer


def test_run_with_unit_init_resumes(run: Path, tmp_path: Path) -> None:
    train_here(run, epochs=1, init="unit", fixed_lambda=0.5)
    train_here(run, epochs=2)
    uninterrupted = tmp_path / "uninterrupted"
    train_here(uninterrupted, epochs=2, init="unit", fixed_lambda=0.5)
    weights, same = load(run / "last").model, load(uninterrupted / "last").model
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert (weights["encoder.0.convolutions.0.mean_scale"] == 0.5).all()


def test_class_weight_scale_acts_like_the_learning_rate(run: Path, tmp_path: Path) -> None:
    """SGD is linear in the gradient; bit for bit if the scale is a power of two."""
    train_here(run, epochs=1, lr=0.04)
    scaled = tmp_path / "scaled"
    train_here(scaled, epochs=1, lr=0.01, class_weight_scale=4)
    mine, theirs = load(run / "last").model, load(scaled / "last").model
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for a, b in zip(metrics(run), metrics(scaled), strict=True):
        assert b["val_loss"] == pytest.approx(4 * a["val_loss"], rel=1e-6)
        assert a["val_error"] == b["val_error"]


def test_clipping_acts_only_on_long_gradients(whole: Path, run: Path) -> None:
    """Without momentum, no step is longer than the learning rate times the clipping norm."""
    norm, lr, steps = 1e-3, 0.5, 4
    train_here(run, epochs=1, lr=lr, momentum=0, clip_grad_norm=norm)
    start, end = build_model(tiny(), 19).state_dict(), load(run / "last").model
    moved = torch.stack([(end[n] - start[n]).norm() for n in start]).norm().item()
    assert 0.5 * steps * lr * norm < moved < 1.0001 * steps * lr * norm
    train_here(run, epochs=2)  # a resumed run still clips
    further = load(run / "last").model
    moved = torch.stack([(further[n] - end[n]).norm() for n in end]).norm().item()
    assert 0.5 * steps * lr * norm < moved < 1.0001 * steps * lr * norm
    unclipped = run.with_name("unclipped")
    train_here(unclipped, clip_grad_norm=1e6)
    assert differences(unclipped, whole) == []


def test_validation_loss_does_not_depend_on_the_batch_size(whole: Path, tmp_path: Path) -> None:
    """Before training, runs of different batch sizes have the same network and loss."""
    single = tmp_path / "single"
    train_here(single, epochs=1, batch_size=1, eval_batch_size=2)
    start, same_start = metrics(whole)[0], metrics(single)[0]
    assert start["val_loss"] == pytest.approx(same_start["val_loss"], rel=1e-6)
    assert 0.5 < start["val_loss"] < 4  # about that of guessing among 19 classes


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
def test_settings_that_contradict_each_other(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Train(out=Path("x"), **flags)


def test_save_epochs(run: Path, whole: Path) -> None:
    """The metrics are the same, and epoch 1 is not saved."""
    train_here(run, save_epochs=2)
    assert metrics(run) == metrics(whole)
    states = {name: load(run / name).state["position"] for name in ("previous", "last", "best")}
    assert (states["previous"]["epoch"], states["last"]["epoch"]) == (2, 3)
    errors = {line["epoch"]: line["val_error"] for line in metrics(run)}
    assert states["best"]["best_epoch"] == min((2, 3), key=lambda epoch: errors[epoch])
