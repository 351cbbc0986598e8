"""Train residual networks for 300 steps after one call of to_agc: do they learn?

    python benchmarks/train_converted.py --data-root CIFAR10 \
        --out benchmarks/results/train-converted-cuda.csv

Each network of torchvision and timm gets 10 classes, is converted by to_agc(model) and trained on
CIFAR-10 images, enlarged to 128x128, at batch sizes 32 and 1 with the recommended learning rate.
`init` is the initialization of to_agc, or bn for the network as it is. A row has the deviation of
the logits at the start, the mean loss over the first and last 50 steps (of 10 classes: 2.303 by
guessing), and the step at which the loss was not finite. Rows that the CSV contains are skipped.
Takes about two minutes on an H200.
"""

import argparse
import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepcontrol import TrainingStep, param_groups, to_agc
from deepcontrol.workbench.bench.results import append_row, has_row, provenance
from deepcontrol.workbench.data import Cache, open_source, prepare
from deepcontrol.workbench.data.batches import ClassificationBatches, CropFlip
from deepcontrol.workbench.optim import default_lr

MODELS = (
    "torchvision:resnet50",
    "timm:resnext50_32x4d",
    "timm:seresnet50",
    "timm:resnetv2_50",
    "timm:regnety_008",
    "timm:efficientnet_b0",
    "timm:mobilenetv3_large_100",
    "timm:hrnet_w18_small",
    "timm:dla34",
    "timm:res2net50_26w_4s",
    "timm:skresnet18",
    "timm:ecaresnet26t",
    "timm:cspresnet50",
)
CLASSES = 10
WARM_UP = 30  # steps
AVERAGED = 50  # steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, required=True, help="folder of CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("out/train-converted.csv"), help="CSV")
    parser.add_argument(
        "--models", nargs="+", default=MODELS, help="LIBRARY:NAME, as in timm:dla34"
    )
    parser.add_argument("--init", nargs="+", default=["scratch"], help="scratch, paper or bn")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 1])
    parser.add_argument(
        "--factors", type=float, nargs="+", default=[1.0], help="of the recommended learning rate"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--size", type=int, default=128, help="side of the images")
    parser.add_argument("--device", default="cuda")
    flags = parser.parse_args()
    here = provenance(flags.device)
    cache = prepare(open_source("cifar10", "train", flags.data_root), (32, 32), Path("out/cache"))
    runs = itertools.product(flags.models, flags.init, flags.factors, flags.batch_sizes)
    for name, init, factor, batch_size in runs:
        key = {
            "model": name,
            "init": init,
            "batch": batch_size,
            "lr": round(factor * default_lr("classification", batch_size), 6),
            "steps": flags.steps,
            "size": flags.size,
            "device": flags.device,
        }
        if not has_row(flags.out, key):
            row = key | train_network(key, cache) | here
            append_row(flags.out, row)
            print(*row.values(), sep=", ", flush=True)


def build(name: str) -> nn.Module:
    """Build a network of torchvision or timm, with BatchNorm and random weights."""
    library, _, model = name.partition(":")
    if library == "torchvision":
        import torchvision

        return torchvision.models.get_model(model, num_classes=CLASSES)
    import timm

    return timm.create_model(model, num_classes=CLASSES)


def train_network(key: dict[str, Any], cache: Cache) -> dict[str, Any]:
    """Convert and train one network; return columns of the CSV."""
    torch.manual_seed(0)
    device = torch.device(key["device"])
    batches = ClassificationBatches(
        cache, key["batch"], crop_flip=CropFlip.of_size((32, 32)), device=device
    )

    def enlarged(images: Tensor) -> Tensor:
        return functional.interpolate(images, key["size"], mode="bilinear")

    images = enlarged(batches.samples(list(range(16))).images)
    model = build(key["model"])
    if key["init"] != "bn":
        to_agc(model, init=key["init"], example=images[:2].cpu())
    model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    with torch.no_grad():
        deviation = float(model(images).std())
    lr = torch.tensor(key["lr"], device=device)
    optimizer = torch.optim.SGD(
        param_groups(model, 5e-4), lr=lr if lr.is_cuda else float(lr), momentum=0.9, fused=True
    )
    autocast = torch.bfloat16 if device.type == "cuda" else None
    step = TrainingStep(model, functional.cross_entropy, optimizer, autocast=autocast)
    losses: list[Tensor] = []
    while len(losses) < key["steps"]:
        for batch in batches.epoch():
            share = min(1.0, (len(losses) + 1) / WARM_UP)
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(share * key["lr"])
                else:
                    group["lr"] = share * key["lr"]
            losses.append(step(enlarged(batch.images), batch.labels))
            if len(losses) == key["steps"]:
                break
    values = torch.stack(losses).tolist()
    bad = next((i for i, loss in enumerate(values, 1) if not math.isfinite(loss)), None)
    return {
        "logit_deviation": f"{deviation:.3g}",
        "first_loss": f"{statistics.fmean(values[:AVERAGED]):.3f}",
        "last_loss": f"{statistics.fmean(values[-AVERAGED:]):.3f}",
        "diverged_at_step": "" if bad is None else bad,
    }


if __name__ == "__main__":
    main()
