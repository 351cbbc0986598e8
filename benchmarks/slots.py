"""Do several runs on one GPU train on more images a second than one? With NVIDIA's MPS and without.

Each process trains SegNet on one batch that is there already. They begin together, once all have
captured their steps. Start MPS (`nvidia-cuda-mps-control -d`) before, and say so with --mps: the
script does not, since the daemon is the machine's.

    python benchmarks/slots.py                                        # 1 process, then 2
    python benchmarks/slots.py --runs 1,1 1,1,1 1,8 --mps             # batch sizes, with commas
"""

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch

from deepcontrol.step import TrainingStep
from deepcontrol.workbench.bench.results import write_results
from deepcontrol.workbench.losses import pixel_cross_entropy
from deepcontrol.workbench.models import SegNet

CLASSES = 11


def train(batch: int, args: argparse.Namespace, ready: Any, results: Any) -> None:
    """One run: how many images a second it trains on beside the others."""
    gpu = args.device == "cuda"
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if gpu else torch.contiguous_format
    model = SegNet(CLASSES, args.width).to(args.device).to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(batch, 3, *args.size, device=args.device).to(memory_format=layout)
    labels = torch.randint(0, CLASSES, (batch, *args.size), device=args.device)
    autocast = torch.bfloat16 if gpu else None
    step = TrainingStep(model, pixel_cross_entropy, optimizer, "graph", autocast)
    for _ in range(5):
        step(images, labels)
    ready.wait()
    start, done = time.monotonic(), 0
    while time.monotonic() - start < args.seconds:
        for _ in range(20 if gpu else 1):
            loss = step(images, labels)
        loss.item()  # until it is done
        done += (20 if gpu else 1) * batch
    results.put(done / (time.monotonic() - start))


def measured(batches: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """A row: processes with these batch sizes, side by side."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(len(batches)), context.Queue()
    processes = [context.Process(target=train, args=(b, args, ready, results)) for b in batches]
    for process in processes:
        process.start()
    total = sum(results.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()
    row = {
        "processes": len(batches),
        "mps": "yes" if args.mps else "no",
        "batches": " ".join(map(str, batches)),
        "images_per_s": f"{total:.0f}" if total > 10 else f"{total:.2f}",
    }
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", default=["1", "1,1"], help="batch sizes, by commas")
    parser.add_argument("--mps", action="store_true", help="MPS is running")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--width", type=float, default=1.0, help="SegNet's width")
    parser.add_argument("--size", type=int, nargs=2, default=[256, 512], help="H W")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path, help="the CSV, to which rows are added")
    args = parser.parse_args()
    rows = [measured([int(b) for b in run.split(",")], args) for run in args.runs]
    out = args.out or Path(f"benchmarks/results/slots-{args.device}.csv")
    write_results(out, rows, args.device, append=True)


if __name__ == "__main__":
    main()
