"""Fine-tune a classifier that was trained with BatchNorm, at batch sizes 1, 2 and 4.

    deepcontrol train --model resnet56 --norm bn --data cifar10 --data-root CIFAR10 \
        --train-limit 40000 --batch-size 128 --lr 0.1 --schedule cosine --weight-decay 5e-4 \
        --epochs 30 --out runs/bn56
    python benchmarks/finetune_bn.py runs/bn56 --data-root CIFAR10 \
        --out benchmarks/results/finetune-bn-cuda.csv

The network continues on a few images per class that it has not seen, in the same domain or with
shifted colors, and is tested on CIFAR-10's test set in the same colors. Contenders:

    bn              BatchNorm in training mode
    bn, frozen      BatchNorm with the statistics of the first training
    agc             to_agc(init="bn"): the same function, lambda 0
    agc, new data   to_agc(init="bn", data=...): the statistics of the new images first
    agc, centered   to_agc(init="centered"): each image's own mean in place of the running mean
    gn              GroupNorm with the trained filters, gamma and beta

Each row of the CSV is one training. Rows that it contains are skipped.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from deepcontrol import TrainingStep, param_groups, to_agc
from deepcontrol.workbench.bench.results import append_row, has_row, provenance
from deepcontrol.workbench.data import Cache, open_source, prepare
from deepcontrol.workbench.data.classification import ClassificationBatches, CropFlip
from deepcontrol.workbench.losses import class_cross_entropy
from deepcontrol.workbench.models.resnet import CIFAR_GROUPS
from deepcontrol.workbench.predict.classes import load_classifier
from deepcontrol.workbench.train.config import load_config
from deepcontrol.workbench.train.evaluate import evaluate
from deepcontrol.workbench.train.faults import NotFiniteError

CONTENDERS = ("bn", "bn, frozen", "agc", "agc, new data", "agc, centered", "gn")
DOMAINS = ("same", "shifted")
MOMENTUM, DECAY, EVAL_BATCH, STATISTICS_BATCH = 0.9, 5e-4, 1000, 50


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder of a classifier with BatchNorm")
    parser.add_argument("--data-root", type=Path, required=True, help="folder of CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("out/finetune-bn.csv"), help="CSV file")
    parser.add_argument(
        "--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS, metavar="NAME"
    )
    parser.add_argument("--domains", nargs="+", default=DOMAINS, choices=DOMAINS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--per-class", type=int, default=50, help="images per class")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    flags = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    here = provenance(flags.device)
    config, _ = load_config(flags.run)
    train, test = (
        prepare(open_source("cifar10", split, flags.data_root), (32, 32), Path("out/cache"))
        for split in ("train", "val")
    )
    unseen = np.arange(config.train_limit or 0, len(train))
    for seed in flags.seeds:
        few = subset(train, few_per_class(train, unseen, flags.per_class, seed))
        for batch_size in flags.batch_sizes:
            for domain in flags.domains:
                data = (few, test) if domain == "same" else (shifted(few), shifted(test))
                for name in flags.contenders:
                    for lr in flags.lrs:
                        key = {
                            "contender": name,
                            "domain": domain,
                            "batch": batch_size,
                            "lr": lr,
                            "seed": seed,
                            "per_class": flags.per_class,
                            "epochs": flags.epochs,
                            "device": flags.device,
                        }
                        if not has_row(flags.out, key):
                            row = key | finetune(flags.run, key, *data) | here
                            append_row(flags.out, row)
                            print(*row.values(), sep=", ", flush=True)


def few_per_class(
    cache: Cache, among: NDArray[np.int64], count: int, seed: int
) -> NDArray[np.int64]:
    """Choose `count` samples of each class."""
    shuffled = np.random.default_rng(seed).permutation(among)
    classes = range(len(cache.classes))
    found = [shuffled[cache.labels[shuffled] == c][:count] for c in classes]
    if min(map(len, found)) < count:
        raise ValueError(f"the images that were not trained on have fewer than {count} per class")
    return np.concatenate(found)


def subset(cache: Cache, chosen: NDArray[np.int64]) -> Cache:
    return replace(
        cache,
        images=cache.images[chosen],
        labels=cache.labels[chosen],
        segments=cache.segments[chosen],
    )


def shifted(cache: Cache) -> Cache:
    """Shift the colors: exchange the channels, halve the contrast, brighten."""
    images = (0.5 * cache.images[..., [2, 0, 1]] + 90).astype(np.uint8)
    return replace(cache, images=images)


def finetune(run: Path, key: dict[str, Any], train: Cache, test: Cache) -> dict[str, Any]:
    """Fine-tune one contender; return columns of the CSV."""
    device = torch.device(key["device"])
    on_gpu = device.type == "cuda"
    batches = ClassificationBatches(
        train,
        key["batch"],
        crop_flip=CropFlip.of_size((32, 32)),
        seed=key["seed"],
        device=device,
    )
    statistics = ClassificationBatches(train, STATISTICS_BATCH, device=device)
    validation = ClassificationBatches(test, EVAL_BATCH, device=device)
    model = load_classifier(run, "last", device).model
    if on_gpu:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    convert(model, key["contender"], statistics)
    model.train()
    if key["contender"] == "bn, frozen":
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
    autocast = torch.bfloat16 if on_gpu else None
    optimizer = torch.optim.SGD(
        param_groups(model, DECAY), lr=key["lr"], momentum=MOMENTUM, fused=True
    )
    step = TrainingStep(model, class_cross_entropy, optimizer, autocast=autocast)
    row: dict[str, Any] = {"error_before": error(model, validation, autocast), "error": ""}
    for epoch in range(1, key["epochs"] + 1):
        total = torch.zeros((), device=device)
        for batch in batches.epoch(epoch):
            total += step(batch.images, batch.labels)
        if not math.isfinite(float(total)):
            return row
    return row | {"error": error(model, validation, autocast)}


def convert(model: nn.Module, contender: str, images: ClassificationBatches) -> None:
    """Replace the BatchNorms of a trained model in place, as the contender's name says."""
    example = images.samples([0]).images
    match contender:
        case "agc":
            to_agc(model, init="bn", example=example)
        case "agc, new data":
            to_agc(model, init="bn", example=example, data=[b.images for b in images.epoch()])
        case "agc, centered":
            to_agc(model, init="centered", example=example)
        case "gn":
            for module in [*model.modules()]:
                for name, child in module.named_children():
                    if isinstance(child, _BatchNorm):
                        groups = math.gcd(CIFAR_GROUPS, child.num_features)
                        norm = nn.GroupNorm(groups, child.num_features).to(child.weight.device)
                        norm.load_state_dict({"weight": child.weight, "bias": child.bias})
                        setattr(module, name, norm)


def error(model: nn.Module, images: ClassificationBatches, autocast: torch.dtype | None) -> str:
    """Return the error on a set of images, or nothing if the outputs are not finite."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        return f"{evaluate(model, images, autocast).pixel_error:.4f}"
    except NotFiniteError:
        return ""
    finally:
        for module, training in modes:  # a frozen BatchNorm stays in evaluation mode
            module.training = training


if __name__ == "__main__":
    main()
