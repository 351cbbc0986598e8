"""Skip the zoo tests outside of their own environment (make test-zoo).

The torchvision wheel is built for the CUDA build of torch. With a CPU build its compiled operators
do not load, and importing torchvision fails when it registers shapes for two of them. Declaring
these operators here, without an implementation, makes the import work. No model of the tests calls
them.
"""

import importlib.metadata
import importlib.util

import torch

_NEEDED = (
    "accelerate",
    "lightning",
    "monai",
    "nnunetv2",
    "segmentation_models_pytorch",
    "timm",
    "torchvision",
    "transformers",
)
_COMPLETE = all(importlib.util.find_spec(name) is not None for name in _NEEDED)
if not _COMPLETE:
    collect_ignore_glob = ["test_*.py"]  # pytest fails if it is asked for these files alone

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# At module level: the declarations live as long as this object.
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare_torchvision_operators() -> None:
    """Make torchvision's CUDA wheel importable with a CPU build of torch."""
    if torch.version.cuda is None and "+cpu" not in importlib.metadata.version("torchvision"):
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                _LIBRARY.define(name + _SCHEMA)


if _COMPLETE:
    declare_torchvision_operators()
