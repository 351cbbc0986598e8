"""torch.compile of converted models: full graph, one compilation for three batch sizes."""

import pytest
import timm
import torch
import torchvision

from deepcontrol import to_agc
from tests.compiling import assert_compiles_once


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_converted_model_compiles_once(library: str) -> None:
    torch.manual_seed(0)
    if library == "torchvision":
        model = torchvision.models.resnet18(num_classes=10)
    else:
        model = timm.create_model("resnet10t", num_classes=10)
    # Deep maps must have more than one position: there AGC outputs only its bias.
    assert_compiles_once(to_agc(model), (3, 64, 64), "eager")
