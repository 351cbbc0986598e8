"""Learning rates, their schedule, and SGD."""

import math

import pytest
import torch
from torch import nn

from deepcontrol.workbench.optim import default_lr, learning_rate, scheduled_lr, set_lr, sgd


def test_learning_rate_rule() -> None:
    assert [learning_rate(n) for n in (1, 4, 8)] == pytest.approx([0.02, 0.08, 0.16])
    with pytest.raises(ValueError, match="got 0"):
        learning_rate(0)


def test_default_learning_rates() -> None:
    assert default_lr("segmentation", 8) == learning_rate(8)
    assert default_lr("classification", 128) == pytest.approx(0.1)
    assert default_lr("classification", 1) == pytest.approx(0.1 / 128**0.75)
    with pytest.raises(ValueError, match="got 0"):
        default_lr("classification", 0)


def test_schedules() -> None:
    assert [scheduled_lr(0.3, step, 10) for step in range(10)] == [0.3] * 10
    warm = [scheduled_lr(1.0, step, 10, warmup_steps=4) for step in range(6)]
    assert warm == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = [scheduled_lr(2.0, step, 8, schedule="cosine") for step in range(9)]
    assert cosine[0] == 2.0
    assert cosine[4] == pytest.approx(1.0)
    assert cosine[8] == pytest.approx(0.0)
    assert sorted(cosine, reverse=True) == cosine
    both = [scheduled_lr(1.0, step, 8, 2, "cosine") for step in range(8)]
    assert both[:3] == [0.5, 1.0, 1.0]
    assert both[7] == pytest.approx(0.5 * (1 + math.cos(math.pi * 5 / 6)))
    assert scheduled_lr(1.0, 3, 4, 4, "cosine") == 1.0  # nothing but a warm-up


def test_learning_rate_of_all_groups_is_set() -> None:
    layer = nn.Linear(2, 2)
    for lr in (0.1, torch.tensor(0.1)):
        groups = [{"params": [p]} for p in layer.parameters()]
        optimizer = sgd(groups, lr, 0.9)
        before = [group["lr"] for group in optimizer.param_groups]
        set_lr(optimizer, 0.5)
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.5]
        if isinstance(lr, torch.Tensor):  # a captured step reads the same memory
            assert all(g["lr"] is b for g, b in zip(optimizer.param_groups, before, strict=True))


@pytest.mark.parametrize("sharded", [False, True])
def test_sgd_matches_torch(sharded: bool) -> None:
    torch.manual_seed(0)
    mine, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(mine.state_dict())
    optimizers = (
        sgd(mine.parameters(), lr=0.1, momentum=0.999, sharded=sharded),
        torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.999),
    )
    x = torch.randn(5, 3)
    for _ in range(5):
        for model, optimizer in zip((mine, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("lr", "momentum"), [(0.0, 0.9), (0.1, 1.0), (0.1, -0.1)])
def test_invalid_hyperparameters_raise(lr: float, momentum: float) -> None:
    with pytest.raises(ValueError, match="got"):
        sgd(nn.Linear(2, 2).parameters(), lr, momentum)
