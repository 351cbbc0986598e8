"""Models of other libraries with BatchNorm: small, untrained, of many families.

A library is imported when one of its models is built, so only the selected libraries are needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

Sample = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        library: Name of the package on PyPI.
        name: Name of the model, unique in its library.
        build: Builds the model.
        sample: Shape of one sample.
    """

    library: str
    name: str
    build: Callable[[], nn.Module]
    sample: Sample = (3, 64, 64)

    @property
    def key(self) -> str:
        return f"{self.library}/{self.name}"

    @property
    def is_installed(self) -> bool:
        try:
            version(self.library)
        except PackageNotFoundError:
            return False
        return True


def call(path: str, *args: Any, **options: Any) -> Any:
    """Import "package.module:name" and call it."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)(*args, **options)


# Libraries of locks/zoo.lock


def timm(name: str, sample: Sample = (3, 64, 64)) -> Entry:
    return Entry("timm", name, lambda: call("timm:create_model", name), sample)


def torchvision(name: str, sample: Sample = (3, 64, 64), **options: Any) -> Entry:
    def build() -> nn.Module:
        return call("torchvision.models:get_model", name, weights=None, **options)

    return Entry("torchvision", name, build, sample)


def smp(decoder: str, sample: Sample = (3, 64, 64), encoder: str = "resnet18") -> Entry:
    library = "segmentation_models_pytorch"
    return Entry(
        "segmentation-models-pytorch",
        f"{decoder}, {encoder}",
        lambda: call(f"{library}:{decoder}", encoder, encoder_weights=None, classes=4),
        sample,
    )


def monai(name: str, size: int = 32, **options: Any) -> Entry:
    """A network for 3-D volumes with one channel."""
    return Entry(
        "monai",
        f"{name}, 3-D",
        lambda: call(f"monai.networks.nets:{name}", **options),
        (1, size, size, size),
    )


def nnunet(network: str, dimensions: int = 3, **options: Any) -> Entry:
    """The part of nnU-Net's plans that defines the network, with BatchNorm."""
    strides = [[1] * dimensions, [2] * dimensions, [2] * dimensions]

    def build() -> nn.Module:
        return call(
            "nnunetv2.utilities.get_network_from_plans:get_network_from_plans",
            f"dynamic_network_architectures.architectures.unet.{network}",
            {
                "n_stages": len(strides),
                "features_per_stage": [8, 16, 32],
                "conv_op": f"torch.nn.modules.conv.Conv{dimensions}d",
                "kernel_sizes": [[3] * dimensions] * len(strides),
                "strides": strides,
                "n_conv_per_stage_decoder": [1, 1],
                "conv_bias": True,
                "norm_op": f"torch.nn.BatchNorm{dimensions}d",
                "norm_op_kwargs": {"eps": 1e-5, "affine": True},
                "dropout_op": None,
                "dropout_op_kwargs": None,
                "nonlin": "torch.nn.LeakyReLU",
                "nonlin_kwargs": {"inplace": True},
                **options,
            },
            ["conv_op", "norm_op", "dropout_op", "nonlin"],
            input_channels=1,
            output_channels=3,
            deep_supervision=True,
        )

    sample = (1, *(32,) * dimensions)
    return Entry("nnunetv2", f"{network}, {dimensions}-D", build, sample)


def transformers(name: str, config: str, sample: Sample = (3, 64, 64), **options: Any) -> Entry:
    def build() -> nn.Module:
        settings = call(f"transformers:{config}", num_labels=10, **options)
        return call(f"transformers:{name}", settings)

    return Entry("transformers", name, build, sample)


# Libraries of locks/zoo-more.lock


def pytorchcv(name: str, sample: Sample = (3, 224, 224)) -> Entry:
    return Entry(
        "pytorchcv", name, lambda: call("pytorchcv.model_provider:get_model", name), sample
    )


def ultralytics(name: str, kind: str = "DetectionModel") -> Entry:
    def build() -> nn.Module:
        return call(f"ultralytics.nn.tasks:{kind}", f"{name}.yaml", verbose=False)

    return Entry("ultralytics", name, build)


def kornia(path: str, sample: Sample, **options: Any) -> Entry:
    name = path.rpartition(":")[2]
    return Entry("kornia", name, lambda: call(f"kornia.{path}", **options), sample)


def pretrainedmodels(name: str, sample: Sample) -> Entry:
    def build() -> nn.Module:
        return call(f"pretrainedmodels:{name}", num_classes=10, pretrained=None)

    return Entry("pretrainedmodels", name, build, sample)


def smp_3d(decoder: str) -> Entry:
    library = "segmentation_models_pytorch_3d"
    options = {"encoder_weights": None, "in_channels": 1, "classes": 3}
    return Entry(
        "segmentation-models-pytorch-3d",
        f"{decoder}, resnet18",
        lambda: call(f"{library}:{decoder}", "resnet18", **options),
        (1, 32, 32, 32),
    )


def doctr(path: str, sample: Sample = (3, 32, 32), **options: Any) -> Entry:
    name = path.rpartition(":")[2]
    return Entry(
        "python-doctr",
        name,
        lambda: call(f"doctr.models.{path}", pretrained=False, **options),
        sample,
    )


def pytorchvideo(name: str, module: str, sample: Sample, **options: Any) -> Entry:
    path = f"pytorchvideo.models.{module}:create_{name}"
    return Entry("pytorchvideo", name, lambda: call(path, model_num_class=10, **options), sample)


def effdet(name: str) -> Entry:
    def build() -> nn.Module:
        config = call("effdet:get_efficientdet_config", name)
        config.image_size = (128, 128)
        return call("effdet:EfficientDet", config, pretrained_backbone=False)

    return Entry("effdet", name, build, (3, 128, 128))


def efficientnet_pytorch(name: str) -> Entry:
    def build() -> nn.Module:
        return import_module("efficientnet_pytorch").EfficientNet.from_name(name)

    return Entry("efficientnet-pytorch", name, build)


def other(
    library: str, name: str, path: str, *args: Any, sample: Sample = (3, 64, 64), **options: Any
) -> Entry:
    return Entry(library, name, lambda: call(path, *args, **options), sample)


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
    timm("seresnet18"),
    timm("tf_efficientnet_lite0"),
    timm("mobilenetv4_conv_small"),
    timm("mobileone_s0"),
    timm("fastvit_t8"),
    timm("repvit_m0_9"),
    timm("efficientvit_b0"),
    timm("mobilevit_xxs"),
    timm("res2net50_14w_8s"),
    timm("dla34"),
    timm("ese_vovnet19b_dw"),
    timm("dpn48b"),
    timm("xception41"),
    timm("convmixer_1024_20_ks9_p14"),
    torchvision("resnet18"),
    torchvision("mobilenet_v2"),
    torchvision("mnasnet0_5"),
    torchvision("regnet_x_400mf"),
    torchvision("shufflenet_v2_x0_5"),
    torchvision("googlenet", init_weights=False, aux_logits=False),
    torchvision("deeplabv3_mobilenet_v3_large", weights_backbone=None),
    torchvision("lraspp_mobilenet_v3_large", weights_backbone=None),
    torchvision("mobilenet_v3_small"),
    torchvision("efficientnet_b0"),
    torchvision("r3d_18", (3, 4, 32, 32)),
    torchvision("r2plus1d_18", (3, 4, 32, 32)),
    smp("Unet"),
    smp("UnetPlusPlus"),
    smp("MAnet"),
    smp("Linknet"),
    smp("FPN"),
    smp("PSPNet"),
    smp("PAN", (3, 128, 128)),
    smp("DeepLabV3Plus"),
    smp("UPerNet"),
    smp("Unet", encoder="efficientnet-b0"),
    smp("Unet", encoder="dpn68"),
    smp("DeepLabV3", encoder="mobilenet_v2"),
    monai("UNet", **_UNET, **_SMALL, num_res_units=2, norm="batch"),
    monai("AttentionUnet", **_UNET, **_SMALL),
    monai("VNet", size=16, **_UNET),
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
    monai("BasicUNet", **_UNET, features=(8, 8, 16, 16, 32, 8), norm="batch"),
    monai("HighResNet", size=16, **_UNET),
    monai("resnet10", spatial_dims=3, n_input_channels=1, num_classes=3),
    Entry(
        "monai",
        "EfficientNetBN, 2-D",
        lambda: call("monai.networks.nets:EfficientNetBN", "efficientnet-b0", pretrained=False),
    ),
    nnunet("PlainConvUNet", n_conv_per_stage=[2, 2, 2]),
    nnunet("ResidualEncoderUNet", n_blocks_per_stage=[1, 2, 2]),
    nnunet("ResidualEncoderUNet", dimensions=2, n_blocks_per_stage=[1, 2, 2]),
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
    transformers("MobileViTForImageClassification", "MobileViTConfig", image_size=64),
    transformers("SegformerForSemanticSegmentation", "SegformerConfig"),
    transformers("SwiftFormerForImageClassification", "SwiftFormerConfig"),
    transformers("HGNetV2ForImageClassification", "HGNetV2Config"),
    pytorchcv("preresnet12"),
    pytorchcv("bam_resnet18"),
    pytorchcv("diaresnet12"),
    pytorchcv("shufflenet_g3_wd2"),
    pytorchcv("sqnxt23_w1"),
    pytorchcv("dicenet_wd5", (3, 64, 64)),
    pytorchcv("densenet40_k12_cifar10", (3, 32, 32)),
    pytorchcv("ror3_56_cifar10", (3, 32, 32)),
    pytorchcv("lednet_cityscapes", (3, 64, 64)),
    pytorchcv("simplepose_resnet18_coco", (3, 64, 64)),
    ultralytics("yolov5n"),
    ultralytics("yolov8n"),
    ultralytics("yolov8n-cls", "ClassificationModel"),
    ultralytics("yolov10n"),
    ultralytics("yolo11n-seg", "SegmentationModel"),
    ultralytics("yolo26n"),
    kornia("feature:HardNet", (1, 32, 32), pretrained=False),
    kornia("feature:HardNet8", (1, 32, 32), pretrained=False),
    kornia("feature:KeyNet", (1, 32, 32), pretrained=False),
    kornia("feature:XFeatModel", (1, 64, 64)),
    kornia("filters.dexined:DexiNed", (3, 64, 64), pretrained=False),
    pretrainedmodels("bninception", (3, 224, 224)),
    pretrainedmodels("xception", (3, 96, 96)),
    smp_3d("FPN"),
    doctr("classification:mobilenet_v3_small_r"),
    doctr("classification:textnet_tiny"),
    doctr("detection:linknet_resnet18", (3, 64, 64), pretrained_backbone=False, exportable=True),
    pytorchvideo("x3d", "x3d", (3, 4, 64, 64), input_clip_length=4, input_crop_size=64),
    pytorchvideo("csn", "csn", (3, 4, 32, 32), head_pool_kernel_size=(1, 2, 2)),
    effdet("tf_efficientdet_lite0"),
    other("geffnet", "mixnet_s", "geffnet:create_model", "mixnet_s"),
    other("geffnet", "fbnetc_100", "geffnet:create_model", "fbnetc_100"),
    efficientnet_pytorch("efficientnet-b0"),
    other(
        "torchxrayvision",
        "DenseNet",
        "torchxrayvision.models:DenseNet",
        sample=(1, 64, 64),
        num_classes=10,
        weights=None,
    ),
    other(
        "facenet-pytorch",
        "InceptionResnetV1",
        "facenet_pytorch:InceptionResnetV1",
        sample=(3, 96, 96),
        classify=True,
        num_classes=10,
    ),
    other(
        "open-clip-torch",
        "ModifiedResNet",
        "open_clip.modified_resnet:ModifiedResNet",
        [1, 1, 1, 1],
        64,
        4,
        image_size=64,
        width=16,
    ),
    other("resnest", "resnest50", "resnest.torch:resnest50", pretrained=False),
    other(
        "lightly",
        "resnet-9",
        "lightly.models:ResNetGenerator",
        "resnet-9",
        sample=(3, 32, 32),
    ),
    other("easyocr", "CRAFT", "easyocr.craft:CRAFT", pretrained=False),
)
