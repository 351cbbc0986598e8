"""Models of other libraries with BatchNorm: small models of many families, untrained.

A library is imported when one of its models is built, so only the selected libraries are needed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Entry:
    """A model: its library, its name, a function that builds it, and the shape of one sample."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    sample: tuple[int, ...] = (3, 64, 64)

    @property
    def key(self) -> str:
        return f"{self.library}/{self.name}"


def timm(name: str, **options: Any) -> Entry:
    return Entry("timm", name, lambda: import_module("timm").create_model(name, **options))


def torchvision(name: str, sample: tuple[int, ...] = (3, 64, 64), **options: Any) -> Entry:
    def build() -> nn.Module:
        models = import_module("torchvision.models")
        return models.get_model(name, weights=None, **options)

    return Entry("torchvision", name, build, sample)


def smp(decoder: str, sample: tuple[int, ...] = (3, 64, 64)) -> Entry:
    def build() -> nn.Module:
        library = import_module("segmentation_models_pytorch")
        return getattr(library, decoder)("resnet18", encoder_weights=None, classes=4)

    return Entry("segmentation-models-pytorch", f"{decoder}, resnet18", build, sample)


def monai(name: str, size: int = 32, **options: Any) -> Entry:
    """A network for 3-D volumes with one channel."""

    def build() -> nn.Module:
        return getattr(import_module("monai.networks.nets"), name)(**options)

    return Entry("monai", f"{name}, 3-D", build, (1, size, size, size))


def transformers(
    name: str, config: str, sample: tuple[int, ...] = (3, 64, 64), **options: Any
) -> Entry:
    def build() -> nn.Module:
        library = import_module("transformers")
        return getattr(library, name)(getattr(library, config)(num_labels=10, **options))

    return Entry("transformers", name, build, sample)


@dataclass(frozen=True)
class Plans:
    """The part of nnU-Net's plans that defines the network, with BatchNorm."""

    network: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        module = import_module("nnunetv2.utilities.get_network_from_plans")
        stages = 3
        return module.get_network_from_plans(
            f"dynamic_network_architectures.architectures.unet.{self.network}",
            {
                "n_stages": stages,
                "features_per_stage": [8, 16, 32],
                "conv_op": "torch.nn.modules.conv.Conv3d",
                "kernel_sizes": [[3, 3, 3]] * stages,
                "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 2]],
                "n_conv_per_stage_decoder": [1, 1],
                "conv_bias": True,
                "norm_op": "torch.nn.BatchNorm3d",
                "norm_op_kwargs": {"eps": 1e-5, "affine": True},
                "dropout_op": None,
                "dropout_op_kwargs": None,
                "nonlin": "torch.nn.LeakyReLU",
                "nonlin_kwargs": {"inplace": True},
                **self.options,
            },
            ["conv_op", "norm_op", "dropout_op", "nonlin"],
            input_channels=1,
            output_channels=3,
            deep_supervision=True,
        )


def nnunet(network: str, **options: Any) -> Entry:
    return Entry("nnunetv2", f"{network}, 3-D", Plans(network, options).build, (1, 32, 32, 32))


_UNET: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 3}
_SMALL: dict[str, Any] = {"channels": (8, 16, 32), "strides": (2, 2)}

ZOO: tuple[Entry, ...] = (
    timm("resnet26d"),
    timm("efficientnet_b0"),
    timm("resnetv2_50"),
    timm("mobilenetv3_small_100"),
    timm("regnety_004"),
    timm("densenet121"),
    timm("hrnet_w18_small"),
    timm("repvgg_a0"),
    timm("ghostnet_100"),
    timm("cspresnet50"),
    timm("skresnet18"),
    torchvision("resnet18"),
    torchvision("mobilenet_v2"),
    torchvision("mnasnet0_5"),
    torchvision("regnet_x_400mf"),
    torchvision("shufflenet_v2_x0_5"),
    torchvision("googlenet", init_weights=False, aux_logits=False),
    torchvision("deeplabv3_mobilenet_v3_large", weights_backbone=None),
    torchvision("r3d_18", (3, 4, 32, 32)),
    smp("Unet"),
    smp("UnetPlusPlus"),
    smp("MAnet"),
    smp("Linknet"),
    smp("FPN"),
    smp("PSPNet"),
    smp("PAN", (3, 128, 128)),
    smp("DeepLabV3Plus"),
    smp("UPerNet"),
    monai("UNet", **_UNET, **_SMALL, num_res_units=2, norm="batch"),
    monai("AttentionUnet", **_UNET, **_SMALL),
    monai("VNet", size=16, spatial_dims=3, in_channels=1, out_channels=3),
    monai("SegResNet", **_UNET, init_filters=8, norm="batch"),
    monai(
        "DynUNet",
        **_UNET,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[8, 16, 32],
        norm_name="batch",
    ),
    monai("DenseNet121", **_UNET),
    nnunet("PlainConvUNet", n_conv_per_stage=[2, 2, 2]),
    nnunet("ResidualEncoderUNet", n_blocks_per_stage=[1, 2, 2]),
    transformers(
        "ResNetForImageClassification",
        "ResNetConfig",
        hidden_sizes=[32, 64, 128, 256],
        depths=[2, 2, 2, 2],
    ),
    transformers("RegNetForImageClassification", "RegNetConfig", depths=[1, 1, 2, 1]),
    transformers("MobileNetV1ForImageClassification", "MobileNetV1Config", depth_multiplier=0.5),
    transformers("MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=0.5),
    transformers(
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
    ),
    transformers("LevitForImageClassification", "LevitConfig", sample=(3, 224, 224)),
)
