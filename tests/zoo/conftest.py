"""The zoo's tests need its own environment (make test-zoo); elsewhere they are left out.

torchvision's wheel is made for the CUDA build of torch. Beside a CPU build its compiled operators
do not load, and its import then fails where Python registers shapes for two of them. Declared here,
without an implementation, they let the import pass; no model of the tests calls them.
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
    collect_ignore_glob = ["test_*.py"]  # pytest fails if it was asked for these alone

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # what it declares goes with it


def declare_torchvision_operators() -> None:
    """Let torchvision be imported beside a CPU build of torch, if its wheel is not for one."""
    if torch.version.cuda is None and "+cpu" not in importlib.metadata.version("torchvision"):
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                _LIBRARY.define(name + _SCHEMA)


if _COMPLETE:
    declare_torchvision_operators()
