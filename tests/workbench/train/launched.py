"""Script for torchrun: `deepcontrol`, with process 1 killed at a step before any restart.

torchrun ... launched.py DIES_AT train ...        0: no kill
"""

import atexit
import itertools
import os
import signal
import sys

import torch

from deepcontrol.step import TrainingStep
from deepcontrol.workbench.cli import main


def die_at(step: int) -> None:
    steps, call = itertools.count(1), TrainingStep.__call__

    def counted(self: TrainingStep, *batch: torch.Tensor) -> torch.Tensor:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(self, *batch)

    TrainingStep.__call__ = counted  # type: ignore[method-assign]


SHUTDOWN = "Python shut down normally"

if __name__ == "__main__":
    step, is_first_start = int(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if not (step and is_first_start):
        atexit.register(print, SHUTDOWN, flush=True)
    elif os.environ["RANK"] == "1":
        die_at(step)
    sys.exit(main(sys.argv[2:]))
