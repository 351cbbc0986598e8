"""What goes wrong is said in words that help, and what was saved stays as it was."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from deepcontrol import AGCConv2d, cli
from deepcontrol.step import TrainingStep
from deepcontrol.workbench import runfolder
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data.streets import Streets
from deepcontrol.workbench.models import SegNet
from deepcontrol.workbench.train import epoch, saving
from deepcontrol.workbench.train.checkpoint import Checkpoint, load
from deepcontrol.workbench.train.events import Events
from deepcontrol.workbench.train.faults import find_culprit
from tests.workbench.train.runs import command, differences, start, train_here


def before_step(step: int, act: Any, patch: pytest.MonkeyPatch) -> None:
    """act(the TrainingStep) before a step of a run."""
    steps, call = itertools.count(1), TrainingStep.__call__

    def counted(self: TrainingStep, *batch: Tensor) -> Tensor:
        if next(steps) == step:
            act(self)
        return call(self, *batch)

    patch.setattr(TrainingStep, "__call__", counted)


def save_at_once(patch: pytest.MonkeyPatch) -> None:
    """Training waits for its checkpoints, so that a step finds them on the disk."""
    save = saving.Saver.save

    def saved(self: saving.Saver, checkpoint: Checkpoint, is_best: bool = False) -> None:
        save(self, checkpoint, is_best)
        self.wait()

    patch.setattr(saving.Saver, "save", saved)


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

    save_at_once(monkeypatch)
    before_step(7, poison, monkeypatch)
    assert main(command(run)) == 1
    said = capsys.readouterr().err
    assert "step 3 of epoch 2 is not finite" in said
    assert "decoder.1.convolutions.2 (AGCConv2d) was the first to give it" in said
    assert f"{run / 'last'} is the last checkpoint from before that, {run / 'best'} the" in said
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


def test_a_network_that_cannot_be_evaluated_is_neither_written_down_nor_saved(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only step of an epoch is finite; with the weights after it no output is."""
    assert main(command(run, lr=1e30, train_limit=2)) == 1
    said = capsys.readouterr().err
    assert "after epoch 1 the network's outputs on the validation images are not finite" in said
    assert "nothing was saved yet" in said
    assert [line["epoch"] for line in runfolder.read_records(run / runfolder.METRICS)] == [0]
    diverged = json.loads((run / runfolder.DIVERGED).read_text())
    assert (diverged["epoch"], diverged["step"]) == (1, None)
    assert not (run / "last").exists()
    assert not (run / "best").exists()


def test_a_checkpoint_on_its_way_is_waited_for(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step after a save is not finite, and the save is slow; or it fails."""
    save = saving.save_last

    def poison(step: TrainingStep) -> None:
        with torch.no_grad():
            next(step.model.parameters()).fill_(torch.nan)

    def slow(*args: Any, **how: Any) -> None:
        time.sleep(0.5)
        save(*args, **how)

    def full(*args: Any, **how: Any) -> None:
        time.sleep(0.5)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for writer, message in (
        (slow, f"not made; {run / 'last'} is the last checkpoint from before that"),
        (full, "nothing was saved yet (a later one was lost: [Errno 28] No space left on device)"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(saving, "save_last", writer)
            before_step(2, poison, patch)
            shutil.rmtree(run, ignore_errors=True)
            assert main(command(run, save_steps=1)) == 1
        assert message in capsys.readouterr().err


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


def test_out_of_memory_in_an_evaluation_tries_evaluations(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, tried = SegNet.forward, []

    def limited(self: SegNet, x: Tensor) -> Tensor:
        if not self.training:
            tried.append(len(x))
            if len(x) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, x)

    monkeypatch.setattr(SegNet, "forward", limited)
    assert main(command(run, batch_size=4, val_limit=4)) == 1
    assert "MiB: --batch-size 1 fits, it was tried" in capsys.readouterr().err
    assert tried == [4, 2, 1]


def test_out_of_memory_before_the_first_step(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def huge(*_: Any) -> None:
        raise MemoryError("Unable to allocate 37.3 GiB for an array")

    monkeypatch.setattr(Streets, "read", huge)
    monkeypatch.setattr(Streets, "fingerprint", lambda _: "of none that is there")
    assert main(command(run, size="32x96")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "out of memory on cpu before the first step, with images of 32x96" in line
    assert "choose a smaller --size" in line


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

    class Full:
        """torch has errors of its own for what such a file raises."""

        def __init__(self, file: BinaryIO) -> None:
            self.file, self.room = file, k

        def write(self, content: bytes) -> int:
            self.room -= self.file.write(content[: self.room])
            if self.room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return len(content)

        def flush(self) -> None:
            self.file.flush()

    def full(state: Any, file: BinaryIO) -> None:
        # Each epoch saves its best and itself here.
        save(state, Full(file) if next(saves) == 4 else file)  # type: ignore[arg-type]

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
        patch.setattr(runfolder.os, "fsync", full)
        with pytest.raises(OSError, match=r"metrics\.jsonl could not be written"):
            runfolder.append_record(run / runfolder.METRICS, {"epoch": 2})
    train_here(run)  # what was written of that line is gone again
    assert differences(run, whole) == []


def test_a_full_disk_under_the_pictures(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who writes them does not know where, and the system does not say how much is left."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(epoch, "save_png", full)
    assert main(command(run)) == 1
    said = capsys.readouterr().err
    assert re.search(rf"{run} could not be written: the disk is full, [\d,]+ bytes are free", said)


@pytest.mark.parametrize("words", [["data", "sheet", "--out"], ["export"]])
def test_a_full_disk_is_that_which_is_written_to(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("run_sheet", "run_export"):
        monkeypatch.setattr(cli, name, full)
    assert main([*words, str(tmp_path / "there")]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / 'there'} could not be written: the disk is full" in said


def test_validation_images_without_any_label_are_refused(
    camvid: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (camvid / "valannot").iterdir():
        with Image.open(path) as label:
            Image.new("L", label.size, 11).save(path)
    kind = {"data": "camvid", "data_root": camvid, "train_limit": 2, "val_limit": 2}
    assert main(command(run, **kind)) == 1
    assert "camvid-val: no pixel has a label" in capsys.readouterr().err


def test_a_full_disk_under_tensorboard_ends_tensorboard_alone(
    whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "flush", full)
        patch.setattr(SummaryWriter, "close", full)
        train_here(run)
        assert capsys.readouterr().out.count("TensorBoard stopped: [Errno 28] No space left") == 1
    assert differences(run, whole) == []
    said: list[str] = []
    events = Events(run, 4, said.append)
    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "close", full)
        events.close()
    assert said == ["TensorBoard stopped: [Errno 28] No space left on device"]


def test_without_tensorboard(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train_here(run, epochs=1)
    assert capsys.readouterr().out.count("nothing is written for TensorBoard: ") == 1


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
