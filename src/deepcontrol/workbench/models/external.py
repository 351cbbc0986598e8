"""Networks by name: timm:, smp:, torchvision:, or your own as module:function.

BatchNorm becomes AGC (automatic gain control) with norm "agc" and stays with norm "bn".
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ...convert import to_agc
from .blocks import Norm

Task = Literal["segmentation", "classification"]
PACKAGES = {"timm": "timm", "smp": "segmentation_models_pytorch", "torchvision": "torchvision"}
NORMS = ("agc", "bn")
CUSTOM = "custom"  # a network that was passed to `Trainer`, in config.json
PAD_MULTIPLE = 32  # most encoders halve the image five times
_SEGMENTATION = ("deeplabv3", "fcn_", "lraspp")  # names of torchvision


def is_external(name: str) -> bool:
    """Return whether a network's name is of another library or module.

    >>> is_external("timm:resnet18"), is_external("segnet")
    (True, False)
    """
    return ":" in name


def is_code(name: str) -> bool:
    """Return whether a network's name is a function of a module, called to build it.

    >>> is_code("my_models:build"), is_code("timm:resnet18")
    (True, False)
    """
    return is_external(name) and name.partition(":")[0] not in PACKAGES


def external_task(name: str) -> Task | None:
    """Return the task of a network by its name; None if it depends on the data.

    >>> external_task("smp:Unet/resnet34"), external_task("my_models:build")
    ('segmentation', None)
    """
    origin, _, own = name.partition(":")
    if not origin or not own:
        raise ValueError(
            f"expected a network such as timm:resnet18, smp:Unet/resnet34, torchvision:resnet50 or "
            f"module:function, got {name!r}"
        )
    if ":" in own:  # timm reads hf-hub:NAME and local-dir:PATH from places that a name chooses
        raise ValueError(f"expected a network of {origin} itself, got {own!r}")
    if origin == "timm":
        return "classification"
    if origin == "smp":
        return "segmentation"
    if origin == "torchvision":
        return "segmentation" if own.startswith(_SEGMENTATION) else "classification"
    return None


class ExternalNetwork(nn.Module):
    """Wrap a network so that it returns logits of the images' size, as a tensor.

    For segmentation, images are padded at the bottom and right to multiples of 32 by repeating the
    border, and logits of a lower resolution are interpolated. Of several outputs the one named
    "out" or "logits" is used, or the first.

    Args:
        network: The network.
        task: "segmentation" or "classification".
        in_channels: Channels of the images.
    """

    total_stride = PAD_MULTIPLE

    def __init__(self, network: nn.Module, task: Task, in_channels: int = 3) -> None:
        super().__init__()
        self.network, self.task, self.in_channels = network, task, in_channels
        if task == "segmentation":
            self.pad_multiple = PAD_MULTIPLE

    def forward(self, images: Tensor) -> Tensor:
        if self.task == "classification":
            return logits_of(self.network(images))
        height, width = images.shape[2:]
        padding = (0, -width % PAD_MULTIPLE, 0, -height % PAD_MULTIPLE)
        padded = functional.pad(images, padding, mode="replicate")
        logits = logits_of(self.network(padded))
        if logits.dim() == 4 and logits.shape[2:] != padded.shape[2:]:
            logits = functional.interpolate(logits, size=padded.shape[2:], mode="bilinear")
        return logits[..., :height, :width]


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a network's outputs: a tensor, mapping, object or tuple."""
    if isinstance(outputs, Mapping):
        outputs = next((outputs[key] for key in ("out", "logits") if key in outputs), outputs)
    elif not isinstance(outputs, Tensor) and hasattr(outputs, "logits"):
        outputs = outputs.logits
    elif isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[0]
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"the network returned {type(outputs).__name__}, expected a tensor of logits, a dict "
            'with "out" or "logits", or a tuple that starts with the logits'
        )
    return outputs


def build_external(
    name: str,
    task: Task,
    classes: int,
    norm: Norm,
    in_channels: int = 3,
    size: tuple[int, int] = (64, 64),
    pretrained: bool = False,
    seed: int = 0,
) -> ExternalNetwork:
    """Build a network of another library, and convert it to AGC with norm "agc".

    With pretrained weights the conversion keeps the function of the network (init="bn"); otherwise
    it initializes the network for training from scratch.

    Args:
        name: timm:NAME, smp:ARCHITECTURE/ENCODER, torchvision:NAME, or module:function, which is
            called with the keywords `classes` and `in_channels`.
        task: "segmentation" or "classification".
        classes: Number of classes.
        norm: "agc" or "bn".
        in_channels: Channels of the images.
        size: Height and width of the images, to follow the data flow and to test the outputs.
        pretrained: Start from the library's pretrained weights.
        seed: Seed for the initialization.

    Raises:
        ValueError: The library or the network is unknown, or its outputs have another shape.
    """
    if norm not in NORMS:
        raise ValueError(f"{name} supports the norms {' and '.join(NORMS)}, got {norm}")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        network = _create(name, classes, in_channels, pretrained)
        example = torch.randn(2, in_channels, *_padded(size, task))
        if norm == "agc":
            if not any(isinstance(module, _BatchNorm) for module in network.modules()):
                raise ValueError(
                    f"{name} has no BatchNorm to convert: train it as it is with --norm bn"
                )
            generator = torch.Generator().manual_seed(seed)
            network.eval()  # the example must not change statistics
            network = to_agc(
                network,
                example=example,
                init="bn" if pretrained else "scratch",
                generator=generator,
            )
        model = ExternalNetwork(network, task, in_channels)
        _check_outputs(name, model, example[:1], classes)
    return model.train()


def _padded(size: tuple[int, int], task: Task) -> tuple[int, int]:
    if task == "classification":
        return size
    return (size[0] + -size[0] % PAD_MULTIPLE, size[1] + -size[1] % PAD_MULTIPLE)


def _check_outputs(name: str, model: ExternalNetwork, example: Tensor, classes: int) -> None:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = tuple(model(example).shape)
    model.train(was_training)
    expected = (1, classes, *(example.shape[2:] if model.task == "segmentation" else ()))
    if found != expected:
        raise ValueError(
            f"{name} returns logits of shape {found} for {model.task} of images of shape "
            f"{tuple(example.shape)}, expected {expected}"
        )


def _create(name: str, classes: int, in_channels: int, pretrained: bool) -> nn.Module:
    origin, _, own = name.partition(":")
    makers: dict[str, Callable[[str, int, int, bool], nn.Module]] = {
        "timm": _create_timm,
        "smp": _create_smp,
        "torchvision": _create_torchvision,
    }
    if origin in makers:
        return makers[origin](own, classes, in_channels, pretrained)
    if pretrained:
        raise ValueError(f"--pretrained is for timm, smp and torchvision: {name} loads its own")
    return _create_own(origin, own, classes, in_channels)


def _library(origin: str) -> Any:
    package = PACKAGES[origin]
    install = f"pip install {package.replace('_', '-')}"
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            message = f"{origin}: needs {package}, which is not installed: {install}"
            raise ValueError(message) from None
        advice = f"{install} --upgrade"
        if "torchvision::" in str(error):  # its operators were built for another torch
            advice = "install the torchvision that belongs to this build of torch"
        raise ValueError(
            f"{origin}: needs {package}, which cannot be imported ({error}): {advice}"
        ) from error


def _create_timm(own: str, classes: int, in_channels: int, pretrained: bool) -> nn.Module:
    timm = _library("timm")
    if not timm.is_model(own.split(".")[0]):
        similar = timm.list_models(f"*{own}*")[:5]
        advice = f": did you mean {', '.join(similar)}?" if similar else ""
        raise ValueError(f"timm has no model {own!r}{advice}")
    return timm.create_model(own, pretrained, num_classes=classes, in_chans=in_channels)


def _create_smp(own: str, classes: int, in_channels: int, pretrained: bool) -> nn.Module:
    smp = _library("smp")
    architecture, _, encoder = own.partition("/")
    known = sorted(n for n in vars(smp) if isinstance(getattr(smp, n), type))
    if architecture not in known:
        raise ValueError(
            f"segmentation_models_pytorch has no {architecture!r}: choose one of {', '.join(known)}"
        )
    weights = "imagenet" if pretrained else None
    return getattr(smp, architecture)(
        encoder_name=encoder or "resnet34",
        encoder_weights=weights,
        in_channels=in_channels,
        classes=classes,
    )


def _create_torchvision(own: str, classes: int, in_channels: int, pretrained: bool) -> nn.Module:
    models = _library("torchvision").models
    if own not in models.list_models():
        raise ValueError(f"torchvision has no model {own!r}: see torchvision.models.list_models()")
    if in_channels != 3:
        raise ValueError(f"torchvision:{own} needs images with 3 channels, got {in_channels}")
    flags: dict[str, Any] = {"weights": None, "num_classes": classes}
    if own.startswith(_SEGMENTATION):
        flags["weights_backbone"] = None  # or torchvision would download it
    network = models.get_model(own, **flags)
    if pretrained:
        weights = models.get_model_weights(own).DEFAULT.get_state_dict(progress=False)
        state = network.state_dict()
        # The last layer has another number of classes.
        fitting = {k: v for k, v in weights.items() if k in state and v.shape == state[k].shape}
        network.load_state_dict({**state, **fitting})
    return network


def _create_own(module: str, function: str, classes: int, in_channels: int) -> nn.Module:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # `python -m` does so, an installed command does not
    try:
        maker = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise
        raise ValueError(
            f"no module {module!r} in {here} or among the installed packages: expected timm:, "
            "smp:, torchvision: or module:function"
        ) from None
    if not callable(maker):
        raise ValueError(f"module {module!r} has no function {function!r}")
    network = maker(classes=classes, in_channels=in_channels)
    if not isinstance(network, nn.Module):
        raise ValueError(
            f"{module}:{function} returned {type(network).__name__}, expected a torch.nn.Module"
        )
    return network
