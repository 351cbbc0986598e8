"""Why does AGC diverge at the highest rate of the paper's figure 1h, and what keeps it stable?

    python benchmarks/highest_rate.py --data-root CAMVID --out benchmarks/results/highest-rate.csv

SegNet at batch 8 and rate 0.64, treated in one way at a time: how it starts, which parameters
learn more slowly, how the rate begins, the length of the gradient. Each row of the CSV is one
training; those that are there already are not repeated. Minutes on an H200. A small network on
small images (--width 0.25 --size 64x128 --device cpu --precision fp32) diverges only now and then.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from deepcontrol.step import TrainingStep
from deepcontrol.workbench.bench.results import has_row, provenance
from deepcontrol.workbench.data import Augment, Batches, Cache, open_source, prepare
from deepcontrol.workbench.models import Norm
from deepcontrol.workbench.optim import sgd
from deepcontrol.workbench.sizes import parse_size
from deepcontrol.workbench.train.build import build_model, build_objective, fit_to_images_
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.evaluate import evaluate
from deepcontrol.workbench.train.faults import NotFiniteError

BATCH = 8
SLOWER = 1 / 8
WARM_UP = 5  # epochs


@dataclass(frozen=True)
class Treatment:
    """What is not as in the paper's training."""

    start: Literal["he", "identity", "unit"] = "he"
    norm: Norm = "agc"
    slower: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False
    warm_up: bool = False
    longest: float = math.inf  # the gradient, over all parameters
    momentum: float = 0.9


TREATMENTS = {
    "as the paper": Treatment(),
    "identity start": Treatment("identity"),
    "unit start": Treatment("unit"),
    "first layer slower": Treatment(
        slower=lambda name, _: name.startswith("encoder.0.convolutions.0.")
    ),
    "classifier slower": Treatment(slower=lambda name, _: name.startswith("classify")),
    "filters slower": Treatment(slower=lambda _, parameter: parameter.dim() == 4),
    "gamma, lambda, beta slower": Treatment(slower=lambda _, parameter: parameter.dim() == 1),
    "no momentum, rate x 10": Treatment(momentum=0.0),
    "warm-up": Treatment(warm_up=True),
    "gradient of at most 1": Treatment(longest=1.0),
    "gradient of at most 0.3": Treatment(longest=0.3),
    "identity start, gradient of at most 1": Treatment("identity", longest=1.0),
    "unit start, gradient of at most 1": Treatment("unit", longest=1.0),
    "BatchNorm": Treatment(norm="bn"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("out/highest-rate.csv"))
    parser.add_argument("--treatments", nargs="+", default=[*TREATMENTS], choices=[*TREATMENTS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rate", type=float, default=0.64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=parse_size, default=(256, 512))
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    flags = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    here = provenance(flags.device)
    train, val = (
        prepare(open_source("camvid", split, flags.data_root), flags.size, Path("out/cache"))
        for split in ("train", "val")
    )
    for seed in flags.seeds:
        for name in flags.treatments:
            key = {
                "treatment": name,
                "seed": seed,
                "rate": flags.rate,
                "epochs": flags.epochs,
                "size": "x".join(map(str, flags.size)),
                "width": flags.width,
                "device": flags.device,
                "precision": flags.precision,
            }
            if not has_row(flags.out, key):
                row = key | training(TREATMENTS[name], seed, train, val, flags) | here
                append(flags.out, row)
                print(*row.values(), sep=", ", flush=True)


def training(
    treatment: Treatment, seed: int, train: Cache, val: Cache, flags: argparse.Namespace
) -> dict[str, Any]:
    """Train until the end or until the loss is not finite, and say what came of it."""
    device = torch.device(flags.device)
    config = Train(
        out=Path(),  # never written to
        norm=treatment.norm,
        init=treatment.start,
        width=flags.width,
        size=flags.size,
        batch_size=BATCH,
        seed=seed,
    )
    model = build_model(config, len(train.classes))
    fit_to_images_(model, config, train)
    model.to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    rate = flags.rate * (1 if treatment.momentum else 10)
    slower = [p for name, p in model.named_parameters() if treatment.slower(name, p)]
    others = [p for name, p in model.named_parameters() if not treatment.slower(name, p)]
    groups = [{"params": slower, "lr": SLOWER * rate}, {"params": others, "lr": rate}]
    optimizer = sgd([g for g in groups if g["params"]], rate, treatment.momentum)
    full = [group["lr"] for group in optimizer.param_groups]
    norm = torch.zeros((), device=device)  # a graph writes each step's into this place

    def look(loss: Tensor) -> Tensor:
        norm.copy_(clip_grad_norm_(model.parameters(), treatment.longest))
        return loss

    step = TrainingStep(
        model,
        build_objective(config, train, device).loss,
        optimizer,
        autocast=torch.bfloat16 if flags.precision == "bf16" else None,
        before_update=look,
    )
    batches = Batches(
        train,
        BATCH,
        size=flags.size,
        augment=Augment(),
        seed=seed,
        device=device,
    )
    losses: list[float] = []
    lengths: list[float] = []
    for epoch in range(1, flags.epochs + 1):
        share = min(1.0, epoch / WARM_UP) if treatment.warm_up else 1.0
        for group, lr in zip(optimizer.param_groups, full, strict=True):
            group["lr"] = share * lr
        norms: list[Tensor] = []
        of_epoch: list[Tensor] = []
        model.train()
        for batch in batches.epoch(epoch):
            of_epoch.append(step(batch.images, batch.labels))
            norms.append(norm.clone())
        losses += torch.stack(of_epoch).tolist()
        lengths += torch.stack(norms).tolist()
        if not all(map(math.isfinite, losses)):
            break
    bad = next((i for i, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    lengths = [length for length in lengths[:bad] if math.isfinite(length)]
    row: dict[str, Any] = {
        "diverged_at_step": "" if bad is None else bad,
        "last_loss": "",
        "val_error": "",
        "median_gradient": f"{statistics.median(lengths):.4f}" if lengths else "",
        "largest_gradient": f"{max(lengths):.4g}" if lengths else "",
    }
    if bad is None:
        row["last_loss"] = f"{statistics.fmean(losses[-len(batches) :]):.4f}"
        try:
            seen = Batches(val, BATCH, device=batches.device)  # whole images
            row["val_error"] = f"{evaluate(model, seen, step.autocast).pixel_error:.4f}"
        except NotFiniteError:  # the very last update
            row["diverged_at_step"] = len(losses)
    return row


def append(path: Path, row: dict[str, Any]) -> None:
    """At the end of the file, so that several processes can share it, each with its own seeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
