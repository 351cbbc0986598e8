"""Fine-tune a network that was trained on crops for use on whole images.

    python benchmarks/finetune_whole_images.py RUN --data-root CAMVID

Continues from the last checkpoint of a run with the run's learning rate and batch size, in three
ways: on crops as before, on whole images, and on both, alternating batch by batch. Then evaluates
on whole images and in windows of the crops' size, as benchmarks/crops.py does. The first way shows
how much of a change comes from more epochs alone. Momentum starts at zero and gradients are not
clipped. Rows are appended to the CSV.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from deepcontrol.step import TrainingStep
from deepcontrol.workbench.bench.results import write_results
from deepcontrol.workbench.data import Augment, Batch, Batches, Cache, open_source, prepare
from deepcontrol.workbench.folders.runfolder import METRICS
from deepcontrol.workbench.folders.storage import read_records
from deepcontrol.workbench.optim import sgd
from deepcontrol.workbench.predict import load_network
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.config_file import load_config
from deepcontrol.workbench.train.evaluate import evaluate
from deepcontrol.workbench.train.objective import build_objective

WAYS = ("none", "crops", "whole images", "both")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of fine-tuning")
    parser.add_argument("--data-root", type=Path, help="folder of the data set, if it moved")
    parser.add_argument(
        "--out", type=Path, default=Path("out/finetune-whole-images.csv"), help="CSV file"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags = parser.parse_args()
    config, _ = load_config(flags.run)
    if flags.data_root is not None:
        config = replace(config, data_root=flags.data_root)
    options = config.folder_options
    train, val = (
        prepare(
            open_source(config.data, split, config.data_root, limit, options), config.image_size
        )
        for split, limit in (("train", config.train_limit), ("val", config.val_limit))
    )
    rows = []
    for way in WAYS:
        epochs = 0 if way == WAYS[0] else flags.epochs
        errors = finetune(flags.run, config, way, epochs, train, val, torch.device(flags.device))
        rows.append(
            {
                "model": config.model,
                "norm": config.norm,
                "data": config.data,
                "trained_on": "x".join(map(str, config.image_size)),
                "images": "x".join(map(str, val.size)),
                "width": config.width,
                "batch": config.batch_size,
                "rate": config.learning_rate,
                "seed": config.seed,
                "epochs": read_records(flags.run / METRICS)[-1]["epoch"],
                "finetuned_on": way,
                "finetune_epochs": epochs,
                "error_whole": f"{errors[0]:.4f}",
                "error_by_windows": f"{errors[1]:.4f}",
            }
        )
        print(*rows[-1].values(), sep=", ", flush=True)
    write_results(flags.out, rows, flags.device, append=True)


def finetune(
    run: Path, config: Train, way: str, epochs: int, train: Cache, val: Cache, device: torch.device
) -> tuple[float, float]:
    """Fine-tune in one way; returns the pixel errors on whole images and in windows."""
    model = load_network(run, "last", device).model
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    autocast = torch.bfloat16 if device.type == "cuda" else None
    optimizer = sgd([{"params": list(model.parameters())}], config.learning_rate, config.momentum)
    # Eager, because a CUDA graph has one image size.
    objective = build_objective(config, train, device)
    step = TrainingStep(model, objective.loss, optimizer, "eager", autocast)
    for epoch in range(epochs):
        model.train()
        for batch in training_batches(config, way, epoch, train, device):
            step(batch.images, *objective.targets(batch))
    model.eval()
    batches = Batches(val, config.val_batch_size, device=device)
    whole, windows = (evaluate(model, batches, window=w) for w in (None, config.image_size))
    return whole.pixel_error, windows.pixel_error


def training_batches(
    config: Train, way: str, epoch: int, train: Cache, device: torch.device
) -> Iterator[Batch]:
    """Yield the batches of an epoch. Each image comes once, also with "both"."""
    sizes = {"crops": [config.image_size], "whole images": [train.size]}.get(
        way, [config.image_size, train.size]
    )
    batches = [
        Batches(train, config.batch_size, size=size, augment=Augment(), seed=1, device=device)
        for size in sizes
    ]
    for number in range(len(batches[0])):
        yield next(batches[number % len(batches)].epoch(epoch, start=number))


if __name__ == "__main__":
    main()
