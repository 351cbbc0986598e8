"""The optimiser's side: the paper's rule for the learning rate, and its SGD."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

RATE_PER_IMAGE = 0.02
HIGHEST_MOMENTUM = 0.999


def learning_rate(batch_size: int) -> float:
    """The paper's rule, for a loss that is a mean over the batch: 0.02 x batch size.

    >>> learning_rate(4)
    0.08
    """
    if batch_size < 1:
        raise ValueError(f"a batch has at least 1 image, got {batch_size}")
    return RATE_PER_IMAGE * batch_size


def sgd(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], lr: float, momentum: float
) -> torch.optim.SGD:
    """SGD at a fixed rate, without weight decay unless a parameter group has its own.

    It is torch's fused form, on any device, since that alone can leave out an update by a flag on
    the device (`found_inf`): a step whose gradient is not finite changes nothing, and nobody waits
    to find out.
    """
    if not lr > 0:
        raise ValueError(f"a learning rate is positive, got {lr}")
    if not 0 <= momentum <= HIGHEST_MOMENTUM:
        raise ValueError(f"momentum is from 0 to {HIGHEST_MOMENTUM}, got {momentum}")
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, fused=True)
