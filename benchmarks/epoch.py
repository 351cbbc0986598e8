"""Does a run train as fast as its bare step? Whole epochs of `deepcontrol train` beside it.

An epoch is what the loop does: batches made and augmented, the guard, the sums, the progress on a
terminal, signals looked at, and the checkpoint of the epoch before written meanwhile. The bare step
is the same step on one batch that is there already. They take turns, so that the machine's noise
hits both. On a busy machine their ratio says little; then `rest_to_bare`, an epoch with its steps
left out against the steps alone, says more. The evaluation is timed apart: it is other work.

    python benchmarks/epoch.py [--device cuda] [--width 1.0] [--size 256x512] [--batches 1 4]
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
from deepcontrol.workbench.sizes import parse_size
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.devices import choose_device, set_up
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.evaluate import evaluate
from deepcontrol.workbench.train.interrupts import Interrupts
from deepcontrol.workbench.train.loop import save, train_rest_of_epoch
from deepcontrol.workbench.train.progress import Show
from deepcontrol.workbench.train.run import Run, open_run

VALIDATED = 64  # images: enough to time the evaluation
RATE = 1e-4  # many epochs over few images: the network should stay sane


def seconds(act: Callable[[], object]) -> float:
    """Of the call and all that it has left the device to do."""
    synchronize()
    start = time.perf_counter()
    act()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bare_steps(run: Run) -> None:
    """As many steps as an epoch has, on one full batch."""
    batch = next(iter(run.train.epoch(1)))
    targets = run.targets(batch, 0)
    for _ in range(len(run.train)):
        run.step(batch.images, *targets)


def one_epoch(run: Run) -> None:
    save(run)  # of the epoch before: it is written while this one goes on
    train_rest_of_epoch(run)
    run.enter_next_epoch(error=1.0)


def epoch_without_steps(run: Run) -> None:
    """All that the loop does beside the steps: where nothing overlaps, what they wait for."""
    step, loss = run.step, torch.ones((), device=run.group.device)
    run.step = lambda *batch: loss  # type: ignore[assignment]
    try:
        one_epoch(run)
    finally:
        run.step = step


def measure(run: Run, turns: int) -> dict[str, Any]:
    run.enter_next_epoch(error=1.0)  # epoch 0
    one_epoch(run)  # past autotuning and capture
    bare_steps(run)
    bare, epoch = [], []
    for turn in range(turns):
        # Now one first, now the other: what else the machine does may be on the rise.
        for kind in ("bare", "epoch") if turn % 2 else ("epoch", "bare"):
            run.saver.wait()
            if kind == "bare":
                bare.append(seconds(lambda: bare_steps(run)))
            else:
                epoch.append(seconds(lambda: one_epoch(run)))
    run.saver.wait()
    ratios = [a / b for a, b in zip(bare, epoch, strict=True)]
    rest = []
    for _ in range(turns):
        rest.append(seconds(lambda: epoch_without_steps(run)))
        run.saver.wait()
    # The first one chooses algorithms for shapes that training has not seen.
    _, evaluation = (
        seconds(lambda: evaluate(run.model, run.val, run.step.autocast)) for _ in range(2)
    )
    images = len(run.train.cache)
    return {
        "images_per_s_bare": f"{images / statistics.median(bare):.2f}",
        "images_per_s_epoch": f"{images / statistics.median(epoch):.2f}",
        "epoch_to_bare": f"{statistics.median(ratios):.4f}",
        "rest_to_bare": f"{statistics.median(rest) / statistics.median(bare):.4f}",
        "lowest": f"{min(ratios):.4f}",
        "highest": f"{max(ratios):.4f}",
        "images_per_s_evaluation": f"{len(run.val.cache) / evaluation:.2f}",
        "engine": "eager" if run.step.why_eager else run.config.engine,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--width", type=float, default=0.25, help="SegNet's width")
    parser.add_argument("--size", type=parse_size, default=(128, 256), help="HxW")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="batch sizes")
    parser.add_argument("--images", type=int, default=16, help="in an epoch")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--norm", default="agc")
    parser.add_argument("--out", type=Path, help="the CSV")
    args = parser.parse_args()
    if any(args.images % batch for batch in args.batches):
        parser.error("--images must be a multiple of each batch size, as bare steps are all whole")
    device = choose_device(args.device)
    rows = [measured(args, batch, device) for batch in args.batches]
    write_results(
        args.out or Path(f"benchmarks/results/epoch-{device.type}.csv"), rows, device.type
    )


def measured(args: argparse.Namespace, batch: int, device: torch.device) -> dict[str, Any]:
    """A row of the CSV."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        config = Train(
            out=Path(folder) / "run",
            norm=args.norm,
            size=args.size,
            width=args.width,
            batch_size=batch,
            lr=RATE,
            train_limit=args.images,
            val_limit=min(args.images, VALIDATED),
            epochs=10_000,
            device=args.device,
        )
        set_up(config)
        config.out.mkdir()
        screen = Console(file=nowhere, force_terminal=True)  # with all that a terminal costs
        show = Show(screen)
        with show, open_run(config, Group(device), show, Interrupts()) as run:
            found = measure(run, args.turns)
    size = f"{args.size[0]}x{args.size[1]}"
    row = {"norm": args.norm, "width": args.width, "size": size, "batch": batch, **found}
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    return {**row, "images": args.images}


if __name__ == "__main__":
    main()
