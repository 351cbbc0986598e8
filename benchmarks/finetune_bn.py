"""Fine-tune a network that was trained with BatchNorm, at batch sizes 1, 2 and 4.

Classification, a ResNet-56 of CIFAR-10:

    deepcontrol train --model resnet56 --norm bn --data cifar10 --data-root CIFAR10 \
        --train-limit 40000 --batch-size 128 --lr 0.1 --schedule cosine --weight-decay 5e-4 \
        --epochs 30 --out runs/bn56
    python benchmarks/finetune_bn.py runs/bn56 --data-root CIFAR10 \
        --out benchmarks/results/finetune-bn-he-cuda.csv

Segmentation, a SegNet of synthetic streets:

    deepcontrol train --model segnet --norm bn --data streets --size 120x160 --width 0.5 \
        --batch-size 8 --lr 0.1 --schedule cosine --weight-decay 5e-4 --epochs 20 \
        --out runs/bn-streets
    python benchmarks/finetune_bn.py runs/bn-streets --data-root CAMVID \
        --out benchmarks/results/finetune-bn-segnet-cuda.csv

The same on a CPU, on CamVid alone:

    deepcontrol train --model segnet --norm bn --data streets --train-limit 400 --val-limit 50 \
        --size 96x128 --width 0.25 --batch-size 8 --lr 0.1 --schedule cosine \
        --weight-decay 5e-4 --epochs 20 --device cpu --out runs/bn-streets
    python benchmarks/finetune_bn.py runs/bn-streets --data-root CAMVID --domains shifted \
        --batch-sizes 1 --lrs 3e-4 1e-3 3e-3 1e-2 --device cpu \
        --out benchmarks/results/finetune-bn-camvid-cpu.csv

The network continues on a few images that it has not seen, in two domains:

                    classification                      segmentation
    same            CIFAR-10, images per class          other streets
    shifted         the same in shifted colors          CamVid, in the classes of the streets

It is tested on the validation images of the same domain. The learning rate falls as a cosine
(--schedule), and the loss has no class weights. Contenders:

    bn              BatchNorm in training mode
    bn, frozen      BatchNorm with the statistics of the first training
    agc             to_agc(init="bn"): the same function, lambda 0
    agc, new data   to_agc(init="bn", data=...): the statistics of the new images first
    agc, centered   to_agc(init="centered"): each image's own mean in place of the running mean
    gn              GroupNorm with the trained filters, gamma and beta

Each row of the CSV is one training. Rows that it contains are skipped.
"""

import argparse
import copy
import functools
import math
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from deepcontrol import TrainingStep, param_groups, to_agc
from deepcontrol.workbench.bench.results import append_row, has_row, provenance
from deepcontrol.workbench.data import (
    VOID,
    Augment,
    Batches,
    Cache,
    ClassificationBatches,
    CropFlip,
    Size,
    open_source,
    prepare,
)
from deepcontrol.workbench.data.road_scenes import Streets
from deepcontrol.workbench.losses import class_cross_entropy, pixel_cross_entropy
from deepcontrol.workbench.models.classifiers import CIFAR_GROUPS
from deepcontrol.workbench.optim import Schedule, scheduled_lr, set_lr
from deepcontrol.workbench.train.build import build_model
from deepcontrol.workbench.train.checkpoint import load_of_run
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.config_file import load_config
from deepcontrol.workbench.train.data import evaluation_batches
from deepcontrol.workbench.train.evaluate import evaluate
from deepcontrol.workbench.train.faults import NotFiniteError
from deepcontrol.workbench.train.snapshot import load_weights

CONTENDERS = ("bn", "bn, frozen", "agc", "agc, new data", "agc, centered", "gn")
DOMAINS = ("same", "shifted")
MOMENTUM, DECAY = 0.9, 5e-4
CACHE = Path("out/cache")
FIRST_STREETS_SEED = 10  # of the streets to fine-tune on; training and validation have 1 and 2
# CamVid's classes in streets, where the names differ.
STREET_NAMES = {
    "tree": "vegetation",
    "sign": "traffic sign",
    "pedestrian": "person",
    "bicyclist": "rider",
}


@dataclass(frozen=True)
class Settings:
    """The values in which the tasks differ."""

    lrs: tuple[float, ...]
    statistics_batch: int  # images per batch to estimate statistics on
    test_batch: int
    groups: int  # of GroupNorm


SETTINGS = {
    "classification": Settings((1e-5, 3e-5, 1e-4, 3e-4, 1e-3), 50, 1000, CIFAR_GROUPS),
    "segmentation": Settings((1e-3, 3e-3, 1e-2), 10, 50, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder of a network with BatchNorm")
    parser.add_argument(
        "--data-root", type=Path, required=True, help="folder of CIFAR-10 or CamVid"
    )
    parser.add_argument("--out", type=Path, default=Path("out/finetune-bn.csv"), help="CSV file")
    parser.add_argument(
        "--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS, metavar="NAME"
    )
    parser.add_argument("--domains", nargs="+", default=DOMAINS, choices=DOMAINS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lrs", type=float, nargs="+", help="learning rates")
    parser.add_argument("--schedule", choices=get_args(Schedule), default="cosine")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--per-class", type=int, default=50, help="images per class of CIFAR-10")
    parser.add_argument("--images", type=int, default=100, help="images for segmentation")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    flags = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    here = provenance(flags.device)
    config, _ = load_config(flags.run)
    lrs = flags.lrs or SETTINGS[config.task].lrs
    column = "per_class" if config.task == "classification" else "images"
    count: int = getattr(flags, column)
    for name in flags.contenders:
        steps: dict[int, TrainingStep] = {}  # by batch size: a captured step is used again
        for seed, domain in product(flags.seeds, flags.domains):
            keys = [
                {
                    "contender": name,
                    "domain": domain,
                    "batch": batch_size,
                    "lr": lr,
                    "schedule": flags.schedule,
                    "seed": seed,
                    column: count,
                    "epochs": flags.epochs,
                    "device": flags.device,
                }
                for batch_size, lr in product(flags.batch_sizes, lrs)
            ]
            keys = [key for key in keys if not has_row(flags.out, key)]
            if not keys:
                continue
            train, test = open_domain(config, domain, flags.data_root, count, seed)
            start = load_start(config, name, train, torch.device(flags.device))
            before = {"error_before": error(config, start, test)}
            for key in keys:
                if key["batch"] not in steps:
                    steps[key["batch"]] = make_step(config, start)
                result = finetune(config, steps[key["batch"]], start, key, train, test)
                row = key | before | {"error": result} | here
                append_row(flags.out, row)
                print(*row.values(), sep=", ", flush=True)


# Data


@functools.cache
def open_domain(
    config: Train, domain: str, root: Path, count: int, seed: int
) -> tuple[Cache, Cache]:
    """Return a few images to fine-tune on, and the images to test on.

    Args:
        config: Configuration of the first training.
        domain: One of DOMAINS.
        root: Folder of CIFAR-10 or CamVid.
        count: Images in all (segmentation), or per class.
        seed: Seed for the choice of images.
    """
    size = config.image_size
    if config.task == "classification":
        train, test = (
            prepare(open_source("cifar10", split, root), size, CACHE) for split in ("train", "val")
        )
        unseen = np.arange(config.train_limit or 0, len(train))
        few = subset(train, few_per_class(train, unseen, count, seed))
        return (few, test) if domain == "same" else (shifted(few), shifted(test))
    if domain == "same":
        other = Streets("finetune", count, FIRST_STREETS_SEED + seed)
        test_source = open_source("streets", "val", limit=config.val_limit)
        return prepare(other, size, CACHE), prepare(test_source, size, CACHE)
    train, test = (camvid_as_streets(root, split, size) for split in ("train", "val"))
    if count > len(train):
        raise ValueError(f"CamVid has {len(train)} training images, fewer than --images {count}")
    return subset(train, np.random.default_rng(seed).permutation(len(train))[:count]), test


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


def camvid_as_streets(root: Path, split: str, size: Size) -> Cache:
    """Open CamVid with the class ids of streets.

    The trained classifier can then continue.
    """
    cache = prepare(open_source("camvid", split, root), size, CACHE)
    classes = open_source("streets", "val").classes
    ids = np.full(256, VOID, np.uint8)
    ids[: len(cache.classes)] = [classes.index(STREET_NAMES.get(c, c)) for c in cache.classes]
    return replace(cache, labels=ids[cache.labels], classes=classes)


# Training


def load_start(config: Train, contender: str, train: Cache, device: torch.device) -> nn.Module:
    """Load the trained network and convert it as the contender's name says."""
    model = build_model(config, len(train.classes))
    load_weights(model, load_of_run(config.out, "last").model)
    model.to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    settings = SETTINGS[config.task]
    batches = evaluation_batches(config, train, settings.statistics_batch, device=device)
    convert(model.eval(), contender, [batch.images for batch in batches.epoch()], settings.groups)
    model.train()
    if contender == "bn, frozen":
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
    return model


def convert(model: nn.Module, contender: str, images: list[Tensor], groups: int) -> None:
    """Replace the BatchNorms of a trained model in place."""
    example = images[0][:1]
    match contender:
        case "agc":
            to_agc(model, init="bn", example=example)
        case "agc, new data":
            to_agc(model, init="bn", example=example, data=images)
        case "agc, centered":
            to_agc(model, init="centered", example=example)
        case "gn":
            for module in [*model.modules()]:
                for name, child in module.named_children():
                    if isinstance(child, _BatchNorm):
                        channels = child.num_features
                        norm = nn.GroupNorm(math.gcd(groups, channels), channels)
                        norm.load_state_dict({"weight": child.weight, "bias": child.bias})
                        setattr(module, name, norm.to(child.weight.device))


def make_step(config: Train, start: nn.Module) -> TrainingStep:
    """Return the training step of a copy of the model."""
    model = copy.deepcopy(start)
    device = next(model.parameters()).device
    # A captured step reads the learning rate from a tensor.
    lr = torch.tensor(1.0, device=device) if device.type == "cuda" else 1.0
    groups = param_groups(model, DECAY)
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM, fused=True)
    loss = class_cross_entropy if config.task == "classification" else pixel_cross_entropy
    return TrainingStep(model, loss, optimizer, autocast=autocast_dtype(model))


def finetune(
    config: Train,
    step: TrainingStep,
    start: nn.Module,
    key: dict[str, Any],
    train: Cache,
    test: Cache,
) -> str:
    """Train from the start; return the test error, or nothing if it diverged.

    The step keeps its tensors, so that a captured step is still valid: the start is copied into
    them, and the momentum is cleared.
    """
    device = next(start.parameters()).device
    step.model.load_state_dict(start.state_dict())
    for state in step.optimizer.state.values():
        state["momentum_buffer"].zero_()
    batches = training_batches(config, train, key["batch"], key["seed"], device)
    done, steps, schedule = 0, key["epochs"] * len(batches), key["schedule"]
    for epoch in range(1, key["epochs"] + 1):
        total = torch.zeros((), device=device)
        for batch in batches.epoch(epoch):
            set_lr(step.optimizer, scheduled_lr(key["lr"], done, steps, schedule=schedule))
            total += step(batch.images, batch.labels)
            done += 1
        if not math.isfinite(float(total)):
            return ""
    return error(config, step.model, test)


def training_batches(
    config: Train, cache: Cache, batch_size: int, seed: int, device: torch.device
) -> Batches:
    """Return shuffled and augmented batches."""
    if config.task == "classification":
        crop_flip = CropFlip.of_size(config.image_size)
        return ClassificationBatches(
            cache, batch_size, crop_flip=crop_flip, seed=seed, device=device
        )
    size = config.image_size
    return Batches(cache, batch_size, size=size, augment=Augment(), seed=seed, device=device)


def error(config: Train, model: nn.Module, test: Cache) -> str:
    """Return the error on a set of images, or nothing if the outputs are not finite."""
    device = next(model.parameters()).device
    batches = evaluation_batches(config, test, SETTINGS[config.task].test_batch, device=device)
    modes = [(module, module.training) for module in model.modules()]
    try:
        matrix = evaluate(model, batches, autocast_dtype(model), window=config.window)
        return f"{matrix.pixel_error:.4f}"
    except NotFiniteError:
        return ""
    finally:
        for module, training in modes:  # a frozen BatchNorm stays in evaluation mode
            module.training = training


def autocast_dtype(model: nn.Module) -> torch.dtype | None:
    """Return bf16 on a GPU."""
    return torch.bfloat16 if next(model.parameters()).is_cuda else None


if __name__ == "__main__":
    main()
