"""Optimizers, schedules, losses, moving average and accumulation: exact, and resumed exactly."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepcontrol.step import TrainingStep
from deepcontrol.workbench.cli import main, parse
from deepcontrol.workbench.data import NO_CLASS, VOID
from deepcontrol.workbench.models import UNet, build
from deepcontrol.workbench.train import Train
from deepcontrol.workbench.train.checkpoint import CheckpointError, load
from deepcontrol.workbench.train.config_file import from_json, to_json
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.evaluate import MovingAverage
from deepcontrol.workbench.train.objective import Objective
from deepcontrol.workbench.train.run import TrainingRun
from deepcontrol.workbench.train.snapshot import Position
from tests.workbench.train.runs import command, differences, metrics, signal_at_step, train_here

SMALL = {"model": "unet", "width": "0.05", "sample_epochs": "9"}
RECIPES: dict[str, dict[str, Any]] = {
    "adamw": {
        "optimizer": "adamw", "schedule": "onecycle", "ema": "0.9", "accumulate": "2",
        "loss": "ce+dice", "augment": "strong", "weight_decay": "0.01",
    },
    "bn": {
        "norm": "bn", "schedule": "poly", "ema": "0.99", "loss": "focal", "accumulate": "2",
        "warmup_epochs": "0.5",
    },
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_runs_end_alike(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {**SMALL, **RECIPES[recipe]}
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_here(whole, **flags)
    with monkeypatch.context() as patch:
        signal_at_step(6, signal.SIGTERM, patch)  # in the middle of an epoch
        assert main(command(run, **flags)) == 128 + signal.SIGTERM
    train_here(run, **flags)
    assert differences(run, whole) == []
    losses = [line["train_loss"] for line in metrics(whole)[1:]]
    assert losses[-1] < losses[0]
    # The saved weights are the average, not the trained ones.
    saved = load(whole / "last")
    trained = saved.state["average"]["weights"]
    assert trained.keys() == saved.model.keys()
    assert not all(torch.equal(trained[name], saved.model[name]) for name in trained)


def test_schedule_fixes_the_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {**SMALL, "epochs": "1", "schedule": "poly"}
    train_here(tmp_path / "run", **flags)
    assert main(command(tmp_path / "run", **{**flags, "epochs": "2"})) == 1
    assert "learning rates of a poly schedule depend on --epochs" in capsys.readouterr().err


@pytest.mark.parametrize("loss", ["ce", "dice", "ce+dice", "focal"])
def test_parts_of_a_batch_give_its_gradient(loss: Any) -> None:
    """N x batch 1 equals batch N with AGC, whatever pixels are labeled."""
    torch.manual_seed(0)
    images = torch.randn(5, 3, 32, 32, dtype=torch.float64)
    labels = torch.randint(0, 3, (5, 32, 32), dtype=torch.uint8)
    labels[0, :20] = VOID
    labels[3] = VOID
    weights = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    objective, group = Objective("unet", weights, loss), Group(torch.device("cpu"))
    found = []
    for parts in (1, 2, 5, 9):
        model = build("unet", 3, "agc", width=0.05).double()
        model.load_state_dict(found[0][0] if found else model.state_dict())
        start = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainingStep(model, objective.loss, optimizer, "eager", accumulate=parts)
        targets: tuple[torch.Tensor, ...] = (labels,)
        if parts > 1:
            targets += (group.loss_scales(labels, 5, parts=min(parts, 5)),)
        value = step(images, *targets)
        found.append((start, value, [p.grad.clone() for p in model.parameters()]))
    for _, value, gradients in found[1:]:
        torch.testing.assert_close(value, found[0][1])
        torch.testing.assert_close(gradients, found[0][2], rtol=1e-9, atol=1e-12)


def test_parts_of_a_classification_batch() -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 2, -1, 1])
    assert int(labels[2]) == NO_CLASS
    objective = Objective("resnet20", loss="focal")
    model = build("resnet20", 3, "agc", width=0.25).double()
    whole = torch.autograd.grad(
        objective.loss(model(images), labels), list(model.parameters()), allow_unused=True
    )
    scales = Group(torch.device("cpu")).loss_scales(labels, 4, NO_CLASS, parts=4)
    losses = [
        objective.loss(model(images[i : i + 1]), labels[i : i + 1], scales[i]) for i in range(4)
    ]
    parts = torch.autograd.grad(
        torch.stack(losses).sum(), list(model.parameters()), allow_unused=True
    )
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)


def test_runs_in_parts_of_one_image_are_runs_in_batches(tmp_path: Path) -> None:
    """--batch-size 3 --accumulate 3 computes image by image, and trains as --batch-size 3 does."""
    flags = {**SMALL, "batch_size": 3, "epochs": 2, "lr": 0.02}
    seen: list[int] = []
    train_here(tmp_path / "whole", **flags)
    with pytest.MonkeyPatch.context() as patch:
        forward = UNet.forward

        def counted(self: UNet, x: torch.Tensor) -> torch.Tensor:
            seen.extend([len(x)] * self.training)
            return forward(self, x)

        patch.setattr(UNet, "forward", counted)
        train_here(tmp_path / "parts", **flags, accumulate=3)
    assert set(seen) == {1}
    for whole, parts in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        assert parts["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-4)
        if whole["epoch"]:
            assert parts["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-4)


def test_recipe_fills_in_what_is_not_given(tmp_path: Path) -> None:
    paper = Train(out=tmp_path)
    assert (paper.schedule, paper.warmup_epochs, paper.weight_decay) == ("constant", 0, 0)
    better = Train(out=tmp_path, recipe="recommended")
    assert (better.schedule, better.warmup_epochs, better.weight_decay) == ("cosine", 1, 1e-4)
    assert better.learning_rate == paper.learning_rate
    assert better.momentum == paper.momentum == 0.9
    # Values that are given win, those of the paper too.
    mixed = parse(command(tmp_path, recipe="recommended", schedule="constant", weight_decay="0"))
    assert isinstance(mixed, Train)
    assert (mixed.schedule, mixed.warmup_epochs, mixed.weight_decay) == ("constant", 0.3, 0)
    assert Train(out=tmp_path, recipe="recommended", schedule="onecycle").warmup_epochs == 0
    assert from_json(to_json(mixed)) == Train(**{k: getattr(mixed, k) for k in to_json(mixed)})


@pytest.mark.parametrize("recipe", ["recommended", "best"])
def test_recipes_standardize_filters(recipe: Any, tmp_path: Path) -> None:
    """Unless a norm is given, or the network does not have such layers."""
    assert Train(out=tmp_path).norm == "agc"
    assert Train(out=tmp_path, recipe=recipe).norm == "agc+ws"
    assert Train(out=tmp_path, recipe=recipe, norm="agc").norm == "agc"
    assert Train(out=tmp_path, recipe=recipe, norm="bn").norm == "bn"
    assert Train(out=tmp_path, recipe=recipe, model="smp:Unet/resnet34").norm == "agc"


def test_run_records_its_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {**SMALL, "epochs": "1", "recipe": "recommended"}
    train_here(tmp_path, **flags)
    values = json.loads((tmp_path / "config.json").read_text())["config"]
    assert values["recipe"] == "recommended"
    assert (values["schedule"], values["warmup_epochs"]) == ("cosine", 0.1)
    assert values["weight_decay"] == 1e-4
    assert main(["train", "--out", str(tmp_path)]) == 0  # resumes with its own settings
    assert main(["train", "--out", str(tmp_path), "--recipe", "paper"]) == 1
    assert "--recipe was recommended, now paper" in capsys.readouterr().err


def test_moving_average() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average = MovingAverage(model, optimizer, decay=0.5)
    expected = 0.0
    for step in range(1, 30):
        model.weight.grad = torch.full((1, 1), -1.0)  # the weight grows by 1
        optimizer.step()
        expected += max(0.5, 9 / (10 + step)) * (step - expected)
        assert average.model.weight.item() == pytest.approx(expected, rel=1e-5)
    assert not average.model.weight.requires_grad
    with pytest.raises(CheckpointError, match="no valid moving average"):
        average.restore(None)


def test_patience(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate of almost 0 never lowers the error again."""
    flags = {**SMALL, "epochs": "9", "lr": "1e-9", "patience": "2", "save_epochs": "1"}
    train_here(tmp_path / "run", **flags)
    printed = " ".join(capsys.readouterr().out.split())
    assert "stopped after epoch 3 of 9: the lowest error is 2 epochs old" in printed
    assert len(metrics(tmp_path / "run")) == 4
    train_here(tmp_path / "run", **flags)  # still out of patience
    assert len(metrics(tmp_path / "run")) == 4


def test_patience_counts_from_the_first_epoch_with_the_lowest_error() -> None:
    """A network that predicts one class keeps its error, while its loss still falls."""
    run = TrainingRun.__new__(TrainingRun)
    run.__dict__.update(
        position=Position(epoch=0),
        loss_sum=torch.zeros(()),
        config=SimpleNamespace(patience=2, minutes=None, epochs=100, save_epochs=1),
    )
    stops = []
    for epoch in range(1, 5):
        run.advance_epoch(0.5, 1 / epoch)
        stops.append(run.reason_to_stop(0.0) is not None)
    assert stops == [False, False, True, True]
    assert run.position.best_epoch == 4  # of equal errors the lowest loss


def test_minutes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_here(whole, **SMALL)
    for epochs in (1, 2, 3):  # at least one epoch each time
        train_here(run, **SMALL, minutes="1e-6", save_epochs="1")
        assert len(metrics(run)) == 1 + epochs
    printed = " ".join(capsys.readouterr().out.split())
    assert "stopped after epoch 2 of 3: another epoch would not end within" in printed
    assert differences(run, whole) == []
