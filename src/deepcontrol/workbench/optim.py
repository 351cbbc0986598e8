"""The learning rate rule of the paper, and SGD that can skip an update."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

LR_PER_SAMPLE = 0.02
HIGHEST_MOMENTUM = 0.999


def learning_rate(batch_size: int) -> float:
    """Return the learning rate of the paper: 0.02 x batch size.

    The paper's rule is for a loss that is averaged over the batch.

    >>> learning_rate(4)
    0.08
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    return LR_PER_SAMPLE * batch_size


def sgd(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    lr: float,
    momentum: float,
    sharded: bool = False,
) -> torch.optim.SGD:
    """Return SGD that skips the update if its `found_inf` flag is set.

    The flag is a tensor on the device. Set it if a gradient is not finite. Fused SGD reads it on
    the device, without synchronization. Sharded parameters do not support fused SGD; there the host
    reads the flag.

    Args:
        parameters: Parameters or parameter groups. Weight decay is 0 unless a group sets it.
        lr: Learning rate.
        momentum: From 0 to HIGHEST_MOMENTUM.
        sharded: The parameters are sharded (FSDP).
    """
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    if not 0 <= momentum <= HIGHEST_MOMENTUM:
        raise ValueError(f"momentum must be from 0 to {HIGHEST_MOMENTUM}, got {momentum}")
    if sharded:
        return SynchronizingSGD(parameters, lr=lr, momentum=momentum)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, fused=True)


class SynchronizingSGD(torch.optim.SGD):
    """SGD that reads `found_inf` on the host before each update."""

    found_inf: Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        if self.found_inf is not None and bool(self.found_inf):
            return None
        flag, self.found_inf = self.found_inf, None  # only fused SGD accepts the flag
        try:
            return super().step(closure)
        finally:
            self.found_inf = flag
