"""Parameter groups: weight decay for the filters only."""

from typing import Any

from torch import nn


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return optimizer groups: weight decay for filters, none for the rest.

    Filters are the parameters with two or more dimensions. Decay of a gain would decay its filter a
    second time, and decay of lambda would pull it to 0, where deep networks train poorly.

    Args:
        model: The model to optimize. Frozen parameters are excluded; shared ones appear once.
        weight_decay: Weight decay of the filters.

    Returns:
        At most two groups, {"params": [...], "weight_decay": ...}; empty groups are omitted.

    >>> from deepcontrol import AGCConv2d
    >>> groups = param_groups(AGCConv2d(3, 8, 3), weight_decay=1e-4)
    >>> [(len(g["params"]), g["weight_decay"]) for g in groups]
    [(1, 0.0001), (3, 0.0)]
    """
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        raise TypeError(f"expected a model, got {found}: pass model, not model.parameters()")
    if weight_decay < 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
