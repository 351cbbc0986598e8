"""Faults inside of captured steps on a GPU: kills, overflow, CUDA errors, exhausted memory.

    python -m pytest -m gpu tests/faults/test_gpu.py

Every run has a process of its own, since determinism and a CUDA error are properties of a process.
They run side by side, first all with their faults, then all again without.
"""

import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepcontrol.step import WARMUP_STEPS, TrainingStep
from deepcontrol.workbench.folders import runfolder
from deepcontrol.workbench.optim import sgd
from deepcontrol.workbench.train.checkpoint import load
from deepcontrol.workbench.train.data import build_data, open_sources
from deepcontrol.workbench.train.distributed import Group
from tests.processes import DEADLOCK
from tests.workbench.train.runs import command, differences, tiny

ROOT = Path(__file__).parents[2]
KILLS = 6
EPOCHS, STEPS = 4, 16  # 4 steps per epoch
FAULT_STEP, FAULT_EPOCH = 10, 3  # its second step
RUN = {"device": "cuda", "deterministic": "", "epochs": EPOCHS, "train_limit": 8}


@dataclass(frozen=True)
class Case:
    """A run with a fault."""

    name: str
    fault: str
    step: int
    save_steps: int = 0


def cases() -> list[Case]:
    rng = random.Random(0)
    found = [
        Case(
            f"kill{number}",
            f"kill:{rng.uniform(0, 0.05)}",
            rng.randrange(WARMUP_STEPS + 2, STEPS + 1),
            rng.choice([0, 1, 3]),
        )
        for number in range(KILLS)
    ]
    faults = ("not-finite", "cuda-error", "out-of-memory")
    return found + [Case(fault, fault, FAULT_STEP) for fault in faults]


@dataclass(frozen=True)
class Campaign:
    """The folder of all runs, and the ends of their processes."""

    folder: Path
    with_fault: dict[str, subprocess.CompletedProcess[str]]
    resumed: dict[str, subprocess.CompletedProcess[str]]

    def differences(self, name: str) -> list[str]:
        """Compare a resumed run with the uninterrupted one."""
        assert self.resumed[name].returncode == 0, self.resumed[name].stderr[-3000:]
        return differences(self.folder / name, self.folder / "whole")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    folder = tmp_path_factory.mktemp("gpu")
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": paths}
    environment["OMP_NUM_THREADS"] = "1"
    config = tiny(epochs=EPOCHS, train_limit=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        build_data(config, open_sources(config), Group(torch.device("cpu")), lambda *_: None)

    def train(case: Case, with_fault: bool) -> subprocess.CompletedProcess[str]:
        module = ["tests.faults.provoke", case.fault, str(case.step)]
        words = module if with_fault else ["deepcontrol"]
        run = command(folder / case.name, **RUN, save_steps=case.save_steps)
        return subprocess.run(
            [sys.executable, "-m", *words, *run],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLOCK,
        )

    all_cases, whole = cases(), Case("whole", "", 0)
    with ThreadPoolExecutor(len(all_cases) + 1) as pool:
        done_whole = pool.submit(train, whole, False)
        first = dict(
            zip(
                (case.name for case in all_cases),
                pool.map(lambda case: train(case, True), all_cases),
                strict=True,
            )
        )
        assert done_whole.result().returncode == 0, done_whole.result().stderr[-3000:]
        again = dict(
            zip(
                (case.name for case in all_cases),
                pool.map(lambda case: train(case, False), all_cases),
                strict=True,
            )
        )
    return Campaign(folder, first, again)


@pytest.mark.gpu
def test_kills_of_captured_runs_end_alike(campaign: Campaign) -> None:
    for number in range(KILLS):
        name = f"kill{number}"
        done = campaign.with_fault[name]
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
        assert campaign.differences(name) == []


@pytest.mark.gpu
def test_overflow_in_a_replay_is_named(campaign: Campaign) -> None:
    done = campaign.with_fault["not-finite"]
    assert done.returncode == 1
    message = f"error: step 2 of epoch {FAULT_EPOCH} is not finite: the first non-finite value is"
    assert message in done.stderr, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    # The retried run has removed diverged.json, and starts from finite weights.
    assert not (campaign.folder / "not-finite" / runfolder.DIVERGED).exists()
    assert campaign.differences("not-finite") == []


@pytest.mark.gpu
def test_cuda_error_in_a_replay_is_one_line(campaign: Campaign) -> None:
    done = campaign.with_fault["cuda-error"]
    assert done.returncode == 1, (done.returncode, done.stderr[-3000:])  # -6: a destructor aborted
    line = next(x for x in done.stderr.splitlines() if x.startswith("error: "))
    assert f"cuda failed in epoch {FAULT_EPOCH}, at step" in line
    assert "CUDA error" in line
    assert "the last checkpoint is" in line
    assert "Traceback" not in done.stderr
    assert campaign.differences("cuda-error") == []


@pytest.mark.gpu
def test_exhausted_memory_in_a_replay_names_a_batch_size(campaign: Campaign) -> None:
    done = campaign.with_fault["out-of-memory"]
    assert done.returncode == 1
    assert "error: out of memory on cuda at batch size 2 (peak" in done.stderr, done.stderr[-3000:]
    assert "--batch-size 1 fits (tested)" in done.stderr
    assert "Traceback" not in done.stderr
    assert campaign.differences("out-of-memory") == []


@pytest.mark.gpu
def test_checkpoints_of_all_faults_are_finite(campaign: Campaign) -> None:
    for name in campaign.with_fault:
        model = load(campaign.folder / name / runfolder.BEST).model
        assert all(torch.isfinite(value).all() for value in model.values()), name


def squares(y: Tensor, unused: Tensor) -> Tensor:
    return y.square().mean() + 0 * unused[0]


@pytest.mark.gpu
def test_training_continues_without_memory_for_a_graph() -> None:
    """A graph has copies of its inputs, for which there is no room besides a step."""
    model = torch.nn.Conv2d(3, 64, 3, device="cuda")
    step = TrainingStep(model, squares, sgd(model.parameters(), 1.0, 0.0))
    images = torch.randn(8, 3, 512, 512, device="cuda")  # feature maps of 0.5 GiB each
    unused = torch.zeros(2**28, device="cuda")  # 1 GiB
    losses = [step(images, unused) for _ in range(WARMUP_STEPS)]
    torch.cuda.synchronize()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        losses += [step(images, unused) for _ in range(3)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert step.why_eager == "not enough memory for a graph of these shapes"
    values = [float(loss) for loss in losses]
    assert values == sorted(set(values), reverse=True)  # each of the six steps was made
    step.reset()
    losses = [step(images, unused) for _ in range(WARMUP_STEPS + 1)]
    assert step.why_eager is None  # a later capture is as any other
    assert float(losses[-1]) < values[-1]
