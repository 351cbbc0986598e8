"""Run `deepcontrol` with a fault in a training step: python -m tests.faults.provoke FAULT STEP ...

The rest of the arguments are those of `deepcontrol`. On a GPU the step must be a replay of a
captured one. Under torchrun, FAULT@RANK names the process, and a restart has no fault.

    kill:0.02        kill -9, this many seconds after the step has begun
    agent:0.02       the same to the parent process, which is torchrun
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


def kill_in(seconds: float, process: int) -> Callable[..., None]:
    def fault(step: TrainingStep, *batch: Tensor) -> None:
        timer = threading.Timer(seconds, os.kill, (process, signal.SIGKILL))
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


def is_selected(rank: str) -> bool:
    """Return whether this process is the one to harm."""
    own, restarts = (os.environ.get(k, "0") for k in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    return own == (rank or "0") and restarts == "0"


if __name__ == "__main__":
    fault, _, rank = sys.argv[1].partition("@")
    name, _, seconds = fault.partition(":")
    kills = {"kill": os.getpid, "agent": os.getppid}
    if is_selected(rank):
        act = kill_in(float(seconds), kills[name]()) if name in kills else FAULTS[name]
        inject(act, int(sys.argv[2]))
    code = main(sys.argv[3:])
    if name == "kill" and "RANK" not in os.environ:
        signal.pause()  # a run that was finished before the kill
    sys.exit(code)
