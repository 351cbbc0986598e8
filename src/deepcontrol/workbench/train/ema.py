"""Exponential moving average of the weights: what is evaluated and saved with --ema."""

import copy
import math
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .checkpoint import CheckpointError
from .snapshot import load_weights, mismatch

WARMUP = 10  # the first averages are over about a tenth of the steps so far


class MovingAverage:
    """A copy of a model whose parameters follow those of the model.

        average = average + w * (weights - average)        w = max(1 - decay, 9 / (10 + steps))

    The larger w of the first steps forgets the initialization. Buffers (BatchNorm's statistics) are
    copied, not averaged. The update runs after each step of the optimizer and inside a captured
    step.

    Args:
        model: The model that is trained.
        optimizer: Its optimizer.
        decay: Decay per step, such as 0.999.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self.trained, self.decay = model, decay
        self.model = copy.deepcopy(model).requires_grad_(False)
        device = next(model.parameters()).device
        self.steps = torch.zeros((), dtype=torch.float64, device=device)
        self._pairs = list(zip(self.model.parameters(), model.parameters(), strict=True))
        optimizer.register_step_post_hook(lambda *_: self.update())

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights."""
        self.steps.add_(1)
        weight = ((WARMUP - 1) / (WARMUP + self.steps)).clamp(min=1 - self.decay)
        for average, trained in self._pairs:
            average.lerp_(trained, weight.to(average.dtype))

    @torch.no_grad()
    def copy_buffers(self) -> None:
        """Copy the model's buffers, which are not averaged."""
        for own, trained in zip(self.model.buffers(), self.trained.buffers(), strict=True):
            own.copy_(trained)

    def state(self) -> dict[str, Any]:
        """Return the trained weights and the steps. A checkpoint's weights are the average."""
        return {"weights": self.trained.state_dict(), "steps": self.steps}

    def restore(self, state: object) -> None:
        """Set the trained weights and the steps of a checkpoint.

        Raises:
            CheckpointError: The state is missing or does not match the model.
        """
        weights = state.get("weights") if isinstance(state, dict) else None
        steps = state.get("steps") if isinstance(state, dict) else None
        if not isinstance(weights, dict) or not _is_count(steps):
            raise CheckpointError(
                "the checkpoint has no valid moving average: expected the trained weights and "
                "their steps"
            )
        load_weights(self.trained, weights)
        self.steps.copy_(steps)


def _is_count(value: object) -> TypeGuard[Tensor]:
    if mismatch(value, torch.zeros((), dtype=torch.float64)):
        return False
    return 0 <= float(value) < math.inf  # type: ignore[arg-type]


def evaluated_model(model: nn.Module, average: MovingAverage | None) -> nn.Module:
    """Return the model to evaluate and save: the average, if there is one."""
    return model if average is None else average.model
