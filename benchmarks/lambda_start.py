"""Train from several initial lambdas, and with a higher learning rate for lambda.

    python benchmarks/lambda_start.py --data-root CAMVID --out benchmarks/results/lambda-start.csv

Lambda stays near its initial value 1 here, unlike in the paper. This experiment shows how far the
final lambda depends on the initial one. It trains SegNet as in the paper, except for the initial
lambda (--starts) and the learning rate of lambda as a multiple of the common one (--times). Each
row of the CSV is one layer of one training: lambda over its filters at the end, and the error of
the network. Trainings that the CSV already contains are skipped. At the end the script prints the
study's measures of lambda for all trainings.
"""

import argparse
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepcontrol.nn import AGCConv2d
from deepcontrol.step import TrainingStep
from deepcontrol.workbench.bench.results import Row, has_row, read_rows, write_results
from deepcontrol.workbench.data import Augment, Batches, Cache, open_source, prepare
from deepcontrol.workbench.optim import sgd
from deepcontrol.workbench.study.measures import (
    LAMBDA_DEEPEST,
    LAMBDA_HIGHEST,
    LAMBDA_LAST,
    LAMBDA_LOWEST,
    LAMBDA_MIDDLE,
    Curve,
    LayerLambda,
)
from deepcontrol.workbench.terminal import parse_size
from deepcontrol.workbench.train.build import build_model
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.evaluate import evaluate, statistics
from deepcontrol.workbench.train.objective import build_objective


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, required=True, help="folder of CamVid")
    parser.add_argument("--out", type=Path, default=Path("out/lambda-start.csv"), help="CSV file")
    parser.add_argument(
        "--starts", type=float, nargs="+", default=[1.0, 0.5, 0.0], help="initial values of lambda"
    )
    parser.add_argument(
        "--times",
        type=float,
        nargs="+",
        default=[1.0, 10.0],
        help="learning rates of lambda, as multiples of --lr",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--batch", type=int, default=4, help="batch size")
    parser.add_argument("--lr", "--rate", type=float, default=0.08, help="learning rate")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--size", type=parse_size, default=(256, 512), help="image size, HxW")
    parser.add_argument("--width", type=float, default=1.0, help="width of SegNet")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags = parser.parse_args()
    train, val = (
        prepare(open_source("camvid", split, flags.data_root), flags.size)
        for split in ("train", "val")
    )
    for seed in flags.seeds:
        for start in flags.starts:
            for times in flags.times:
                key = {
                    "start": start,
                    "rate_times": times,
                    "seed": seed,
                    "batch": flags.batch,
                    "rate": flags.lr,
                    "epochs": flags.epochs,
                    "size": "x".join(map(str, flags.size)),
                    "width": flags.width,
                    "device": flags.device,
                }
                if not has_row(flags.out, key):
                    rows = train_network(start, times, seed, train, val, flags)
                    write_results(flags.out, [key | row for row in rows], flags.device, append=True)
    print_summary(read_rows(flags.out))


def train_network(
    start: float, times: float, seed: int, train: Cache, val: Cache, flags: argparse.Namespace
) -> list[dict[str, Any]]:
    """Train a network; returns a row per layer, or one row if the training diverged."""
    device = torch.device(flags.device)
    autocast = torch.bfloat16 if device.type == "cuda" else None
    config = Train(
        out=Path(),  # not written
        width=flags.width,
        size=flags.size,
        batch_size=flags.batch,
        seed=seed,
    )
    model = build_model(config, len(train.classes))
    neurons = {name: m for name, m in model.named_modules() if isinstance(m, AGCConv2d)}
    for neuron in neurons.values():
        nn.init.constant_(neuron.mean_scale, start)
    model.to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    lambdas = [neuron.mean_scale for neuron in neurons.values()]
    ids = {id(p) for p in lambdas}
    others = [p for p in model.parameters() if id(p) not in ids]
    groups: list[dict[str, Any]] = [
        {"params": lambdas, "lr": times * flags.lr},
        {"params": others},
    ]
    step = TrainingStep(
        model,
        build_objective(config, train, device).loss,
        sgd(groups, flags.lr, config.momentum),
        autocast=autocast,
    )
    batches = Batches(
        train, flags.batch, size=flags.size, augment=Augment(), seed=seed, device=device
    )
    validation = Batches(val, config.val_batch_size, device=device)
    error = math.nan
    for epoch in range(1, flags.epochs + 1):
        model.train()
        losses = [step(batch.images, batch.labels) for batch in batches.epoch(epoch)]
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            print(f"start {start}, lr of lambda x {times}: diverged in epoch {epoch}", flush=True)
            return [{"diverged_in_epoch": epoch}]
        if epoch % 5 == 0 or epoch == flags.epochs:
            model.eval()
            error = evaluate(model, validation, autocast, window=flags.size).pixel_error
            means = " ".join(f"{float(p.detach().mean()):.2f}" for p in lambdas)
            print(
                f"start {start}, lr of lambda x {times}, epoch {epoch}: loss {loss:.3f}, "
                f"error {error:.3f}, lambda {means}",
                flush=True,
            )
    rows = []
    for name, neuron in neurons.items():
        stats = statistics(neuron.mean_scale)
        rows.append(
            {
                "diverged_in_epoch": "",
                "layer": name,
                **{f"lambda_{k}": f"{stats[k]:.4f}" for k in ("mean", "min", "max")},
                "val_error": f"{error:.4f}",
            }
        )
    return rows


def print_summary(rows: list[Row]) -> None:
    """Print a line per training: the study's measures of lambda and the final error."""
    measures = (LAMBDA_MIDDLE, LAMBDA_DEEPEST, LAMBDA_LAST, LAMBDA_LOWEST, LAMBDA_HIGHEST)
    keys = ("size", "width", "batch", "rate", "epochs", "seed", "start", "rate_times")
    trainings: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        trainings[tuple(row[k] for k in keys)].append(row)
    for values, layers in trainings.items():
        name = ", ".join(map(" ".join, zip(keys, values, strict=True))) + ": "
        if "diverged_in_epoch" in layers[0]:
            print(f"{name}diverged in epoch {layers[0]['diverged_in_epoch']}")
            continue
        lambdas = (
            LayerLambda(*(float(row[f"lambda_{k}"]) for k in ("mean", "min", "max")))
            for row in layers
        )
        end = Curve((), (), tuple(lambdas), None)
        found = [f"{measure.name} {measure.of(end):.2f}" for measure in measures]
        print(name + ", ".join([*found, f"error {layers[0]['val_error']}"]))


if __name__ == "__main__":
    main()
