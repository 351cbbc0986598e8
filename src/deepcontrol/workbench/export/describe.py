"""What a developer for a device must know of a file, as JSON beside it."""

import json
from pathlib import Path
from typing import Any

from ... import __version__
from ..data.batches import PIXEL_MEAN, PIXEL_STD
from ..predict.network import Network
from ..runfolder import write_atomic
from .check import TOLERANCE, Agreement
from .packages import versions
from .program import AXES, INPUT, Sizes
from .targets import TARGETS, TargetName

_MEANING = {
    "classes": "logits; the largest along axis 1 is the pixel's class",
    "contour": "logit; above 0 the pixel is on an instance's boundary",
}


def output_names(model: str) -> list[str]:
    return ["classes", "contour"] if model == "classnet" else ["classes"]


def describe(
    file: str,
    target: TargetName,
    model: str,
    network: Network,
    sizes: Sizes,
    agreement: Agreement,
) -> dict[str, Any]:
    """Names, shapes, how pixels become inputs and outputs classes, and what was checked."""
    batch, height, width = AXES.values() if sizes.fixed is None else (1, *sizes.fixed)
    channels = {"classes": len(network.classes), "contour": 1}
    return {
        "file": file,
        "target": target,
        "model": model,
        "norm": network.norm,
        "input": {
            "name": INPUT,
            "dtype": "float32",
            "shape": [batch, 3, height, width],
            "channels": "RGB",
            "smallest_side": sizes.smallest if sizes.fixed is None else None,
            "sides_are_multiples_of": sizes.step,
            "normalisation": "(pixel - mean) / std, for pixels of 0 to 255",
            "mean": [PIXEL_MEAN] * 3,
            "std": [PIXEL_STD] * 3,
        },
        "outputs": [
            {
                "name": name,
                "dtype": "float32",
                "shape": [batch, channels[name], height, width],
                "meaning": _MEANING[name],
            }
            for name in output_names(model)
        ],
        "classes": list(network.classes),
        "colours": [list(color) for color in network.palette],
        "check": {
            "largest_difference_to_torch": agreement.difference,
            "passed_over": agreement.passed_over,
            "tolerance": TOLERANCE,
            "shapes": [list(shape) for shape in agreement.shapes],
        },
        "versions": {"deepcontrol": __version__, **versions(TARGETS[target].extra)},
    }


def write_description(path: Path, description: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(description, indent=2) + "\n")
