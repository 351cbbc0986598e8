"""Compare ways to stabilize AGC at the highest learning rate of figure 1h.

    python benchmarks/highest_rate.py --data-root CAMVID --out benchmarks/results/highest-rate.csv

Trains SegNet at batch 8 and learning rate 0.64 (the highest of the paper's figure 1h) with one
change at a time: the initialization, a lower learning rate for some parameters, warm-up, gradient
clipping. Each row of the CSV is one training. Trainings that the CSV already contains are skipped.
Takes minutes on an H200. A small network on small images (--width 0.25 --size 64x128 --device cpu
--precision fp32) diverges rarely.
"""

import argparse
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
from deepcontrol.workbench.bench.results import append_row, has_row, provenance
from deepcontrol.workbench.data import Augment, Batches, Cache, open_source, prepare
from deepcontrol.workbench.models import Norm
from deepcontrol.workbench.optim import sgd
from deepcontrol.workbench.terminal import parse_size
from deepcontrol.workbench.train.build import build_model, scale_to_images_
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.evaluate import evaluate
from deepcontrol.workbench.train.faults import NotFiniteError
from deepcontrol.workbench.train.objective import build_objective

BATCH = 8
SLOWER = 1 / 8  # factor of the learning rate
WARM_UP = 5  # epochs


@dataclass(frozen=True)
class Treatment:
    """A change of the paper's training."""

    start: Literal["he", "identity", "unit"] = "he"
    norm: Norm = "agc"
    slower: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False
    warm_up: bool = False
    max_norm: float = math.inf  # of the gradient over all parameters
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
    "gradient of at most 1": Treatment(max_norm=1.0),
    "gradient of at most 0.3": Treatment(max_norm=0.3),
    "identity start, gradient of at most 1": Treatment("identity", max_norm=1.0),
    "unit start, gradient of at most 1": Treatment("unit", max_norm=1.0),
    "BatchNorm": Treatment(norm="bn"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, required=True, help="folder of CamVid")
    parser.add_argument("--out", type=Path, default=Path("out/highest-rate.csv"), help="CSV file")
    parser.add_argument(
        "--treatments",
        nargs="+",
        default=[*TREATMENTS],
        choices=[*TREATMENTS],
        metavar="NAME",
        help="any of: " + "; ".join(TREATMENTS),
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--lr", "--rate", type=float, default=0.64, help="learning rate")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=parse_size, default=(256, 512), help="image size, HxW")
    parser.add_argument("--width", type=float, default=1.0, help="width of SegNet")
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
                "rate": flags.lr,
                "epochs": flags.epochs,
                "size": "x".join(map(str, flags.size)),
                "width": flags.width,
                "device": flags.device,
                "precision": flags.precision,
            }
            if not has_row(flags.out, key):
                row = key | train_network(TREATMENTS[name], seed, train, val, flags) | here
                append_row(flags.out, row)
                print(*row.values(), sep=", ", flush=True)


def train_network(
    treatment: Treatment, seed: int, train: Cache, val: Cache, flags: argparse.Namespace
) -> dict[str, Any]:
    """Train to the end or until the loss is not finite; return columns of the CSV."""
    device = torch.device(flags.device)
    config = Train(
        out=Path(),  # not written
        norm=treatment.norm,
        init=treatment.start,
        width=flags.width,
        size=flags.size,
        batch_size=BATCH,
        seed=seed,
    )
    model = build_model(config, len(train.classes))
    scale_to_images_(model, config, Batches(train, 1))
    model.to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    lr = flags.lr * (1 if treatment.momentum else 10)
    slower = [p for name, p in model.named_parameters() if treatment.slower(name, p)]
    others = [p for name, p in model.named_parameters() if not treatment.slower(name, p)]
    groups = [{"params": slower, "lr": SLOWER * lr}, {"params": others, "lr": lr}]
    optimizer = sgd([g for g in groups if g["params"]], lr, treatment.momentum)
    full_lrs = [group["lr"] for group in optimizer.param_groups]
    norm = torch.zeros((), device=device)  # a captured step writes its norm here

    def clip(loss: Tensor) -> Tensor:
        norm.copy_(clip_grad_norm_(model.parameters(), treatment.max_norm))
        return loss

    step = TrainingStep(
        model,
        build_objective(config, train, device).loss,
        optimizer,
        autocast=torch.bfloat16 if flags.precision == "bf16" else None,
        before_update=clip,
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
    norms: list[float] = []
    for epoch in range(1, flags.epochs + 1):
        share = min(1.0, epoch / WARM_UP) if treatment.warm_up else 1.0
        for group, full_lr in zip(optimizer.param_groups, full_lrs, strict=True):
            group["lr"] = share * full_lr
        epoch_norms: list[Tensor] = []
        epoch_losses: list[Tensor] = []
        model.train()
        for batch in batches.epoch(epoch):
            epoch_losses.append(step(batch.images, batch.labels))
            epoch_norms.append(norm.clone())
        losses += torch.stack(epoch_losses).tolist()
        norms += torch.stack(epoch_norms).tolist()
        if not all(map(math.isfinite, losses)):
            break
    bad = next((i for i, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    norms = [n for n in norms[:bad] if math.isfinite(n)]
    row: dict[str, Any] = {
        "diverged_at_step": "" if bad is None else bad,
        "last_loss": "",
        "val_error": "",
        "median_gradient": f"{statistics.median(norms):.4f}" if norms else "",
        "largest_gradient": f"{max(norms):.4g}" if norms else "",
    }
    if bad is None:
        row["last_loss"] = f"{statistics.fmean(losses[-len(batches) :]):.4f}"
        try:
            validation = Batches(val, BATCH, device=batches.device)  # whole images
            row["val_error"] = f"{evaluate(model, validation, step.autocast).pixel_error:.4f}"
        except NotFiniteError:  # the last update diverged
            row["diverged_at_step"] = len(losses)
    return row


if __name__ == "__main__":
    main()
