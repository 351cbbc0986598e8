"""Run folders as training writes them, without training."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

LAYERS = ("encoder.0.convolutions.0", "encoder.0.convolutions.1", "decoder.0.convolutions.0")


def make_run(folder: Path, epochs: int = 3, norm: str = "agc", **config: Any) -> Path:
    """A run of some epochs, of 5 planned; lambda leaves 1 in its last layer."""
    folder.mkdir(parents=True)
    settings = {"model": "segnet", "norm": norm, "batch_size": 4, "size": [64, 128], "epochs": 5}
    content = {
        "format": 1,
        "config": {**settings, "out": str(folder), **config},
        "derived": {"lr": 0.08, "parameters": 1234, "classes": ["a"], "colours": [[1, 2, 3]]},
        "versions": {"torch": "2"},
        "commit": None,
    }
    (folder / "config.json").write_text(json.dumps(content))
    for epoch in range(epochs + 1):
        append(folder / "metrics.jsonl", metrics(epoch))
        append(folder / "layers.jsonl", {"epoch": epoch, "layers": layers(epoch, norm)})
    (folder / "samples").mkdir()
    for epoch in (1, 2, 3):
        picture = np.full((32, 200, 3), 60 * epoch, np.uint8)
        Image.fromarray(picture).save(folder / "samples" / f"epoch-{epoch:04d}.png")
    return folder


def append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def metrics(epoch: int) -> dict[str, Any]:
    error = [0.9, 0.5, 0.25, 0.375][epoch]
    return {
        "epoch": epoch,
        "step": 10 * epoch,
        "train_loss": 1 / epoch if epoch else None,
        "val_error": error,
        "val_mean_iou": 1 - error,
        "lr": 0.08,
        "seconds": 30.0,
        "images_per_s": 20.0 + epoch if epoch else None,
        "peak_mib": 100.0,
    }


def layers(epoch: int, norm: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for depth, name in enumerate(LAYERS):
        found[name] = {"gain": spread(1.0, 0.1), "bias": spread(0.0, 0.1), "open": 0.5}
        if norm == "agc":
            found[name]["mean_scale"] = spread(1.0 - 0.1 * epoch * (depth == 2), 0.05 * epoch)
    return found


def spread(middle: float, reach: float) -> dict[str, float]:
    steps = {"min": -1, "q05": -0.9, "q25": -0.5, "mean": 0, "q50": 0, "q75": 0.5, "q95": 0.9}
    return {name: middle + step * reach for name, step in {**steps, "max": 1}.items()}
