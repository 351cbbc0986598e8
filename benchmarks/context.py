"""Check that color alone does not give the class on `streets`.

    python benchmarks/context.py [--epochs 36] [--train 1000] [--val 200] [--size 256x512]

Compare a network that sees single pixels with SegNet. Both networks are trained alike (SGD,
momentum 0.9, learning rate 0.02 x batch, class weights of mean 1) and evaluated on the same
validation scenes. The pixel network consists of 1x1 convolutions without normalization: the mean of
a feature map would give it context.
"""

import argparse
import itertools
import time
from pathlib import Path

import torch
from torch import nn

from deepcontrol import he_init_
from deepcontrol.workbench.bench.results import write_results
from deepcontrol.workbench.data import Augment, Batches, Cache, open_source, prepare
from deepcontrol.workbench.losses import class_weights, pixel_cross_entropy
from deepcontrol.workbench.metrics import ConfusionMatrix
from deepcontrol.workbench.models import SegNet
from deepcontrol.workbench.terminal import parse_size


def pixel_network(classes: int) -> nn.Module:
    """Build a network that labels each pixel from its color alone."""
    pairs = itertools.pairwise([3, 128, 128, 128])
    hidden = [layer for a, b in pairs for layer in (nn.Conv2d(a, b, 1), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Conv2d(128, classes, 1))


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches, classes: int) -> ConfusionMatrix:
    matrix = ConfusionMatrix(classes, batches.device)
    model.eval()
    for batch in batches.epoch():
        with torch.autocast(
            batches.device.type, torch.bfloat16, enabled=batches.device.type == "cuda"
        ):
            matrix.update(model(batch.images).argmax(1), batch.labels)
    model.train()
    return matrix


def train(model: nn.Module, training: Batches, weights: torch.Tensor, epochs: int) -> None:
    device = training.device.type
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * training.batch_size, momentum=0.9)
    for epoch in range(epochs):
        start, total = time.perf_counter(), torch.zeros((), device=device)
        for batch in training.epoch(epoch):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(batch.images)
            loss = pixel_cross_entropy(logits, batch.labels, weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        seconds = time.perf_counter() - start
        print(f"  epoch {epoch + 1}: loss {total.item() / len(training):.3f}, {seconds:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=36)
    parser.add_argument("--train", type=int, default=1000, help="training scenes")
    parser.add_argument("--val", type=int, default=200, help="validation scenes")
    parser.add_argument("--size", type=parse_size, default=(256, 512), help="image size, HxW")
    parser.add_argument("--width", type=float, default=1.0, help="width of SegNet")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--cache", type=Path, help="folder for the prepared scenes")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/context.csv"), help="CSV file"
    )
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    caches: dict[str, Cache] = {}
    for split, count in (("train", args.train), ("val", args.val)):
        start = time.perf_counter()
        caches[split] = prepare(open_source("streets", split, limit=count), args.size, args.cache)
        print(f"{len(caches[split])} {split} scenes in {time.perf_counter() - start:.1f} s")
    training = Batches(caches["train"], args.batch_size, augment=Augment(), device=device)
    validation = Batches(caches["val"], args.batch_size, device=device)
    weights = class_weights(torch.from_numpy(caches["train"].histogram)).to(device)
    classes = len(caches["train"].classes)

    rows: list[dict[str, object]] = []
    for name, model in {
        "single pixels": pixel_network(classes),
        f"SegNet width {args.width:g}, AGC": SegNet(classes, args.width),
    }.items():
        print(name)
        model = he_init_(model, torch.Generator().manual_seed(0)).to(device)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        train(model, training, weights, args.epochs)
        matrix = evaluate(model, validation, classes)
        print(
            f"  pixel error {100 * matrix.pixel_error:.2f}%, mean IoU {100 * matrix.mean_iou:.1f}%"
        )
        rows.append(
            {
                "network": name,
                "pixel_error_percent": f"{100 * matrix.pixel_error:.2f}",
                "mean_iou_percent": f"{100 * matrix.mean_iou:.2f}",
                "epochs": args.epochs,
                "train": len(caches["train"]),
                "val": len(caches["val"]),
                "size": f"{args.size[0]}x{args.size[1]}",
                "batch_size": args.batch_size,
                "seed": 0,
            }
        )
    write_results(args.out, rows, device)


if __name__ == "__main__":
    main()
