"""Correctness first: no network is timed whose loss and gradients are wrong."""

import contextlib
import copy
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...nn import AGCConv2d, AGCConv3d
from .cases import QUICK, Case
from .contenders import build
from .measure import precision, random_batch

TOLERANCE = 1e-3
ATTEMPTS = 3
KINDS = ("weight", "gain", "bias", "mean_scale")


class CheckFailedError(ValueError):
    """What would have been timed does not compute what it should."""


def check_network(group: str, device: str, width: float = 1.0) -> float:
    """AGC's kernels in fp32 against the plain formulas in fp64: the largest relative error.

    Of the loss, and of the gradients of each kind of parameter over all layers. A small batch of
    small images: what is checked is the arithmetic. Where rounding turns a single ReLU of a deep
    small map on or off, a gradient may be off by 1e-3 with no mistake; that is chance, so another
    batch is tried. A mistake is there in all of them.
    """
    for seed in range(ATTEMPTS):
        errors = errors_of(group, device, width, seed)
        worst = max(errors, key=lambda name: errors[name])
        if all(error < TOLERANCE for error in errors.values()):  # which NaN is not
            return errors[worst]
    raise CheckFailedError(
        f"{group} with AGC is wrong: {worst} differs from the plain formulas in fp64 by "
        f"{errors[worst]:.2e} relative, and {TOLERANCE:g} is allowed. The bench stops."
    )


def errors_of(group: str, device: str, width: float, seed: int) -> dict[str, float]:
    """The relative error of the loss and of each kind of gradient."""
    torch.manual_seed(seed)
    model = build(group, "agc", width).to(device)
    shake_(model)
    exact = copy.deepcopy(model).double()
    inputs, targets = random_batch(Case(group, "agc", "", 2, QUICK[group].size, ""), device)
    if device == "cuda":
        layout = torch.channels_last if inputs.dim() == 4 else torch.channels_last_3d
        model.to(memory_format=layout)  # type: ignore[call-overload]
        inputs = inputs.contiguous(memory_format=layout)
    with precision("fp32"):
        ours = loss_and_gradients(model, inputs, targets)
        with kernels_off():
            theirs = loss_and_gradients(exact, inputs.double(), targets)
    return {name: relative_error(ours[name], theirs[name]) for name in theirs}


def shake_(model: nn.Module) -> None:
    """AGC's parameters away from 0 and 1, where mistakes could hide."""
    for module in model.modules():
        if isinstance(module, (AGCConv2d, AGCConv3d)):
            nn.init.uniform_(module.gain, 0.5, 1.0)
            nn.init.uniform_(module.mean_scale, 0.5, 1.0)
            nn.init.normal_(module.bias, 0.0, 0.1)


def loss_and_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    loss = functional.cross_entropy(model(inputs), targets)
    loss.backward()
    found = {"the loss": loss.detach().reshape(1)}
    for kind in KINDS:
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
    """The plain path for a while; backend.py reads the variable at each call."""
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
