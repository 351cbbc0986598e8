"""Does a training step wait for its input? And how fast are scenes made and batches served?

For SegNet with AGC at batch 4: steps fed by `Batches` against steps on a batch that is already
there, in turns, so that the machine's noise hits both; the rate of `Batches` alone; and the rate of
making `streets` with one process for each core.

    python benchmarks/input.py [--steps 40] [--width 1.0] [--size 256x512]
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from deepcontrol.workbench.bench.results import write_results
from deepcontrol.workbench.data import Augment, Batch, Batches, open_source, prepare
from deepcontrol.workbench.losses import pixel_cross_entropy
from deepcontrol.workbench.models import SegNet
from deepcontrol.workbench.sizes import parse_size
from streets import render

AUGMENTATIONS = {
    "flip and crop": Augment(),
    "flip, crop, scale and color": Augment(scale=(0.7, 1.4), color=0.3),
}


class Trainer:
    def __init__(self, width: float, device: str) -> None:
        self.device = device
        self.model = SegNet(19, width).to(device)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, batch: Batch) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            logits = self.model(batch.images)
        self.optimizer.zero_grad()
        pixel_cross_entropy(logits, batch.labels).backward()
        self.optimizer.step()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def endless(batches: Batches) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from (b for b in batches.epoch(epoch) if len(b.images) == batches.batch_size)
        epoch += 1


def fed_against_ready(trainer: Trainer, batches: Batches, steps: int) -> tuple[float, float, float]:
    """Milliseconds of a fed step and of a ready one, and the spread of their ratio."""
    stream = endless(batches)
    ready = next(stream)
    for _ in range(3):
        trainer.step(next(stream))
    turns, times = max(4, steps // 5), {"fed": list[float](), "ready": list[float]()}
    for _ in range(turns):
        for kind in times:
            trainer.wait()
            start = time.perf_counter()
            for _ in range(5):
                trainer.step(next(stream) if kind == "fed" else ready)
            trainer.wait()
            times[kind].append(1e3 * (time.perf_counter() - start) / 5)
    ratios = [a / b for a, b in zip(times["fed"], times["ready"], strict=True)]
    spread = statistics.quantiles(ratios, n=10)
    return (
        statistics.median(times["fed"]),
        statistics.median(times["ready"]),
        (spread[7] - spread[1]) / 2,
    )


def served(batches: Batches) -> float:
    """Images a second from Batches alone."""
    list(batches.epoch(0))
    if batches.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    count = sum(len(batch.images) for batch in batches.epoch(1))
    if batches.device.type == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def render_some(job: tuple[int, int, tuple[int, int]]) -> None:
    first, count, size = job
    for index in range(first, first + count):
        render(1, index, *size)


def made(size: tuple[int, int], count: int = 200) -> float:
    """Scenes a second with one process for each core, each warmed up."""
    cores = os.cpu_count() or 1
    share = count // cores
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.map(render_some, [(0, 3, size)] * cores, chunksize=1)
        start = time.perf_counter()
        pool.map(render_some, [(i * share, share, size) for i in range(cores)], chunksize=1)
        return share * cores / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--steps", type=int, default=40, help="training steps of each kind")
    parser.add_argument("--width", type=float, default=1.0, help="SegNet's width")
    parser.add_argument("--size", type=parse_size, default=(256, 512), help="HxW")
    parser.add_argument("--scenes", type=int, default=64, help="prepared scenes")
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/input-{device}.csv"))
    args = parser.parse_args()

    shape = {"width": args.width, "size": f"{args.size[0]}x{args.size[1]}"}
    rows: list[dict[str, object]] = []
    rate = made(args.size)
    print(f"streets made: {rate:.0f} images/s with {os.cpu_count()} processes")
    rows.append({"what": "streets made, one process a core", "images_per_s": f"{rate:.1f}"})
    with tempfile.TemporaryDirectory() as folder:
        source = open_source("streets", "train", limit=args.scenes)
        larger = (args.size[0] + 32, args.size[1] + 64)  # room for crops
        cache = prepare(source, larger, Path(folder))
        trainer = Trainer(args.width, device)
        kinds = [(name, augment, 0.4) for name, augment in AUGMENTATIONS.items()]
        if device == "cuda":
            kinds += [(f"{n}, read ahead from memory", a, 0.0) for n, a, _ in kinds]
        for name, augment, share in kinds:
            batches = Batches(
                cache, 4, size=args.size, augment=augment, device=device, device_share=share
            )
            rate = served(batches)
            fed, ready, spread = fed_against_ready(trainer, batches, args.steps)
            print(
                f"{name}: {rate:.0f} images/s alone; "
                f"a step {fed:.1f} ms fed, {ready:.1f} ms ready, "
                f"ratio {fed / ready:.3f} +- {spread:.3f}"
            )
            rows.append(
                {
                    "what": name,
                    "images_per_s": f"{rate:.1f}",
                    "step_ms_fed": f"{fed:.2f}",
                    "step_ms_ready": f"{ready:.2f}",
                    "fed_to_ready": f"{fed / ready:.4f}",
                    "ratio_spread": f"{spread:.4f}",
                    **shape,
                }
            )
    write_results(args.out, rows, device)


if __name__ == "__main__":
    main()
