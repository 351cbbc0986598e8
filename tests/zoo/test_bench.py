"""The benchmark's networks equal those of other libraries."""

import copy

import pytest
import torch
from torch import nn

from deepcontrol.workbench.bench.contenders import build, layers_source, use_timm_norms_
from deepcontrol.workbench.models import NnUNet3d, SegNet
from deepcontrol.workbench.models.unet3d import NNUNET_WIDTHS, RESIDUAL_BLOCKS


@pytest.mark.parametrize("norm", ["frn", "evonorm-s0"])
def test_timm_norms_compute_the_same(norm: str) -> None:
    assert layers_source(norm) == "timm"
    own = SegNet(4, 0.125, norm)  # type: ignore[arg-type]
    theirs = use_timm_norms_(copy.deepcopy(own))
    modules = {type(m).__module__.split(".")[0] for m in theirs.modules() if _has_no_child(m)}
    assert "timm" in modules
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(theirs(x), own(x), rtol=1e-3, atol=1e-3)
    built = build("resnet50", norm)
    assert any(type(m).__module__.startswith("timm.") for m in built.modules())


def _has_no_child(module: nn.Module) -> bool:
    return not list(module.children())


@pytest.mark.parametrize("residual", [False, True])
def test_nnunet_has_as_many_parameters(residual: bool) -> None:
    unets = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    stages = len(NNUNET_WIDTHS)
    with torch.device("meta"):
        ours = NnUNet3d(1, 3, norm="in", residual=residual)
        settings = {
            "input_channels": 1,
            "n_stages": stages,
            "features_per_stage": NNUNET_WIDTHS,
            "conv_op": nn.Conv3d,
            "kernel_sizes": 3,
            "strides": [1] + [2] * (stages - 1),
            "num_classes": 3,
            "conv_bias": False,
            "norm_op": nn.InstanceNorm3d,
            "norm_op_kwargs": {"affine": True},
            "nonlin": nn.LeakyReLU,
        }
        if residual:
            peer = unets.ResidualEncoderUNet(
                n_blocks_per_stage=RESIDUAL_BLOCKS,
                n_conv_per_stage_decoder=[1] * (stages - 1),
                **settings,
            )
        else:
            peer = unets.PlainConvUNet(
                n_conv_per_stage=[2] * stages,
                n_conv_per_stage_decoder=[2] * (stages - 1),
                **settings,
            )
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, peer)]
    # Only the highest resolution has a head here, and transposed convolutions have a bias.
    heads = [p for name, p in peer.named_parameters() if "seg_layers" in name]
    spare = sum(p.numel() for p in heads) - (NNUNET_WIDTHS[0] + 1) * 3
    assert abs(counts[1] - spare - counts[0]) <= sum(NNUNET_WIDTHS)
