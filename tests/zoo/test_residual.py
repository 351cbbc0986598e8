"""Residual networks of other libraries start with a bounded signal after to_agc."""

import copy

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from benchmarks.zoo.measure import smooth_images
from deepcontrol import branch_gain, he_init_, to_agc
from deepcontrol.convert.dataflow import Dataflow, trace_dataflow
from deepcontrol.convert.residual import find_additions
from deepcontrol.nn.init import CENTERING_GAIN

# Number of residual additions of each model.
BLOCKS = {
    "resnet18": 8,
    "resnext50_32x4d": 16,
    "seresnet50": 16,
    "resnetv2_50": 16,  # pre-activation: branches end in convolutions
    "regnetx_004": 22,
    "mobilenetv2_100": 10,
    "fbnetc_100": 15,
    "hrnet_w18_small": 23,  # and 8 fusions of resolutions
    "dla34": 12,
    "res2net50_14w_8s": 16,
    "skresnet18": 8,
    "ecaresnet26t": 8,
    "darknet53": 23,
    "xception41": 12,
    "gernet_s": 14,
    "repvgg_a0": 0,  # parallel convolutions without a shortcut
    "efficientnet_b0": 9,
    "mobilenetv3_small_100": 6,
}


def logits(model: nn.Module) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        y: Tensor = model.eval()(smooth_images(4, (3, 96, 96)))
    return y


# Squeeze-and-excitation pools the output of a norm.
@pytest.mark.filterwarnings("ignore:.*followed by global average pooling")
@pytest.mark.parametrize("name", BLOCKS)
def test_timm(name: str) -> None:
    torch.manual_seed(0)
    model, report = to_agc(timm.create_model(name), report=True)
    assert (report.blocks, report.missing) == (BLOCKS[name], None)
    assert 0 < logits(model).std() < 10


@pytest.mark.parametrize("name", ["seresnet50", "resnetv2_50", "hrnet_w18_small", "skresnet18"])
def test_example_finds_the_same_additions_as_torch_fx(name: str) -> None:
    model = timm.create_model(name)
    traced = find_additions(model, trace_dataflow(model, []))
    assert traced.blocks == BLOCKS[name]
    assert find_additions(model, Dataflow(), smooth_images(1, (3, 96, 96))) == traced


def test_torchvision_resnets() -> None:
    torch.manual_seed(0)
    model, report = to_agc(torchvision.models.resnet50(), report=True)
    assert report.blocks == 16
    expected = torch.full((2048,), CENTERING_GAIN * branch_gain(16))
    torch.testing.assert_close(model.layer4[2].conv3.gain, expected)
    assert logits(model).std() < 10

    deep = torchvision.models.resnet152()
    plain = to_agc(he_init_(copy.deepcopy(deep)), init="paper")
    assert logits(plain).std() > 10
    assert logits(to_agc(deep)).std() < 10


@pytest.mark.parametrize("name", ["efficientnet_b0", "mobilenetv3_small_100", "lcnet_050"])
def test_the_example_corrects_gates_and_other_activations(name: str) -> None:
    torch.manual_seed(0)
    model, report = to_agc(
        timm.create_model(name, num_classes=10), example=smooth_images(2, (3, 96, 96)), report=True
    )
    assert report.corrected
    assert 0.02 < logits(model).std() < 10
