"""AGC as the norm layer of other libraries: passed as a class, a name or a dotted path."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from monai.networks.layers import Norm
from monai.networks.nets import BasicUNet, DynUNet, SegResNet, UNet
from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchvision.models import efficientnet_b0, mobilenet_v2, regnet_x_400mf, resnet18
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.ops import FrozenBatchNorm2d

from benchmarks.zoo.measure import difference, smooth_images, step_is_finite, tensors
from benchmarks.zoo.models import nnunet
from deepcontrol import AGC1d, AGC2d, AGC3d, fold, he_init_, to_agc
from deepcontrol.nn import norm_act

PAGES = Path(__file__).parents[2] / "docs" / "plugins"


def check(model: nn.Module, layer: type[nn.Module], samples: Tensor) -> None:
    """Check that AGC is the only norm of the model, and that it trains at batch 1 and folds."""
    he_init_(model)
    assert any(isinstance(m, layer) for m in model.modules())
    assert not any(isinstance(m, (_NormBase, nn.GroupNorm)) for m in model.modules())
    assert step_is_finite(model.train(), samples)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    model.eval().double()
    with torch.no_grad():
        found, expected = fold(model)(samples.double()), model(samples.double())
    assert difference(tensors(found), tensors(expected)) < 1e-9


@pytest.mark.parametrize("build", [resnet18, mobilenet_v2, efficientnet_b0, regnet_x_400mf])
def test_torchvision(build: Callable[..., nn.Module]) -> None:
    check(build(norm_layer=AGC2d), AGC2d, smooth_images(1, (3, 64, 64)))


def test_torchvision_frozen_batchnorm_raises() -> None:
    with pytest.raises(ValueError, match=r"'bn1' is a frozen BatchNorm.*init='bn'"):
        to_agc(resnet18(norm_layer=FrozenBatchNorm2d))


def test_torchvision_feature_extraction_from_a_converted_model() -> None:
    image = smooth_images(1, (3, 64, 64))
    model = to_agc(resnet18(), example=image).eval()
    names = ["layer1.0.conv1", "layer2"]  # one AGCConv2d, and a stage of several blocks
    seen: dict[str, Tensor] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: seen.update({name: output})
        )
    with torch.no_grad():
        found = create_feature_extractor(model, names)(image)
        model(image)
    for name in names:
        torch.testing.assert_close(found[name], seen[name], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["resnet18", "seresnet18", "res2net50_14w_8s"])
def test_timm_norm_layer(name: str) -> None:
    check(timm.create_model(name, norm_layer=AGC2d), AGC2d, smooth_images(1, (3, 64, 64)))


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("efficientnet_b0", nn.SiLU),
        ("mobilenetv2_050", nn.ReLU6),
        ("resnetv2_50", nn.ReLU),
        ("resnetv2_50d", nn.ReLU),
    ],
)
def test_timm_norm_act(name: str, act: type[nn.Module]) -> None:
    """Compare with timm's own network: the same norms, and activations in the same places."""
    model = timm.create_model(name, norm_layer=norm_act(act))
    own = timm.create_model(name)
    norms = [m for m in own.modules() if isinstance(m, nn.BatchNorm2d)]
    layers = [m for m in model.modules() if isinstance(m, AGC2d)]
    assert [m.num_features for m in layers] == [m.num_features for m in norms]
    active = [not isinstance(m.act, nn.Identity) for m in norms]
    followed = [
        m
        for m in model.modules()
        if isinstance(m, nn.Sequential) and len(m) == 2 and isinstance(m[0], AGC2d)
    ]
    assert len(followed) == sum(active)
    check(model, AGC2d, smooth_images(1, (3, 64, 64)))


@pytest.fixture
def agc_in_monai() -> None:
    if "AGC" not in Norm.names:
        Norm.add_factory_callable("agc", lambda dims: (AGC1d, AGC2d, AGC3d)[dims - 1])


@pytest.mark.usefixtures("agc_in_monai")
@pytest.mark.parametrize("dims", [2, 3])
def test_monai(dims: int) -> None:
    layer = {2: AGC2d, 3: AGC3d}[dims]
    size = {"spatial_dims": dims, "in_channels": 1, "out_channels": 3}
    stages = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
    for model in (
        UNet(**size, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, norm="agc"),
        BasicUNet(**size, features=(8, 8, 16, 16, 32, 8), norm="agc"),
        SegResNet(**size, init_filters=8, norm="agc"),
        DynUNet(**size, **stages, filters=[8, 16, 32], norm_name="agc"),
    ):
        check(model, layer, smooth_images(1, (1,) + (32,) * dims))


def plans(conv_op: str, **options: object) -> dict[str, object]:
    """The network section of nnU-Net plans."""
    dims = int(conv_op[-2])
    arguments = {
        "n_stages": 3,
        "features_per_stage": [8, 16, 32],
        "conv_op": conv_op,
        "kernel_sizes": [[3] * dims] * 3,
        "strides": [[1] * dims, [2] * dims, [2] * dims],
        "n_conv_per_stage": [2, 2, 2],
        "n_conv_per_stage_decoder": [2, 2],
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{dims}d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
        **options,
    }
    return {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": arguments,
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def test_nnunet_plans(tmp_path: Path) -> None:
    """Edit plans with the code of the docs page; read and build them with nnU-Net."""
    ops = {"2d": "torch.nn.modules.conv.Conv2d", "3d_fullres": "torch.nn.modules.conv.Conv3d"}
    configurations = {name: {"architecture": plans(op)} for name, op in ops.items()}
    configurations["3d_cascade"] = {"inherits_from": "3d_fullres"}
    original = tmp_path / "nnUNetPlans.json"
    original.write_text(json.dumps({"plans_name": "nnUNetPlans", "configurations": configurations}))
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / "nnunet.md").read_text(), re.DOTALL)
    (block,) = (b for b in blocks if "def use_agc" in b)
    names: dict[str, Callable[[Path, Path], None]] = {}
    exec(compile(block, "nnunet.md", "exec"), names)  # noqa: S102
    names["use_agc"](original, tmp_path / "agcPlans.json")
    manager = PlansManager(str(tmp_path / "agcPlans.json"))
    assert manager.plans_name == "agcPlans"
    for name, layer in (("2d", AGC2d), ("3d_fullres", AGC3d), ("3d_cascade", AGC3d)):
        configuration = manager.get_configuration(name)
        model = get_network_from_plans(
            configuration.network_arch_class_name,
            configuration.network_arch_init_kwargs,
            configuration.network_arch_init_kwargs_req_import,
            input_channels=1,
            output_channels=3,
            deep_supervision=True,
        )
        check(model, layer, smooth_images(1, (1,) + (16,) * (2 if layer is AGC2d else 3)))


def test_nnunet_batchnorms_are_all_fused() -> None:
    model = nnunet("PlainConvUNet", n_conv_per_stage=[2, 2, 2]).build()
    _, report = to_agc(model, example=smooth_images(1, (1, 16, 16, 16)), report=True)
    assert report.count("fused") == len(report)
