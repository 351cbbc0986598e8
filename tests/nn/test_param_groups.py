"""param_groups: weight decay for the filters only."""

import pytest
import torch
from torch import nn

from deepcontrol import AGC2d, AGCConv2d, AGCLinear, param_groups


def test_only_filters_have_weight_decay() -> None:
    model = nn.Sequential(
        AGCConv2d(3, 8, 3), nn.Conv2d(8, 8, 1), AGC2d(8), nn.BatchNorm2d(8), AGCLinear(8, 4)
    )
    decayed, free = param_groups(model, 0.1)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    names = {id(p): n for n, p in model.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == ["0.weight", "1.weight", "4.weight"]
    assert len(free["params"]) == len(names) - 3
    torch.optim.SGD([decayed, free], lr=0.1)


def test_frozen_parameters_shared_parameters_and_empty_groups() -> None:
    shared = AGCConv2d(4, 4, 1)
    model = nn.Sequential(shared, shared, AGC2d(4).requires_grad_(False))
    counts = [len(group["params"]) for group in param_groups(model, 0.1)]
    assert counts == [1, 3]
    assert len(param_groups(AGC2d(4), 0.1)) == 1


def test_negative_weight_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0, got -1"):
        param_groups(AGCConv2d(3, 8, 3), weight_decay=-1)


def test_parameters_in_place_of_the_model() -> None:
    with pytest.raises(TypeError, match=r"got generator: pass model, not model\.parameters\(\)"):
        param_groups(nn.Linear(3, 4).parameters(), 0.1)  # type: ignore[arg-type]
