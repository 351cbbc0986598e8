"""Evaluate networks that were trained on crops, on whole images and in windows.

    python benchmarks/crops.py RUN... --data-root CAMVID --out benchmarks/results/crops.csv

Evaluates the last checkpoint of each run twice: on whole images, and in windows of the training
size as `deepcontrol eval` does, where each window labels the pixels nearest to its center. In
windows, every network loses the context outside of the window, but AGC's means are as in training.
BatchNorm's statistics are the same either way, so the difference between AGC's and BatchNorm's gain
from windows is the cost of the changed means. The training images, evaluated in the same way, show
how much of an error is due to generalization. Evaluates in fp32, whatever the precision in training
was. Rows are appended to the CSV.
"""

import argparse
from pathlib import Path

import torch

from deepcontrol.workbench.bench.results import write_results
from deepcontrol.workbench.data import Batches, open_source, prepare
from deepcontrol.workbench.folders.runfolder import METRICS
from deepcontrol.workbench.folders.storage import read_records
from deepcontrol.workbench.metrics import ConfusionMatrix
from deepcontrol.workbench.predict import load_network
from deepcontrol.workbench.train.config_file import load_config
from deepcontrol.workbench.train.evaluate import evaluating, predict


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--data-root", type=Path, help="folder of the data set, if it moved")
    parser.add_argument("--out", type=Path, default=Path("out/crops.csv"), help="CSV file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags = parser.parse_args()
    rows = [
        measure(run, split, flags.data_root, torch.device(flags.device))
        for run in flags.runs
        for split in ("val", "train")
    ]
    write_results(flags.out, rows, flags.device, append=True)


def measure(
    run: Path, split: str, data_root: Path | None, device: torch.device
) -> dict[str, object]:
    """Evaluate a run on one split; returns a row of the CSV."""
    config, _ = load_config(run)
    limit = {"train": config.train_limit, "val": config.val_limit}[split]
    source = open_source(config.data, split, data_root or config.data_root, limit)
    model = load_network(run, "last", device).model
    batches = Batches(prepare(source, config.image_size), config.val_batch_size, device=device)
    whole, by_windows = (ConfusionMatrix(len(source.classes), device) for _ in range(2))
    with evaluating(model, device, None):
        for batch in batches.epoch():
            whole.update(predict(model, batch.images), batch.labels)
            by_windows.update(predict(model, batch.images, config.image_size), batch.labels)
    row: dict[str, object] = {
        "model": config.model,
        "norm": config.norm,
        "split": split,
        "data": config.data,
        "trained_on": "x".join(map(str, config.image_size)),
        "images": "x".join(map(str, batches.dataset.size)),
        "width": config.width,
        "batch": config.batch_size,
        "init": config.init,
        "seed": config.seed,
        "epochs": read_records(run / METRICS)[-1]["epoch"],
        "error_whole": f"{whole.pixel_error:.4f}",
        "error_by_windows": f"{by_windows.pixel_error:.4f}",
    }
    print(*row.values(), sep=", ", flush=True)
    return row


if __name__ == "__main__":
    main()
