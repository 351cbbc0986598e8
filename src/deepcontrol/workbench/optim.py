"""The optimizer's side: the paper's rule for the learning rate, and its SGD."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

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
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    lr: float,
    momentum: float,
    sharded: bool = False,
) -> torch.optim.SGD:
    """SGD at a fixed rate, without weight decay unless a parameter group has its own.

    An update can be left out by a flag on the device, the optimizer's `found_inf`: a step whose
    gradient is not finite then changes nothing. Torch's fused form, which serves any device, looks
    at it there, and nobody waits. It does not take sharded parameters: those wait.
    """
    if not lr > 0:
        raise ValueError(f"a learning rate is positive, got {lr}")
    if not 0 <= momentum <= HIGHEST_MOMENTUM:
        raise ValueError(f"momentum is from 0 to {HIGHEST_MOMENTUM}, got {momentum}")
    if sharded:
        return WaitingSGD(parameters, lr=lr, momentum=momentum)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, fused=True)


class WaitingSGD(torch.optim.SGD):
    """SGD in its plain form that looks at `found_inf` before it makes an update."""

    found_inf: Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        if self.found_inf is not None and bool(self.found_inf):
            return None
        flag, self.found_inf = self.found_inf, None  # torch refuses the flag in this form
        try:
            return super().step(closure)
        finally:
            self.found_inf = flag
