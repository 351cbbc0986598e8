"""What a checkpoint says is believed only where it fits the run; and how it gets to the disk."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from deepcontrol.workbench.optim import sgd
from deepcontrol.workbench.train import saving
from deepcontrol.workbench.train.checkpoint import Checkpoint, CheckpointError
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.saving import Position, Saver, restore, snapshot

ALONE = Group(torch.device("cpu"))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = sgd(model.parameters(), 0.1, 0.9)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_snapshot_is_put_back() -> None:
    model, optimizer = trained()
    at = Position(epoch=2, step=3, images=6, loss_sum=1.5)
    taken = snapshot(model, optimizer, at, ALONE)
    other, its = trained()
    its.param_groups[0]["lr"] = 0.3
    assert restore(taken, other, its, ALONE) == at
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["momentum_buffer"], its.state[b]["momentum_buffer"])
    assert its.param_groups[0]["lr"] == 0.3  # the configuration's


def set_in(*keys: Any, value: Any) -> Callable[[dict[Any, Any]], Any]:
    def change(state: dict[Any, Any]) -> Any:
        inner = state
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        return state

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda state: [state],
        lambda state: {k: v for k, v in state.items() if k != "rng"},
        set_in("format", value=7),
        set_in("position", "epoch", value="2"),
        set_in("position", "step", value=-1),
        set_in("position", "more", value=1),
        set_in("optimiser", 0, "momentum_buffer", value=torch.zeros(3)),
        set_in("optimiser", 0, "momentum_buffer", value=torch.zeros(2, 3).half()),
        set_in("optimiser", 0, "momentum_buffer", value="a"),
        set_in("optimiser", 999, value={"momentum_buffer": torch.zeros(3)}),
        set_in("rng", value=[(torch.zeros(3, dtype=torch.uint8), None)]),
        set_in("rng", value=[7]),
    ],
)
def test_what_does_not_fit_is_refused(change: Callable[[Any], Any]) -> None:
    model, optimizer = trained()
    taken = snapshot(model, optimizer, Position(), ALONE)
    tampered = Checkpoint(taken.model, change(copy.deepcopy(taken.state)))
    with pytest.raises(CheckpointError):
        restore(tampered, model, optimizer, ALONE)


def checkpoint(epoch: int) -> Checkpoint:
    return Checkpoint({"epoch": torch.tensor(epoch)}, {"format": 1, "position": {}})


@dataclass
class Disk:
    """A slow one: nothing is written before it is let go; and it may be full."""

    written: list[tuple[str, int]] = field(default_factory=list)
    busy: Event = field(default_factory=Event)
    go: Event = field(default_factory=Event)
    full: bool = False

    def write(self, name: str, saved: Checkpoint) -> None:
        self.busy.set()
        assert self.go.wait(60)
        if self.full:
            raise CheckpointError("no room")
        self.written.append((name, int(saved.model["epoch"])))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(saving, "save_last", lambda run, a, last_is_whole: disk.write("last", a))
    monkeypatch.setattr(saving, "save_best", lambda run, a: disk.write("best", a))
    return disk


def test_training_does_not_wait_for_the_disk(disk: Disk, tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    saver.save(checkpoint(1))
    assert disk.busy.wait(60)
    for epoch, is_best in ((2, True), (3, True), (4, False), (5, False)):
        saver.save(checkpoint(epoch), is_best)
    assert not disk.written
    disk.go.set()
    saver.wait()
    assert disk.written == [("last", 1), ("best", 3), ("last", 5)]
    saver.save(checkpoint(6), is_best=True)
    saver.wait()
    assert disk.written[3:] == [("best", 6), ("last", 6)]
    saver.close()


def test_an_error_of_the_disk_comes_up_once(disk: Disk, tmp_path: Path) -> None:
    saver, disk.full = Saver(tmp_path), True
    saver.save(checkpoint(1))
    assert disk.busy.wait(60)
    saver.save(checkpoint(2))  # which goes with it
    disk.go.set()
    with pytest.raises(CheckpointError, match="no room"):
        saver.wait()
    disk.full = False
    saver.save(checkpoint(3))
    saver.wait()
    assert disk.written == [("last", 3)]
    saver.close()
