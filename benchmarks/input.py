"""Measure whether a training step waits for its input.

    python benchmarks/input.py [--steps 40] [--width 1.0] [--size 256x512]

Compares SegNet steps with AGC at batch 4 that are fed by `Batches` with steps on one fixed batch,
interleaved so that the machine's noise affects both. Also measures the throughput of `Batches`
alone, and of rendering `streets` with one process per core.
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
from deepcontrol.workbench.terminal import parse_size
from streets import render

AUGMENTATIONS = {
    "flip and crop": Augment(),
    "flip, crop, scale and color": Augment(scale=(0.7, 1.4), color=0.3),
}


class Trainer:
    """An eager training loop without the workbench's checks."""

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
    """Return the ms of a fed step, of a step on a fixed batch, and their spread."""
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


def images_per_second(batches: Batches) -> float:
    """Measure the images per second of Batches alone."""
    list(batches.epoch(0))
    if batches.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    count = sum(len(batch.images) for batch in batches.epoch(1))
    if batches.device.type == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def render_scenes(job: tuple[int, int, tuple[int, int]]) -> None:
    first, count, size = job
    for index in range(first, first + count):
        render(1, index, *size)


def scenes_per_second(size: tuple[int, int], count: int = 200) -> float:
    """Measure the scenes per second of one warmed-up process per core."""
    cores = os.cpu_count() or 1
    share = count // cores
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.map(render_scenes, [(0, 3, size)] * cores, chunksize=1)
        start = time.perf_counter()
        pool.map(render_scenes, [(i * share, share, size) for i in range(cores)], chunksize=1)
        return share * cores / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--steps", type=int, default=40, help="training steps of each kind")
    parser.add_argument("--width", type=float, default=1.0, help="width of SegNet")
    parser.add_argument("--size", type=parse_size, default=(256, 512), help="image size, HxW")
    parser.add_argument("--scenes", type=int, default=64, help="prepared scenes")
    parser.add_argument(
        "--out", type=Path, default=Path(f"benchmarks/results/input-{device}.csv"), help="CSV file"
    )
    args = parser.parse_args()

    shape = {"width": args.width, "size": f"{args.size[0]}x{args.size[1]}"}
    rows: list[dict[str, object]] = []
    rate = scenes_per_second(args.size)
    print(f"streets rendered: {rate:.0f} images/s with {os.cpu_count()} processes")
    rows.append({"what": "streets rendered, one process per core", "images_per_s": f"{rate:.1f}"})
    with tempfile.TemporaryDirectory() as folder:
        source = open_source("streets", "train", limit=args.scenes)
        larger = (args.size[0] + 32, args.size[1] + 64)  # room for random crops
        cache = prepare(source, larger, Path(folder))
        trainer = Trainer(args.width, device)
        kinds = [(name, augment, 0.4) for name, augment in AUGMENTATIONS.items()]
        if device == "cuda":
            kinds += [(f"{n}, read ahead from memory", a, 0.0) for n, a, _ in kinds]
        for name, augment, share in kinds:
            batches = Batches(
                cache, 4, size=args.size, augment=augment, device=device, device_share=share
            )
            rate = images_per_second(batches)
            fed, ready, spread = fed_against_ready(trainer, batches, args.steps)
            print(
                f"{name}: {rate:.0f} images/s alone; "
                f"step time {fed:.1f} ms fed, {ready:.1f} ms on a fixed batch, "
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
