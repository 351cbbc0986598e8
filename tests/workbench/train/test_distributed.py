"""Several processes compute the same as one: gradients, evaluation, elastic restarts."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from deepcontrol.workbench.data import VOID, Batch
from deepcontrol.workbench.folders import runfolder, storage
from deepcontrol.workbench.train.build import build_model
from deepcontrol.workbench.train.checkpoint import load
from deepcontrol.workbench.train.config_file import load_config
from deepcontrol.workbench.train.data import build_data, open_sources
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.evaluate import evaluate
from deepcontrol.workbench.train.loop import train_run
from deepcontrol.workbench.train.objective import Objective
from deepcontrol.workbench.train.progress import Display
from deepcontrol.workbench.train.run import Interrupts
from deepcontrol.workbench.train.snapshot import load_weights
from deepcontrol.workbench.train.start import open_run
from tests.processes import DEADLOCK, WORLD, run_two
from tests.workbench.train.launched import SHUTDOWN
from tests.workbench.train.runs import command, differences, metrics, same, tiny

CLASSES = 19


def batch_of(images: int) -> Batch:
    """Return noise with a different fraction of void labels in each image."""
    rng = torch.Generator().manual_seed(3)
    labels = torch.randint(CLASSES, (images, 32, 64), generator=rng).to(torch.uint8)
    for i in range(images):
        labels[i, : 7 * i] = VOID
    pixels = torch.randn(images, 3, 32, 64, generator=rng, dtype=torch.float64)
    segments = torch.randint(5, (images, 32, 64), generator=rng).to(torch.int16)
    return Batch(pixels, labels, segments)


def gradients(kind: dict[str, str], group: Group, batch: Batch, images: int) -> dict[str, Tensor]:
    """Return the gradients of a whole batch; `batch` is this process's part of it."""
    model = build_model(tiny(**kind), CLASSES).double()
    objective = Objective(kind["model"], torch.linspace(0.5, 1.5, CLASSES))
    wrapped = DistributedDataParallel(model) if group.world_size > 1 else model
    scales = (group.loss_scales(batch.labels, images),) if group.world_size > 1 else ()
    objective.loss(wrapped(batch.images), *objective.targets(batch), *scales).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


CASES = {  # settings, and the number of images in the whole batch
    "agc": ({"model": "segnet", "norm": "agc"}, 3),
    "agc, one image for two processes": ({"model": "segnet", "norm": "agc"}, 1),
    "contours": ({"model": "classnet", "norm": "none"}, 3),
    "bn": ({"model": "segnet", "norm": "bn"}, 3),
}


def in_each_process(rank: int, folder: str) -> None:
    """Compute gradients, an evaluation and short runs with two processes."""
    group, found = Group(torch.device("cpu"), rank, WORLD), {}
    for name, (kind, images) in CASES.items():
        batch = batch_of(images)
        own = Batch(*(a[rank::WORLD] for a in batch))
        if rank >= images:  # like Batches: a padding image without labels
            own = Batch(batch.images, torch.full_like(batch.labels, VOID), batch.segments)
        found[name] = gradients(kind, group, own, images)
    result = {"gradients": found, "counts": counts(group)}
    for wrapper, fsdp in {"ddp": {}, "fsdp": {"fsdp": ""}}.items():
        # A high learning rate makes the running statistics of the processes differ.
        config = tiny(Path(folder) / wrapper, norm="bn", epochs=1, lr=1, **fsdp)
        config.out.mkdir(exist_ok=True)
        display = Display(Console(quiet=True), enabled=False)
        with open_run(config, group, display, Interrupts()) as run:
            assert train_run(run) == 0
            result[wrapper] = dict(run.model.named_buffers())
        train_clipped(Path(folder) / f"{wrapper}-clipped", group, **fsdp)
    torch.save(result, Path(folder) / f"{rank}.pt")


def train_clipped(out: Path, group: Group, **fsdp: str) -> None:
    """Train with a norm that clips every gradient."""
    config = tiny(out, epochs=1, lr=1, clip_grad_norm=0.01, **fsdp)
    config.out.mkdir(exist_ok=True)
    display = Display(Console(quiet=True), enabled=False)
    with open_run(config, group, display, Interrupts()) as run:
        assert train_run(run) == 0


def counts(group: Group) -> Tensor:
    """Return the confusion matrix of the initial network over the validation images."""
    config = tiny()
    data = build_data(config, open_sources(config), group, lambda *_: None)
    return evaluate(build_model(config, CLASSES), data.val).counts


def largest_difference(name: str, shared: list[dict[str, Any]]) -> float:
    """Return the largest difference from a single process, relative to each parameter's maximum."""
    kind, images = CASES[name]
    single = gradients(kind, Group(torch.device("cpu")), batch_of(images), images)
    worst = 0.0
    for found in shared:
        assert found["gradients"][name].keys() == single.keys()
        for parameter, value in single.items():
            assert value.abs().max() > 0
            error = (found["gradients"][name][parameter] - value).abs().max() / value.abs().max()
            worst = max(worst, float(error))
    return worst


@pytest.mark.slow
def test_two_processes_match_one(tmp_path: Path) -> None:
    """A single test, because starting the processes takes longer than the computation.

    With BatchNorm the gradients differ, because each process normalizes with the statistics of its
    own images.
    """
    run_two(in_each_process, str(tmp_path))
    shared = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    errors = {name: largest_difference(name, shared) for name in CASES}
    assert errors.pop("bn") > 1e-2
    assert all(error < 1e-10 for error in errors.values()), errors
    # 3 validation images in batches of 2: in the last batch one process has no image.
    single = Group(torch.device("cpu"))
    config = tiny()
    labels = build_data(config, open_sources(config), single, lambda *_: None).val.dataset.labels
    for found in shared:
        assert torch.equal(found["counts"], counts(single))
        assert found["counts"].sum() == (labels != VOID).sum()
    for wrapper in ("ddp", "fsdp"):  # all processes have the saved running statistics
        run, last = tmp_path / wrapper, load(tmp_path / wrapper / "last").model
        for found in shared:
            assert same(found[wrapper], {name: last[name] for name in found[wrapper]})
        assert metrics(run)[-1]["val_error"] == error_of_last(run)
    train_clipped(tmp_path / "clipped", single)
    for wrapper in ("ddp", "fsdp"):  # clipping uses the norm of the whole gradient
        assert_close(tmp_path / f"{wrapper}-clipped", tmp_path / "clipped")


def error_of_last(run: Path) -> float:
    config, _ = load_config(run)
    data = build_data(config, open_sources(config), Group(torch.device("cpu")), lambda *_: None)
    model = build_model(config, CLASSES)
    load_weights(model, load(run / "last").model)
    return evaluate(model, data.val).pixel_error


def launch(out: Path, dies_at: int = 0, **changes: Any) -> str:
    """Run two processes under torchrun, which restarts them if one dies. Return their output."""
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    script = [str(Path(__file__).with_name("launched.py")), str(dies_at)]
    words = [sys.executable, "-m", *torchrun, *script, *command(out, **changes)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=DEADLOCK)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its children
        raise
    assert process.returncode == 0, output[-3000:] + errors[-3000:]
    assert SHUTDOWN not in output  # gloo's threads still run: see exit_if_distributed
    return output


def assert_close(run: Path, other: Path) -> None:
    """Compare two runs up to the rounding of sums."""
    weights = load(other / "last").model
    for name, value in load(run / "last").model.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4, msg=name)
    for a, b in zip(metrics(run)[1:], metrics(other)[1:], strict=True):
        # One pixel changes the IoU of a small class by much more than that of all.
        iou_a, iou_b = (torch.tensor([v or 0.0 for v in m.pop("val_class_iou")]) for m in (a, b))
        torch.testing.assert_close(iou_a, iou_b, rtol=0, atol=0.02)
        assert a == pytest.approx(b, rel=0.02)


@pytest.mark.slow
def test_two_processes_train_like_one_also_after_a_restart(whole: Path, tmp_path: Path) -> None:
    together, restarted = tmp_path / "together", tmp_path / "restarted"
    launch(together)
    assert_close(together, whole)
    layers = [
        storage.read_records(run / runfolder.LAYERS)[0]["layers"] for run in (together, whole)
    ]
    assert layers[0] == layers[1]  # before training, bit for bit: counts are integers
    output = launch(restarted, dies_at=7)
    assert "resuming after epoch 1, step 0" in output
    assert differences(restarted, together) == []


@pytest.mark.slow
def test_fsdp_with_a_restart(whole: Path, tmp_path: Path) -> None:
    """Parameters and momentum are gathered for the checkpoint and sharded again."""
    output = launch(tmp_path / "run", dies_at=7, fsdp="")
    assert "resuming after epoch 1, step 0" in output
    assert_close(tmp_path / "run", whole)
