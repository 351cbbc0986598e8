"""What a checkpoint says is believed only where it fits the run."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepcontrol.optim import sgd
from deepcontrol.train.checkpoint import Checkpoint, CheckpointError
from deepcontrol.train.distributed import Group
from deepcontrol.train.saving import Position, restore, snapshot

ALONE = Group(torch.device("cpu"))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimiser = sgd(model.parameters(), 0.1, 0.9)
    model(torch.randn(4, 3)).square().sum().backward()
    optimiser.step()
    return model, optimiser


def test_a_snapshot_is_put_back() -> None:
    model, optimiser = trained()
    at = Position(epoch=2, step=3, images=6, loss_sum=1.5)
    taken = snapshot(model, optimiser, at, ALONE)
    other, its = trained()
    its.param_groups[0]["lr"] = 0.3
    assert restore(taken, other, its, ALONE) == at
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimiser.state[a]["momentum_buffer"], its.state[b]["momentum_buffer"])
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
    model, optimiser = trained()
    taken = snapshot(model, optimiser, Position(), ALONE)
    tampered = Checkpoint(taken.model, change(copy.deepcopy(taken.state)))
    with pytest.raises(CheckpointError):
        restore(tampered, model, optimiser, ALONE)
