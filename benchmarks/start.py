"""Compare initializations: He, identity, unit variance, and BatchNorm.

    python benchmarks/start.py --out benchmarks/results/start-cpu.csv

For each one: the standard deviation of the logits and the gradient of the first layer before any
step (SegNet on synthetic street scenes), then the training loss and the validation error after each
epoch at the paper's learning rate. Takes minutes on a CPU.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from deepcontrol import AGCConv2d, he_init_, identity_init_
from deepcontrol.nn.init import scale_to_unit_
from deepcontrol.workbench.bench.results import write_rows
from deepcontrol.workbench.data import Augment, Batches, Cache, open_source, prepare
from deepcontrol.workbench.losses import class_weights, pixel_cross_entropy
from deepcontrol.workbench.metrics import ConfusionMatrix
from deepcontrol.workbench.models import SegNet

SIZE, WIDTH = (48, 96), 0.25
STARTS = ("bn", "he", "identity", "he x 1.21", "unit, classifier as He's", "unit")


def build(start: str, seed: int, images: Tensor) -> SegNet:
    """Build SegNet with one of the initializations."""
    torch.manual_seed(seed)
    model = SegNet(19, WIDTH, "bn" if start == "bn" else "agc")
    (identity_init_ if start == "identity" else he_init_)(model)
    if start == "he x 1.21":  # restores the variance that subtracting a ReLU's mean removes
        for neuron in model.modules():
            if isinstance(neuron, AGCConv2d):
                nn.init.constant_(neuron.gain, 1 / math.sqrt(1 - 1 / math.pi))
    elif start == "unit":
        scale_to_unit_(model, images, [model.classify])
    elif start.startswith("unit"):
        scale_to_unit_(model, images)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/start.csv"), help="CSV file")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 1], help="batch sizes")
    flags = parser.parse_args()
    folder = Path("out/cache")
    caches = [
        prepare(open_source("streets", split, limit=limit), SIZE, folder)
        for split, limit in (("train", 96), ("val", 16))
    ]
    weights = class_weights(torch.from_numpy(caches[0].histogram))
    first = next(iter(Batches(caches[0], 4).epoch()))
    rows = []
    for batch_size in flags.batches:
        for seed in range(flags.seeds):
            for start in STARTS:
                model = build(start, seed, first.images)
                logits = model(first.images)
                pixel_cross_entropy(logits, first.labels, weights).backward()
                filters = next(p for p in model.parameters() if p.dim() == 4)
                assert filters.grad is not None
                row = {
                    "start": start,
                    "batch": batch_size,
                    "seed": seed,
                    "logits_deviation": f"{logits.std().item():.2e}",
                    "first_gradient": f"{(filters.grad.norm() / filters.norm()).item():.2e}",
                }
                optimizer = torch.optim.SGD(model.parameters(), 0.02 * batch_size, momentum=0.9)
                batches = Batches(caches[0], batch_size, augment=Augment(), seed=seed)
                for epoch in range(flags.epochs):
                    loss, error = one_epoch(model, optimizer, batches, epoch, weights, caches[1])
                    rows.append(
                        {
                            **row,
                            "epoch": epoch + 1,
                            "loss": f"{loss:.4f}",
                            "val_error": f"{error:.4f}",
                        }
                    )
                    print(*rows[-1].values(), flush=True)
    write_rows(flags.out, rows)


def one_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    epoch: int,
    weights: Tensor,
    val: Cache,
) -> tuple[float, float]:
    """Train an epoch; returns the mean training loss and the pixel error afterwards."""
    losses = []
    model.train()
    for batch in batches.epoch(epoch):
        optimizer.zero_grad()
        loss = pixel_cross_entropy(model(batch.images), batch.labels, weights)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    matrix = ConfusionMatrix(19)
    with torch.no_grad():
        for batch in Batches(val, 8).epoch():
            matrix.update(model(batch.images).argmax(1), batch.labels)
    return sum(losses) / len(losses), matrix.pixel_error


if __name__ == "__main__":
    main()
