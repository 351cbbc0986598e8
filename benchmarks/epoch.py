"""Compare the throughput of `deepcontrol train` with that of its bare step.

    python benchmarks/epoch.py [--device cuda] [--width 1.0] [--size 256x512] [--batches 1 4]

An epoch includes everything the training loop does: loading and augmenting batches, checking the
loss, accumulating metrics, terminal output, signal handling, and writing the previous epoch's
checkpoint in the background. The bare step is the same step on one fixed batch. The two are
interleaved, so that the machine's noise affects both. On a busy machine their ratio is unreliable;
`rest_to_bare`, the time of an epoch without its steps relative to the steps alone, is more robust.
Evaluation is timed separately.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from deepcontrol.workbench.bench.results import write_results
from deepcontrol.workbench.terminal import parse_size
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.distributed import Group, choose_device, configure_torch
from deepcontrol.workbench.train.evaluate import evaluate
from deepcontrol.workbench.train.loop import save, train_epoch
from deepcontrol.workbench.train.progress import Display
from deepcontrol.workbench.train.run import Interrupts, TrainingRun
from deepcontrol.workbench.train.start import open_run

MAX_VALIDATION_IMAGES = 64  # enough to time the evaluation
LR = 1e-4  # low, because many epochs over few images must not diverge


def seconds(act: Callable[[], object]) -> float:
    """Time a call, including the work it has queued on the device."""
    synchronize()
    start = time.perf_counter()
    act()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bare_steps(run: TrainingRun) -> None:
    """Run as many steps as an epoch has, on one full batch."""
    batch = next(iter(run.train.epoch(1)))
    targets = run.targets(batch, 0)
    for _ in range(len(run.train)):
        run.step(batch.images, *targets)


def one_epoch(run: TrainingRun) -> None:
    """Train one epoch of the loop, with the checkpoint of the previous one."""
    save(run)  # written in the background
    train_epoch(run)
    run.advance_epoch(error=1.0, loss=1.0)


def epoch_without_steps(run: TrainingRun) -> None:
    """Run everything the loop does except the steps."""
    step, loss = run.step, torch.ones((), device=run.group.device)
    run.step = lambda *batch: loss  # type: ignore[assignment]
    try:
        one_epoch(run)
    finally:
        run.step = step


def measure(run: TrainingRun, turns: int) -> dict[str, Any]:
    """Time epochs, bare steps and evaluation; returns columns of the CSV."""
    run.advance_epoch(error=1.0, loss=1.0)  # epoch 0
    one_epoch(run)  # warm-up: autotuning and graph capture
    bare_steps(run)
    bare, epoch = [], []
    for turn in range(turns):
        # The order alternates, because the load of the machine may drift.
        for kind in ("bare", "epoch") if turn % 2 else ("epoch", "bare"):
            run.writer.wait()
            if kind == "bare":
                bare.append(seconds(lambda: bare_steps(run)))
            else:
                epoch.append(seconds(lambda: one_epoch(run)))
    run.writer.wait()
    ratios = [a / b for a, b in zip(bare, epoch, strict=True)]
    rest = []
    for _ in range(turns):
        rest.append(seconds(lambda: epoch_without_steps(run)))
        run.writer.wait()
    # The first evaluation autotunes for its shapes and is dropped.
    _, evaluation = (
        seconds(lambda: evaluate(run.model, run.val, run.step.autocast)) for _ in range(2)
    )
    images = len(run.train.dataset)
    return {
        "images_per_s_bare": f"{images / statistics.median(bare):.2f}",
        "images_per_s_epoch": f"{images / statistics.median(epoch):.2f}",
        "epoch_to_bare": f"{statistics.median(ratios):.4f}",
        "rest_to_bare": f"{statistics.median(rest) / statistics.median(bare):.4f}",
        "lowest": f"{min(ratios):.4f}",
        "highest": f"{max(ratios):.4f}",
        "images_per_s_evaluation": f"{len(run.val.dataset) / evaluation:.2f}",
        "engine": "eager" if run.step.why_eager else run.config.engine,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--width", type=float, default=0.25, help="width of SegNet")
    parser.add_argument("--size", type=parse_size, default=(128, 256), help="image size, HxW")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="batch sizes")
    parser.add_argument("--images", type=int, default=16, help="images per epoch")
    parser.add_argument("--turns", type=int, default=9, help="repetitions")
    parser.add_argument("--norm", default="agc", help="normalization of SegNet")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args()
    if any(args.images % batch for batch in args.batches):
        parser.error(
            "--images must be a multiple of each batch size, because bare steps take full batches"
        )
    device = choose_device(args.device)
    rows = [measure_batch_size(args, batch, device) for batch in args.batches]
    write_results(
        args.out or Path(f"benchmarks/results/epoch-{device.type}.csv"), rows, device.type
    )


def measure_batch_size(
    args: argparse.Namespace, batch: int, device: torch.device
) -> dict[str, Any]:
    """Measure one batch size; returns a row of the CSV."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        config = Train(
            out=Path(folder) / "run",
            norm=args.norm,
            size=args.size,
            width=args.width,
            batch_size=batch,
            lr=LR,
            train_limit=args.images,
            val_limit=min(args.images, MAX_VALIDATION_IMAGES),
            epochs=10_000,
            device=args.device,
        )
        configure_torch(config)
        config.out.mkdir()
        screen = Console(file=nowhere, force_terminal=True)  # includes the cost of a terminal
        show = Display(screen)
        with show, open_run(config, Group(device), show, Interrupts()) as run:
            found = measure(run, args.turns)
    size = f"{args.size[0]}x{args.size[1]}"
    row = {"norm": args.norm, "width": args.width, "size": size, "batch": batch, **found}
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    return {**row, "images": args.images}


if __name__ == "__main__":
    main()
