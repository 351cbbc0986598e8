"""The learning rate rule and SGD."""

import pytest
import torch
from torch import nn

from deepcontrol.workbench.optim import learning_rate, sgd


def test_learning_rate_rule() -> None:
    assert [learning_rate(n) for n in (1, 4, 8)] == pytest.approx([0.02, 0.08, 0.16])
    with pytest.raises(ValueError, match="got 0"):
        learning_rate(0)


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
