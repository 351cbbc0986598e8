"""Networks of other libraries with InstanceNorm, GroupNorm and paddings of their own."""

from collections.abc import Callable
from functools import partial

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet
from monai.networks.nets import SegResNet, UNet
from torch import nn

from deepcontrol import AGCConv2d, fold, to_agc
from deepcontrol.nn import saved_bytes


def nnunet(architecture: type[nn.Module], **blocks: int) -> nn.Module:
    return architecture(
        input_channels=1, n_stages=3, features_per_stage=(8, 16, 16), conv_op=nn.Conv3d,
        kernel_sizes=3, strides=(1, 2, 2), num_classes=2, n_conv_per_stage_decoder=(1, 1),
        conv_bias=True, norm_op=nn.InstanceNorm3d, norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True}, **blocks,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "replaced"),
    [
        (lambda: nnunet(PlainConvUNet, n_conv_per_stage=2), 0),
        (lambda: nnunet(ResidualEncoderUNet, n_blocks_per_stage=1), 0),
        (lambda: UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), norm="instance"), 0),
        (lambda: SegResNet(3, 8, 1, 2), 13),
    ],
    ids=["nnU-Net", "nnU-Net residual", "MONAI UNet", "MONAI SegResNet"],
)
def test_volumes(make: Callable[[], nn.Module], replaced: int) -> None:
    volume = torch.randn(1, 1, 16, 16, 16)
    before = saved_bytes(make(), volume)
    model, report = to_agc(make(), norms=("instance", "group"), example=volume, report=True)
    assert report.unverified is None
    assert (report.count("replaced"), report.count("skipped")) == (replaced, 0)
    assert report.count("fused") + replaced == len(report)
    y = model(volume)
    y = y[0] if isinstance(y, (list, tuple)) else y
    y.square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert saved_bytes(model, volume) < (0.8 if not replaced else 1.0) * before


def test_group_norm_resnet() -> None:
    x = torch.randn(1, 3, 64, 64)
    model = torchvision.models.resnet18(norm_layer=partial(nn.GroupNorm, 8))
    model, report = to_agc(model, norms="group", example=x, report=True)
    assert (report.count("fused"), report.blocks) == (20, 8)
    assert 0.05 < model(x).std() < 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: timm.create_model("tf_mobilenetv3_small_100"),
        lambda: smp.Unet("efficientnet-b0", encoder_weights=None),
    ],
    ids=["Conv2dSame", "Conv2dStaticSamePadding"],
)
def test_known_paddings_are_fused(make: Callable[[], nn.Module]) -> None:
    x = torch.randn(1, 3, 64, 96)
    model = make().eval()
    expected = model(x)
    model, report = to_agc(model, init="bn", example=x, report=True)
    paddings = [m.padding for m in model.modules() if isinstance(m, AGCConv2d)]
    assert any(p == "same" or isinstance(p[0], tuple) for p in paddings)
    assert all("overrides forward" not in change.why for change in report)
    for converted in (model, fold(model)):
        error = (converted(x) - expected).abs().max()
        assert error < 1e-3 * expected.abs().max()
