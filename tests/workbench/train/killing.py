"""Kill runs at random moments and resume them: python killing.py FOLDER WORKERS COUNT

One process imports torch and forks for each run, which saves the import. It prints one line per
kill.
"""

import functools
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer would import it, which takes seconds

from deepcontrol.step import TrainingStep
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data.road_scenes import Streets
from deepcontrol.workbench.train.data import open_sources
from tests.workbench.train.runs import command, differences, tiny

EPOCHS, STEPS = 2, 8


def forked(arguments: list[str], kill_at: tuple[Path, int, float] | None = None) -> int:
    """Run in a fork, which may kill itself after a step. Return the exit status."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        torch.set_num_threads(1)
        if kill_at is not None:
            kill_after(*kill_at)
        code = main(arguments)
        time.sleep(
            10 if kill_at is not None else 0
        )  # wait for the kill, even if the run is finished
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_after(run: Path, step: int, seconds: float) -> None:
    """kill -9 some seconds after the start of a step: in the step, a save or an evaluation.

    Wait for a checkpoint first, because a run without one would simply restart.
    """
    steps, call = iter(range(1, STEPS + 1)), TrainingStep.__call__

    def counted(self: TrainingStep, *batch: torch.Tensor) -> torch.Tensor:
        if next(steps) == step:
            while not (run / "last").exists():
                time.sleep(0.001)
            kill = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
            kill.daemon = True
            kill.start()
        return call(self, *batch)

    TrainingStep.__call__ = counted  # type: ignore[method-assign]


def kill_and_resume(folder: Path, workers: int, number: int, whole: Path) -> str:
    rng = random.Random(1000 * workers + number)
    save_steps = rng.choice([0, 1, 3])
    first = save_steps or STEPS // EPOCHS  # the step of the first checkpoint
    step, seconds = rng.randrange(first + 1, STEPS + 1), rng.uniform(0, 0.04)
    run = folder / f"run{number}"
    arguments = command(run, epochs=EPOCHS, workers=workers, save_steps=save_steps)
    status = forked(arguments, (run, step, seconds))
    if status != -signal.SIGKILL:
        return f"was not killed: {status}"
    if not any((run / name).exists() for name in ("last", "previous")):
        return "had no checkpoint"
    status = forked(arguments)
    return ", ".join(differences(run, whole)) if status == 0 else f"did not resume: {status}"


def kill_many() -> None:
    folder, workers, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    whole = folder / "whole"
    # The fingerprint draws two scenes, which would take half of every run here.
    Streets.fingerprint = functools.cache(Streets.fingerprint)  # type: ignore[method-assign]
    for source in open_sources(tiny()):
        source.fingerprint()
    assert forked(command(whole, epochs=EPOCHS)) == 0
    for number in range(count):
        wrong = kill_and_resume(folder, workers, number, whole)
        print(f"{number}: {wrong or 'the same'}", flush=True)


if __name__ == "__main__":
    kill_many()
