"""Measure the throughput of training runs that share a GPU, with and without MPS.

    python benchmarks/slots.py                                        # 1 process, then 2
    python benchmarks/slots.py --runs 1,1 1,1,1 1,8 --mps             # batch sizes of each process

Each process trains SegNet on one fixed batch. They start together, after all of them have captured
their steps. With --mps, start the MPS daemon first (`nvidia-cuda-mps-control -d`): it belongs to
the machine, so the script does not start it. Rows are appended to the CSV.
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
    """Train in one process and report its images per second."""
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
        loss.item()  # waits for the device
        done += (20 if gpu else 1) * batch
    results.put(done / (time.monotonic() - start))


def measure(batches: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Run processes with these batch sizes at once; return a row of the CSV."""
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
    parser.add_argument(
        "--runs", nargs="+", default=["1", "1,1"], help="batch sizes of the processes of each run"
    )
    parser.add_argument("--mps", action="store_true", help="the MPS daemon is running")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--width", type=float, default=1.0, help="width of SegNet")
    parser.add_argument(
        "--size", type=int, nargs=2, default=[256, 512], metavar=("H", "W"), help="image size"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each run")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args()
    rows = [measure([int(b) for b in run.split(",")], args) for run in args.runs]
    out = args.out or Path(f"benchmarks/results/slots-{args.device}.csv")
    write_results(out, rows, args.device, append=True)


if __name__ == "__main__":
    main()
