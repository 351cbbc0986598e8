"""Run `deepcontrol` with a fault in a training step: python -m tests.faults.provoke FAULT STEP ...

The rest of the arguments are those of `deepcontrol`. On a GPU the step must be a replay of a
captured one.

    kill:0.02        kill -9, this many seconds after the step has begun
    not-finite       a filter overflows, so that the loss is not finite
    cuda-error       labels out of range, which a CUDA kernel answers with an assertion
    out-of-memory    an allocation that no device can make
"""

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from deepcontrol.step import TrainingStep
from deepcontrol.workbench.cli import main

NO_CLASS = 200  # no class id of any dataset, and not VOID


def overflow(step: TrainingStep, *batch: Tensor) -> None:
    with torch.no_grad():
        next(step.model.parameters()).fill_(3e38)


def break_labels(step: TrainingStep, *batch: Tensor) -> None:
    batch[1].fill_(NO_CLASS)


def allocate(step: TrainingStep, *batch: Tensor) -> None:
    torch.empty(2**50, dtype=torch.uint8, device=batch[0].device)


FAULTS: dict[str, Callable[..., None]] = {
    "not-finite": overflow,
    "cuda-error": break_labels,
    "out-of-memory": allocate,
}


def kill_in(seconds: float) -> Callable[..., None]:
    def fault(step: TrainingStep, *batch: Tensor) -> None:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()

    return fault


def inject(fault: Callable[..., None], number: int) -> None:
    """Let a fault happen at a step of this process."""
    steps, call = itertools.count(1), TrainingStep.__call__

    def counted(self: TrainingStep, *batch: Tensor) -> Tensor:
        if next(steps) == number:
            if batch[0].is_cuda and not self._graphs:
                sys.exit(f"step {number} is not captured: {self.why_eager}")
            fault(self, *batch)
        return call(self, *batch)

    TrainingStep.__call__ = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    name, _, seconds = sys.argv[1].partition(":")
    inject(kill_in(float(seconds)) if name == "kill" else FAULTS[name], int(sys.argv[2]))
    code = main(sys.argv[3:])
    if name == "kill":
        signal.pause()  # a run that was finished before the kill
    sys.exit(code)
