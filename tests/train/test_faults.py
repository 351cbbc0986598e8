"""What goes wrong is said in words that help, and what was saved stays as it was."""

import errno
import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGCConv2d
from deepcontrol.cli import main
from deepcontrol.models import SegNet
from deepcontrol.train import TrainingStep, records
from deepcontrol.train.checkpoint import load
from deepcontrol.train.faults import find_culprit
from tests.train.runs import command, differences, start, train_here


def before_step(step: int, act: Any, patch: pytest.MonkeyPatch) -> None:
    """act(the TrainingStep) before a step of a run."""
    steps, call = itertools.count(1), TrainingStep.__call__

    def counted(self: TrainingStep, *batch: Tensor) -> Tensor:
        if next(steps) == step:
            act(self)
        return call(self, *batch)

    patch.setattr(TrainingStep, "__call__", counted)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_loss_that_is_not_finite_stops_before_the_update(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def poison(step: TrainingStep) -> None:
        with torch.no_grad():
            step.model.get_submodule("decoder.1.convolutions.2").bias.fill_(torch.inf)  # type: ignore[union-attr,operator]
        seen["parameters"] = [p.clone() for p in step.model.parameters()]
        seen["model"] = step.model
        seen["last"] = files(run / "last")

    before_step(7, poison, monkeypatch)
    assert main(command(run)) == 1
    said = capsys.readouterr().err
    assert "step 3 of epoch 2 is not finite" in said
    assert "decoder.1.convolutions.2 (AGCConv2d) was the first to give it" in said
    assert "last is the last good checkpoint" in said
    diverged = json.loads((run / "diverged.json").read_text())
    assert (diverged["epoch"], diverged["step"]) == (2, 3)
    for now, then in zip(seen["model"].parameters(), seen["parameters"], strict=True):
        assert torch.equal(now, then)
    assert files(run / "last") == seen["last"]
    assert load(run / "last").state["position"]["epoch"] == 1


def test_a_rate_that_is_too_high(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is broken by hand here: the first update makes the second step overflow."""
    assert main(command(run, lr=1e30)) == 1
    said = capsys.readouterr().err
    assert "step 2 of epoch 1 is not finite: " in said
    assert "was the first" in said
    assert "nothing was saved yet" in said
    assert "--lr" in said
    assert not (run / "last").exists()


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.nan


class BrokenBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NanBackward.apply(x)


def test_a_gradient_alone_can_be_the_first() -> None:
    model = nn.Sequential(AGCConv2d(3, 4, 3), AGCConv2d(4, 4, 3), BrokenBackward())
    x = torch.randn(1, 3, 8, 8)
    found = find_culprit(model, lambda y: y.mean(), x, ())
    assert found == "the gradient at the output of 1 (AGCConv2d) was the first"
    assert find_culprit(model[:2], lambda y: y.mean(), x, ()) == ""
    assert "images" in find_culprit(model, lambda y: y.mean(), x / 0, ())
    found = find_culprit(model[:2], lambda y: y.mean() * torch.nan, x, ())
    assert found == "the loss was the first, of finite outputs"


def test_out_of_memory_says_what_would_fit(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, tried = SegNet.forward, []

    def limited(self: SegNet, x: Tensor) -> Tensor:
        if self.training:
            tried.append(len(x))
            if len(x) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, x)

    monkeypatch.setattr(SegNet, "forward", limited)
    assert main(command(run, batch_size=7)) == 1
    said = capsys.readouterr().err
    assert "out of memory on cpu at batch size 7, with a peak of " in said
    assert "MiB: --batch-size 3 fits, it was tried" in said
    assert tried == [7, 3]
    assert main(command(run.with_name("smaller"), batch_size=3, epochs=1)) == 0


@pytest.mark.parametrize("k", [0, 1, 1000, 20_000])
def test_a_full_disk_leaves_the_old_checkpoint(
    k: int,
    whole: Path,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A writer that fails at byte k of the second epoch's checkpoint."""
    saves, save = itertools.count(1), torch.save

    def full(state: Any, path: Path) -> None:
        save(state, path)
        if next(saves) == 4:  # each epoch saves its best and itself here
            with path.open("r+b") as file:
                file.truncate(k)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert main(command(run)) == 1
    said = capsys.readouterr().err
    assert f"{run / 'last'} could not be written" in said
    assert "No space left on device" in said
    needed = int(said.split("needs about ")[1].split(" bytes")[0].replace(",", ""))
    assert needed > 20_000
    assert load(run / "last").state["position"]["epoch"] == 1
    assert sorted(path.name for path in run.glob(".*")) == []  # the room is there for others
    train_here(run)  # once there is room, it goes on
    assert differences(run, whole) == []


def test_a_full_disk_under_the_metrics(
    whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    train_here(run, epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(records.os, "fsync", full)
        with pytest.raises(OSError, match=r"metrics\.jsonl could not be written"):
            records.append(run / records.METRICS, {"epoch": 2})
    train_here(run)  # what was written of that line is gone again
    assert differences(run, whole) == []


def test_of_concurrent_starts_exactly_one_proceeds(run: Path) -> None:
    processes = [start(run, epochs=1000) for _ in range(2)]
    refused: list[Any] = []
    while len(refused) < len(processes) - 1:
        refused = [p for p in processes if p.poll() is not None]
        time.sleep(0.1)
    (runs,) = [p for p in processes if p not in refused]
    for process in refused:
        _, said = process.communicate()
        assert process.returncode == 1
        assert f"{run} is in use by process {runs.pid} on" in said
    assert runs.poll() is None
    runs.send_signal(signal.SIGTERM)
    runs.communicate(timeout=60)
    assert runs.returncode == 143
