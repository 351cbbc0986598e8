"""No update with what is not finite, and nobody waits to find out.

Whether a step's loss and gradients are finite is decided on the device, between backward and
update, and stays decided: from the first bad step on, the optimizer leaves out its updates. The
program reads the flag when it suits it, and finds the model as it was before that step.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from .distributed import Group, own_part


class Guard:
    """TrainingStep's `before_update`: counts good steps, and stops the optimizer at a bad one."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: Group) -> None:
        self.group = group
        self.bad = torch.zeros((), device=group.device)  # 0 or 1; once 1, it stays
        self.good_steps = torch.zeros((), dtype=torch.float64, device=group.device)
        self._parameters = [p for g in optimizer.param_groups for p in g["params"]]
        # The names under which torch's own gradient scaler tells a fused optimizer to sit out.
        optimizer.found_inf, optimizer.grad_scale = self.bad, None  # type: ignore[attr-defined]

    def __call__(self, loss: Tensor) -> Tensor:
        gradients = [own_part(p.grad) for p in self._parameters if p.grad is not None]
        # The largest magnitude, since the squares of finite numbers can overflow.
        largest = get_total_norm([g for g in gradients if g.numel()], torch.inf)
        bad = ~(torch.isfinite(loss) & torch.isfinite(largest))
        # Over all processes, so that they decide alike. Bad ones are counted: the largest of the
        # processes' values would not have to be NaN where one is.
        loss, bad = self.group.mean(torch.stack([loss, bad.to(loss.dtype)]))
        bad = (bad > 0) | ~torch.isfinite(loss)
        self.bad.copy_(torch.maximum(self.bad, bad.float()))
        self.good_steps.add_(1 - self.bad)
        return loss


class Reading(NamedTuple):
    loss: float
    bad: bool  # whether a step was not finite
    good_steps: int  # before it


class Gauge:
    """What the guard knows, for the host to read."""

    def __init__(self, guard: Guard) -> None:
        self.guard, on_gpu = guard, guard.bad.is_cuda
        self._host = torch.zeros(3, dtype=torch.float64, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None
        self._posted = False

    def read_after(self, loss: Tensor) -> Reading:
        """After a step. A GPU is not waited for: there it is what was read the time before."""
        if self._arrived is None:
            self._post(loss)
            return self._read()
        if not self._posted:  # the first time there is nothing from before
            self._post(loss)
            self._arrived.record()
        self._arrived.synchronize()
        reading = self._read()
        self._post(loss)
        self._arrived.record()
        return reading

    def read_now(self) -> Reading:
        """As it is once the device has done all steps; the loss is not known."""
        return Reading(float("nan"), bool(self.guard.bad), int(self.guard.good_steps))

    def _post(self, loss: Tensor) -> None:
        self._posted = True
        values = [loss.double(), self.guard.bad.double(), self.guard.good_steps]
        self._host.copy_(torch.stack(values), non_blocking=True)

    def _read(self) -> Reading:
        loss, bad, good = self._host.tolist()
        return Reading(loss, bad > 0, int(good))
