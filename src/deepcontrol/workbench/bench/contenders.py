"""Build the networks to compare, and check AGC's loss and gradients against fp64.

All peers are stock PyTorch, except FRN and EvoNorm-S0, which are timm's if it is installed and the
workbench's otherwise. This library's SegNet stores its pooling indices as bytes, which is not
part of AGC, so the peers get PyTorch's pooling instead. `bn-byte-pool` is BatchNorm with this
library's pooling: it separates the effect of the pooling from the effect of AGC.
"""

import contextlib
import copy
import importlib.util
import os
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...nn import AGCConv2d, AGCConv3d, he_init_
from ...ops import native
from ..models import NnUNet3d, Norm, ResNet50, SegNet, UNet3d
from ..models.norms import EvoNorm2dS0, FilterResponseNorm2d
from ..models.segmentation import BytePool, DecoderStage, EncoderStage
from .cases import ONLY_2D, QUICK, Case

CLASSES = {"segnet": 19, "resnet50": 1000, "unet3d": 3, "nnunet": 3, "nnunet-res": 3}
CHANNELS = {"segnet": 3, "resnet50": 3, "unet3d": 1, "nnunet": 1, "nnunet-res": 1}
BYTE_POOLING = ("agc", "bn-byte-pool")

TOLERANCE = 1e-3  # relative error of the loss and of the gradients
ATTEMPTS = 3
PARAMETER_KINDS = ("weight", "gain", "bias", "mean_scale")


def build(group: str, contender: str, width: float = 1.0) -> nn.Module:
    """Build the network of a group with a contender's normalization."""
    norm = cast(Norm, {"one-liner": "agc", "bn-byte-pool": "bn"}.get(contender, contender))
    model: nn.Module
    if group == "segnet":
        model = he_init_(SegNet(CLASSES[group], width, norm))
    elif group == "resnet50":
        model = ResNet50(CLASSES[group], norm)
    elif group == "unet3d":
        model = UNet3d(CHANNELS[group], CLASSES[group], width, norm)
    elif group in ("nnunet", "nnunet-res"):
        residual = group == "nnunet-res"
        model = NnUNet3d(CHANNELS[group], CLASSES[group], width, norm, residual)
    else:
        raise ValueError(f"no network is called {group!r}; choose from {', '.join(CLASSES)}")
    if contender == "one-liner":
        to_plain_pytorch_(model)
    if contender not in BYTE_POOLING:
        stock_pooling_(model)
    if layers_source(contender) == "timm":
        use_timm_norms_(model)
    return model


def layers_source(contender: str, engine: str = "graph") -> str:
    """Return the library of a contender's norm: torch, timm or deepcontrol.

    In eager mode AGC may run in the compiled helper (ops/native), which is named too.
    """
    if contender == "agc" and engine == "eager" and native.why_python() is None:
        return "deepcontrol, C++ helper"
    if contender in ONLY_2D:
        return "timm" if importlib.util.find_spec("timm") else "deepcontrol"
    return "deepcontrol" if contender == "agc" else "torch"


def use_timm_norms_(model: nn.Module) -> nn.Module:
    """Replace FRN and EvoNorm-S0 of the workbench by timm's, in place."""
    import timm.layers

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FilterResponseNorm2d):
                activation = child.threshold is not None
                norm = timm.layers.FilterResponseNormTlu2d(len(child.weight), activation, child.eps)
            elif isinstance(child, EvoNorm2dS0):
                activation = child.v is not None
                norm = timm.layers.EvoNorm2dS0(
                    len(child.weight), child.groups, apply_act=activation
                )
            else:
                continue
            setattr(parent, name, norm)
    return model


def stock_pooling_(model: nn.Module) -> nn.Module:
    """Replace a SegNet's pooling and unpooling by PyTorch's, in place."""
    for module in model.modules():
        if isinstance(module, EncoderStage):
            module.pool = nn.MaxPool2d(2, return_indices=True)
        elif isinstance(module, DecoderStage):
            module.unpool = nn.MaxUnpool2d(2)  # type: ignore[assignment]
    return model


def to_plain_pytorch_(model: nn.Module) -> nn.Module:
    """Replace AGC neurons by Eq. 1 in plain PyTorch in place, copying parameters."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (AGCConv2d, AGCConv3d)):
                setattr(parent, name, OneLiner(child))
        if isinstance(parent, EncoderStage):
            parent.pool = BytePool()  # the replaced neuron pooled its own output
    return model


class OneLiner(nn.Module):
    """Eq. 1 in one line of plain PyTorch, after a convolution."""

    def __init__(self, neuron: AGCConv2d | AGCConv3d) -> None:
        super().__init__()
        self.dims = (2, 3) if isinstance(neuron, AGCConv2d) else (2, 3, 4)
        convolution = nn.Conv2d if isinstance(neuron, AGCConv2d) else nn.Conv3d
        shape = (neuron.in_channels, neuron.out_channels, neuron.kernel_size)
        self.conv = convolution(*shape, neuron.stride, neuron.padding, bias=False)  # type: ignore[arg-type]
        parameters = (neuron.gain, neuron.mean_scale, neuron.bias)
        with torch.no_grad():
            self.conv.weight.copy_(neuron.weight)
            broadcast = [p.clone().reshape(-1, *(1 for _ in self.dims)) for p in parameters]
        self.w, self.l, self.b = (nn.Parameter(p) for p in broadcast)
        self.act = nn.ReLU(inplace=True) if neuron.activation == "relu" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        return self.act(self.w * (z - self.l * z.mean(self.dims, keepdim=True)) + self.b)


def random_batch(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets of a case's shape."""
    inputs = torch.randn(case.batch, CHANNELS[case.group], *case.size, device=device)
    positions = () if case.group == "resnet50" else case.size
    targets = torch.randint(CLASSES[case.group], (case.batch, *positions), device=device)
    return inputs, targets


def use_layout(model: nn.Module, inputs: Tensor, layout: str = "channels_last") -> Tensor:
    """Move a model and its inputs to a memory format, and return the inputs."""
    memory_format = torch.contiguous_format
    if layout == "channels_last":
        memory_format = torch.channels_last if inputs.dim() == 4 else torch.channels_last_3d
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
    return inputs.contiguous(memory_format=memory_format)


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Set TF32 by dtype and enable cuDNN's autotuning; restore both afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = dtype != "fp32"
    cudnn.benchmark = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


class CheckFailedError(ValueError):
    """AGC's loss or gradients differ from the reference."""


def check_network(group: str, device: str, width: float = 1.0) -> float:
    """Compare AGC's kernels in fp32 with the plain formulas in fp64.

    Compares the loss and the gradients of each kind of parameter over all layers, on a small batch
    of small images. Where rounding flips a single ReLU of a small deep map, a gradient may be off
    by 1e-3 without a bug. That depends on the batch, so up to three batches are tried; a bug shows
    in all of them.

    Returns:
        The largest relative error.

    Raises:
        CheckFailedError: If the error exceeds the tolerance on every batch.
    """
    for seed in range(ATTEMPTS):
        errors = relative_errors(group, device, width, seed)
        worst = max(errors, key=lambda name: errors[name])
        if all(error < TOLERANCE for error in errors.values()):  # False for NaN
            return errors[worst]
    raise CheckFailedError(
        f"{group} with AGC is wrong: {worst} differs from the plain formulas in fp64 by "
        f"{errors[worst]:.2e} (relative); at most {TOLERANCE:g} is allowed. Nothing was timed. "
        "Set DEEPCONTROL_KERNELS=off to measure without the kernels."
    )


def relative_errors(group: str, device: str, width: float, seed: int) -> dict[str, float]:
    """Return the relative error of the loss and of each kind of gradient."""
    torch.manual_seed(seed)
    model = build(group, "agc", width).to(device)
    randomize_controls_(model)
    exact = copy.deepcopy(model).double()
    inputs, targets = random_batch(Case(group, "agc", "", 2, QUICK[group].size, ""), device)
    if device == "cuda":
        inputs = use_layout(model, inputs)
    with precision("fp32"):
        found = loss_and_gradients(model, inputs, targets)
        with kernels_off():
            expected = loss_and_gradients(exact, inputs.double(), targets)
    return {name: relative_error(found[name], expected[name]) for name in expected}


def randomize_controls_(model: nn.Module) -> None:
    """Move gain, mean_scale and bias away from 0 and 1, which could hide a bug."""
    for module in model.modules():
        if isinstance(module, (AGCConv2d, AGCConv3d)):
            nn.init.uniform_(module.gain, 0.5, 1.0)
            nn.init.uniform_(module.mean_scale, 0.5, 1.0)
            nn.init.normal_(module.bias, 0.0, 0.1)


def loss_and_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the loss, and the gradients by kind of parameter."""
    loss = functional.cross_entropy(model(inputs), targets)
    loss.backward()
    found = {"the loss": loss.detach().reshape(1)}
    for kind in PARAMETER_KINDS:
        gradients = [
            p.grad.flatten()
            for name, p in model.named_parameters()
            if p.grad is not None and name.split(".")[-1] == kind
        ]
        found[f"the gradient of all `{kind}`"] = torch.cat(gradients)
    return found


def relative_error(a: Tensor, exact: Tensor) -> float:
    return float((a.double() - exact).norm() / exact.norm())


@contextlib.contextmanager
def kernels_off() -> Iterator[None]:
    """Disable the kernels temporarily. The ops read the variable at each call."""
    name = "DEEPCONTROL_KERNELS"
    before = os.environ.get(name)
    os.environ[name] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
