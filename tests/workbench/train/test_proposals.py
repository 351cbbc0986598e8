"""Options that try the paper's proposals: they act, are recorded, and resume bit for bit."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from deepcontrol.nn import GEMS, Quantile, TrimmedMean, WindowMean
from deepcontrol.ops import max_pool2x2
from deepcontrol.step import TrainingStep
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.optim import set_lr
from deepcontrol.workbench.train.build import add_noise_, build_model, lambdas, move_
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.config_file import from_json, to_json
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.evaluate import LayerStats, unpooled
from deepcontrol.workbench.train.objective import Objective, build_objective
from deepcontrol.workbench.train.start import build_gems, build_optimizer
from tests.processes import DEADLOCK
from tests.workbench.train.runs import (
    command,
    differences,
    metrics,
    signal_at_step,
    start,
    tiny,
    train_here,
)

CPU = Group(torch.device("cpu"))
RANDOM: dict[str, dict[str, Any]] = {
    "noise": {"noise": 0.2},
    "bn-noise": {"noise": 0.2, "norm": "bn"},
    "noise-ema": {"noise": 0.2, "ema": 0.9, "accumulate": 2, "background": "median"},
    "dropout": {"dropout": 0.3},
    "bn-dropout": {"dropout": 0.3, "norm": "bn"},
}


@pytest.mark.parametrize("name", RANDOM)
def test_killed_runs_end_alike(
    name: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted, run = tmp_path / "uninterrupted", tmp_path / "run"
    train_here(uninterrupted, **RANDOM[name])
    with monkeypatch.context() as patch:
        signal_at_step(6, signal.SIGTERM, patch)  # in the middle of an epoch
        assert main(command(run, **RANDOM[name])) == 128 + signal.SIGTERM
    torch.rand(7)  # another state of the generator
    train_here(run)  # without the options: config.json has them
    assert differences(run, uninterrupted) == []
    assert metrics(run)[0]["val_error"] == metrics(uninterrupted)[0]["val_error"]
    losses = [line["train_loss"] for line in metrics(run)[1:]]
    assert losses != [line["train_loss"] for line in metrics(whole)[1:]]


GPU_RUNS: dict[str, dict[str, Any]] = {
    **RANDOM,
    "gems": {"gems": "on", "lambda_lr": 10, "schedule": "cosine"},
    "gems-control": {"gems": "control"},
    "window": {"background": "window:5", "noise": 0.1},
    "median": {"background": "median"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_RUNS)
def test_resumed_runs_end_alike_on_a_gpu(name: str, tmp_path: Path) -> None:
    """In separate processes, because determinism is a process-wide setting."""
    flags = {"device": "cuda", "deterministic": "", **GPU_RUNS[name]}
    flags["save_steps"] = "5"
    stopped = "limit"
    limits = {"minutes": "0.0001"}, {"minutes": "60"}  # stops after the first epoch
    for out, more in (("whole", {}), (stopped, limits[0]), (stopped, limits[1])):
        process = start(tmp_path / out, **flags | more)
        _, errors = process.communicate(timeout=DEADLOCK)
        assert process.returncode == 0, errors
    assert differences(tmp_path / stopped, tmp_path / "whole") == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_RUNS)
def test_captured_steps(name: str) -> None:
    """A step is captured, and its replays draw new random numbers."""
    device = torch.device("cuda")
    # Wide enough for dropout to have many outcomes.
    config = tiny(lr=1e-30, momentum=0, width=0.25, device="cuda", **GPU_RUNS[name])
    model = build_model(config, 19)
    move_(model, device)
    add_noise_(model, config.noise, config.dropout, 0, 0)
    optimizer = build_optimizer(config, model, Group(device))
    build_gems(config, model, optimizer)
    step = TrainingStep(model, Objective("segnet").loss, optimizer, autocast=torch.bfloat16)
    x = torch.randn(1, 3, 64, 64, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 19, (1, 64, 64), device=device, dtype=torch.uint8)
    losses = {float(step(x, labels)) for _ in range(8)}
    assert step.why_eager is None
    assert (len(losses) > 5) == bool(config.noise or config.dropout)


@pytest.mark.parametrize("norm", ["agc", "bn"])
def test_noise_acts_in_training_only(norm: str) -> None:
    """Each map gets noise relative to its standard deviation, also behind a BatchNorm."""
    config = tiny(norm=norm, noise=0.25)
    model, x = build_model(config, 19), torch.randn(2, 3, 32, 64)
    plain = build_model(config, 19)
    remove = add_noise_(model, config.noise, 0.0, 0, 0)
    assert torch.equal(model.eval()(x), plain.eval()(x))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert not torch.equal(model.train()(x), plain.train()(x))
    if norm == "bn":
        own, other = (m.encoder[0].convolutions[0][:2] for m in (model, plain))
        clean, noisy = other(x), own(x)
        relative = (noisy - clean).std((2, 3)) / clean.std((2, 3))
        assert relative.mean().item() == pytest.approx(0.25, rel=0.05)
    remove()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain(x))


def test_noise_needs_a_layer_that_adds_it() -> None:
    with pytest.raises(ValueError, match="no layer of Linear adds noise"):
        add_noise_(torch.nn.Linear(2, 2), 0.1, 0.0, 0, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("window:15", WindowMean(15)),
        ("median", Quantile(0.5)),
        ("quantile:0.3", Quantile(0.3)),
        ("trimmed:0.1", TrimmedMean(0.1)),
    ],
)
def test_background_is_set_in_every_layer(text: str, expected: Any, tmp_path: Path) -> None:
    """A run with it trains, records its layers, resumes and is evaluated."""
    model = build_model(tiny(background=text), 19)
    found = [m.background for m in model.modules() if hasattr(m, "background")]
    assert found == [expected] * 25
    flags = {"background": text, "sample_epochs": 1}
    train_here(tmp_path / "run", epochs=1, **flags)
    train_here(tmp_path / "run", epochs=2, **flags)
    train_here(tmp_path / "whole", epochs=2, **flags)
    assert differences(tmp_path / "run", tmp_path / "whole") == []
    assert main(["eval", str(tmp_path / "run"), "--device", "cpu"]) == 0


def test_open_fractions_with_another_background() -> None:
    """A pooling layer is recomputed with its own background."""
    torch.manual_seed(0)
    model, x = build_model(tiny(background="quantile:0.9"), 19).eval(), torch.randn(1, 3, 32, 64)
    with torch.no_grad():
        layers = LayerStats(model).compute(x, CPU)
        first, pooling = model.encoder[0].convolutions  # type: ignore[union-attr, misc]
        pooled, _ = pooling(first(x))
        whole = unpooled(pooling, first(x))
    torch.testing.assert_close(max_pool2x2(whole)[0], pooled)
    expected = (whole > 0).float().mean().item()
    assert layers["encoder.0.convolutions.1"]["open"] == pytest.approx(expected)


def test_background_needs_feature_maps() -> None:
    with pytest.raises(ValueError, match="has no AGC layer with feature maps"):
        build_model(Train(out=Path("x"), model="mlp", data="fashion-mnist", background="median"), 9)


def test_seeds_have_other_random_numbers() -> None:
    """So have the processes of a run."""
    x, drawn = torch.ones(1, 64, 8, 8), set()
    for seed, rank in ((0, 0), (0, 1), (1, 0)):
        model = build_model(tiny(), 19)
        model.classify = torch.nn.Identity()
        add_noise_(model, 0.0, 0.5, seed, rank)
        drawn.add(tuple(model.classify(x)[0, :, 0, 0].tolist()))
    assert len(drawn) == 3


def test_dropout_sets_whole_maps_to_0_in_training() -> None:
    model = build_model(tiny(), 19)
    model.classify = torch.nn.Identity()
    add_noise_(model, 0.0, 0.25, 0, 0)
    x = torch.ones(50, 64, 2, 2)
    y = model.classify(x)
    assert torch.equal(y, y[:, :, :1, :1].expand_as(y))
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 4 / 3))
    assert torch.equal(model.eval().classify(x), x)


@pytest.mark.parametrize("gems", ["on", "control"])
def test_gems_scales_the_gradients(
    gems: str, run: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step is GEMS's own; a resumed run continues with it."""
    factors: list[torch.Tensor] = []
    scale = GEMS.scale_

    def kept(self: GEMS) -> None:
        factors.append(torch.cat(self.factors()))
        assert self.control == (gems == "control")
        assert self.cap == 3
        scale(self)

    monkeypatch.setattr(GEMS, "scale_", kept)
    train_here(run, epochs=1, gems=gems, gems_cap=3)
    train_here(run, epochs=2)
    assert len(factors) == 8
    assert all((f >= 1).all() and (f <= 3).all() and f.max() > 1 for f in factors)
    assert metrics(run)[1]["train_loss"] != metrics(whole)[1]["train_loss"]
    again = run.with_name("again")
    train_here(again, epochs=2, gems=gems, gems_cap=3)
    assert differences(run, again) == []


@pytest.mark.parametrize("weight_decay", [0.0, 1e-4])
def test_lambda_has_a_learning_rate_of_its_own(weight_decay: float) -> None:
    config = tiny(lambda_lr=10, weight_decay=weight_decay, lr=0.5)
    model = build_model(config, 19)
    optimizer = build_optimizer(config, model, CPU)
    chosen = set(map(id, lambdas(model)))
    assert len(chosen) == 25
    for at in (0.5, 0.125):
        set_lr(optimizer, at)
        seen = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen += 1
                assert group["lr"] == at * (10 if id(parameter) in chosen else 1)
        assert seen == len(list(model.parameters()))


def test_lambda_starts_where_asked_and_moves_by_its_learning_rate() -> None:
    config = tiny(lambda_lr=10, lambda_start=2.5, lr=0.125)
    model = build_model(config, 19)
    optimizer = build_optimizer(config, model, CPU)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all((p == 2.5).all() for p in lambdas(model))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        step = 1.25 if name.endswith("mean_scale") else 0.125
        torch.testing.assert_close(parameter.detach(), before[name] - step)


def test_class_weights_can_be_left_out() -> None:
    class Labels:
        histogram = torch.tensor([600, 300, 100]).numpy()

    device, logits = torch.device("cpu"), torch.randn(2, 3, 4, 4)
    labels = torch.randint(0, 3, (2, 4, 4), dtype=torch.uint8)
    objective = build_objective(tiny(class_weights="none"), Labels(), device)  # type: ignore[arg-type]
    plain = torch.nn.functional.cross_entropy(logits, labels.long())
    torch.testing.assert_close(objective.loss(logits, labels), plain)
    weighted = build_objective(tiny(), Labels(), device)  # type: ignore[arg-type]
    assert abs(weighted.loss(logits, labels) - plain) > 1e-3


def test_best_recipe(tmp_path: Path) -> None:
    best = tiny(recipe="best")
    found = (best.schedule, best.weight_decay, best.augmentation, best.class_weights)
    assert found == ("cosine", 5e-4, "strong", "none")
    assert best.warmup_epochs == pytest.approx(0.3)  # a tenth of 3 epochs
    assert (best.learning_rate, best.momentum) == (0.04, 0.9)
    mine = tiny(recipe="best", augment="none", class_weights="enet", weight_decay=0)
    assert (mine.augment, mine.class_weights, mine.weight_decay) == ("none", "enet", 0.0)
    assert from_json(to_json(best)) == best
    volumes = Train(
        out=tmp_path, recipe="best", model="unet3d", data="nnunet", size=(32, 32, 32), channels=1
    )
    assert volumes.augmentation == "flip"
    train_here(tmp_path / "run", recipe="best")
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert stored["recipe"] == "best"
    assert stored["augment"] == "strong"
    assert stored["class_weights"] == "none"
    train_here(tmp_path / "run", recipe="best")  # resumed: the same settings


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"noise": -0.1}, "--noise must be at least 0, got -0.1"),
        ({"noise": 0.1, "norm": "gn"}, "--noise is for --norm agc, bn and ws\\+bn, not gn"),
        ({"dropout": 1.0}, "--dropout must be at least 0 and below 1, got 1.0"),
        (
            {"dropout": 0.5, "model": "smp:Unet/resnet34"},
            "--dropout is for networks of this package",
        ),
        ({"gems": "on", "norm": "bn"}, "--gems is for --norm agc, not bn"),
        ({"gems": "on", "gems_cap": 0.5}, "--gems-cap must be at least 1, got 0.5"),
        ({"gems_cap": 5.0}, "--gems-cap needs --gems on or control"),
        ({"lambda_lr": 0.0}, "--lambda-lr must be positive, got 0.0"),
        ({"lambda_lr": 2.0, "norm": "bn"}, "--lambda-lr is for --norm agc, not bn"),
        ({"lambda_start": 2.0, "norm": "bn"}, "--lambda-start is for --norm agc, not bn"),
        ({"lambda_start": 2.0, "fixed_lambda": 1.0}, "--lambda-start and --fixed-lambda exclude"),
        ({"background": "window:1.5"}, "window:N with N of at least 1, .* got window:1.5"),
        ({"background": "quantile"}, "got quantile"),
        ({"background": "trimmed:0.5"}, "F below 0.5; got trimmed:0.5"),
        ({"background": "mean:3"}, "got mean:3"),
        ({"background": "mode"}, "got mode"),
        ({"background": "median", "norm": "bn"}, "--background is for --norm agc, not bn"),
        ({"class_weights": "none", "class_weight_scale": 2.0}, "needs --class-weights enet"),
        ({"model": "resnet20", "data": "cifar10", "recipe": "best"}, "best is for segmentation"),
        (
            {"model": "resnet20", "data": "cifar10", "class_weights": "none"},
            "--class-weights is for segmentation",
        ),
    ],
)
def test_settings_that_contradict_each_other(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Train(out=Path("x"), **flags)
