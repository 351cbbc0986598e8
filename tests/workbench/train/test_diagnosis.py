"""Faults are explained, saved checkpoints stay unchanged, and impossible runs are refused."""

import errno
import itertools
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepcontrol.step import TrainingStep
from deepcontrol.workbench import hardware
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data import open_source, prepare
from deepcontrol.workbench.data.road_scenes import Streets
from deepcontrol.workbench.folders import runfolder, storage
from deepcontrol.workbench.models import SegNet
from deepcontrol.workbench.train import checkpoint as checkpoint_module
from deepcontrol.workbench.train import diagnosis, plan
from deepcontrol.workbench.train.checkpoint import Checkpoint, CheckpointWriter, load
from deepcontrol.workbench.train.diagnosis import check_memory, step_bytes
from tests.workbench.train.runs import command, tiny


def before_step(step: int, act: Any, patch: pytest.MonkeyPatch) -> None:
    """Call act(training_step) before a step of a run."""
    steps, call = itertools.count(1), TrainingStep.__call__

    def counted(self: TrainingStep, *batch: Tensor) -> Tensor:
        if next(steps) == step:
            act(self)
        return call(self, *batch)

    patch.setattr(TrainingStep, "__call__", counted)


def save_synchronously(patch: pytest.MonkeyPatch) -> None:
    """Make training wait for its checkpoints, so that they are on the disk at the next step."""
    save = CheckpointWriter.save

    def save_and_wait(
        self: CheckpointWriter, checkpoint: Checkpoint, is_best: bool = False
    ) -> None:
        save(self, checkpoint, is_best)
        self.wait()

    patch.setattr(CheckpointWriter, "save", save_and_wait)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_nonfinite_loss_stops_before_the_update(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def poison(step: TrainingStep) -> None:
        with torch.no_grad():
            step.model.get_submodule("decoder.1.convolutions.2").bias.fill_(torch.inf)  # type: ignore[union-attr,operator]
        seen["parameters"] = [p.clone() for p in step.model.parameters()]
        seen["model"] = step.model
        seen["last"] = files(run / "last")

    save_synchronously(monkeypatch)
    before_step(7, poison, monkeypatch)
    assert main(command(run)) == 1
    message = capsys.readouterr().err
    assert "step 3 of epoch 2 is not finite" in message
    assert "value is the output of decoder.1.convolutions.2 (AGCConv2d). The update" in message
    assert f"the last checkpoint is {run / 'last'}, the best {run / 'best'}." in message
    diverged = json.loads((run / "diverged.json").read_text())
    assert (diverged["epoch"], diverged["step"]) == (2, 3)
    for now, then in zip(seen["model"].parameters(), seen["parameters"], strict=True):
        assert torch.equal(now, then)
    assert files(run / "last") == seen["last"]
    assert load(run / "last").state["position"]["epoch"] == 1


def test_learning_rate_that_is_too_high(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a patch: the first update makes the second step overflow."""
    assert main(command(run, lr=1e30)) == 1
    message = capsys.readouterr().err
    assert "step 2 of epoch 1 is not finite: " in message
    assert "the first non-finite value is " in message
    assert "there is no checkpoint yet" in message
    assert "--lr" in message
    assert not (run / "last").exists()


def test_nonfinite_evaluation_is_neither_recorded_nor_saved(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only step of the epoch is finite, but the outputs after its update are not."""
    assert main(command(run, lr=1e30, train_limit=2)) == 1
    message = capsys.readouterr().err
    assert "after epoch 1 the network's outputs on the validation images are not finite" in message
    assert "there is no checkpoint yet" in message
    assert [line["epoch"] for line in storage.read_records(run / runfolder.METRICS)] == [0]
    diverged = json.loads((run / runfolder.DIVERGED).read_text())
    assert (diverged["epoch"], diverged["step"]) == (1, None)
    assert not (run / "last").exists()
    assert not (run / "best").exists()


def test_fault_waits_for_the_checkpoint_in_progress(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step after a save is not finite, and the save is slow or fails."""
    save = checkpoint_module.save_last

    def poison(step: TrainingStep) -> None:
        with torch.no_grad():
            next(step.model.parameters()).fill_(torch.nan)

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)
        save(*args, **kwargs)

    def full(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for save_last, expected in (
        (slow, f"skipped; the last checkpoint is {run / 'last'}"),
        (full, "no checkpoint yet (a later checkpoint failed: [Errno 28] No space left on device)"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_module, "save_last", save_last)
            before_step(2, poison, patch)
            shutil.rmtree(run, ignore_errors=True)
            assert main(command(run, save_steps=1)) == 1
        assert expected in capsys.readouterr().err


def test_out_of_memory_suggests_a_batch_size_that_fits(
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
    message = capsys.readouterr().err
    assert "out of memory on cpu at batch size 7 (peak " in message
    assert "MiB): --batch-size 3 fits (tested)" in message
    assert tried == [7, 3]
    assert main(command(run.with_name("smaller"), batch_size=3, epochs=1)) == 0


def test_out_of_memory_in_an_evaluation_tests_evaluations(
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
    assert "MiB): --batch-size 1 fits (tested)" in capsys.readouterr().err
    assert tried == [4, 2, 1]


def test_out_of_memory_before_the_first_step(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def huge(*_: Any) -> None:
        raise MemoryError("Unable to allocate 37.3 GiB for an array")

    monkeypatch.setattr(Streets, "read", huge)
    monkeypatch.setattr(Streets, "fingerprint", lambda _: "not cached")
    assert main(command(run, size="32x96")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "out of memory on cpu before the first step, with images of 32x96" in line
    assert "choose a smaller --size" in line


def test_failed_gpu_names_the_step_and_the_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/faults/test_gpu.py provokes the error in a replayed step on a GPU."""

    def fail(step: TrainingStep) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")

    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    before_step(7, fail, monkeypatch)
    assert main(command(run)) == 1
    message = capsys.readouterr().err
    assert "failed in epoch 2, at step 2 of 4 or before: CUDA error: device-side assert" in message
    assert f"triggered; the last checkpoint is {run / 'last'}, the best {run / 'best'}." in message
    assert "Run the same command to resume." in message
    assert codes == [1]
    assert not (run / runfolder.DIVERGED).exists()
    monkeypatch.undo()
    assert main(command(run)) == 0


# Memory that a run needs


CPU = torch.device("cpu")


@pytest.mark.parametrize("size", ["100000x100000", "1000000000x1000000000"])
def test_impossible_sizes_are_refused(
    size: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def decode(*args: Any) -> None:
        pytest.fail("the images were decoded")

    monkeypatch.setattr("deepcontrol.workbench.train.start.build_data", decode)
    assert main(command(run, size=size)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"a step with 2 images of {size} needs at least" in line
    assert "smaller --batch-size, --size or --width" in line


def test_only_what_exceeds_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(tiny(), width=1.0, size=(1024, 1024))
    source = open_source("streets", "train", limit=7)
    needed = step_bytes(config, len(source.classes), 2, CPU)
    for total, refused in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(diagnosis, "total_memory", lambda device, total=total: total)
        if refused:
            with pytest.raises(
                ValueError, match="a step with 2 images of 1024x1024 needs at least"
            ):
                check_memory(config, source, CPU)
            check_memory(config, replace(source, count=1), CPU)  # a smaller batch
            check_memory(replace(config, engine="compile"), source, CPU)  # saves less
        else:
            check_memory(config, source, CPU)


def test_the_estimate_is_that_of_the_plan(run: Path) -> None:
    config = tiny(run, width=0.1)
    planned = plan(config)
    assert step_bytes(config, 19, 2, CPU) == pytest.approx(planned.memory_mib * 2**20)


def test_total_memory_respects_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hardware.total_memory(CPU)
    assert 2**28 < whole < 2**50
    monkeypatch.setattr("resource.getrlimit", lambda kind: (2**27, 2**27))
    assert hardware.total_memory(CPU) == 2**27


def test_caches_of_impossible_sizes_are_refused(tmp_path: Path) -> None:
    source = open_source("streets", "val", limit=2)
    with pytest.raises(ValueError, match="images of 100000000x100000000 are too large"):
        prepare(source, (10**8, 10**8), tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
