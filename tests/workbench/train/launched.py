"""What torchrun starts in tests: `deepcontrol`, and in the first life of process 1 a sudden end.

torchrun ... launched.py DIES_AT train ...        0: it does not die
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


WOUND_UP = "Python wound up"

if __name__ == "__main__":
    step, first_life = int(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if not (step and first_life):
        atexit.register(print, WOUND_UP, flush=True)
    elif os.environ["RANK"] == "1":
        die_at(step)
    sys.exit(main(sys.argv[2:]))
