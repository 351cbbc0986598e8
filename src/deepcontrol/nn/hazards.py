"""The one way to hold AGC wrong that does not raise: no map to take a mean of."""

import warnings

import torch
from torch import nn


def warn_if_single_position(module: nn.Module, positions: int) -> None:
    """Warn, once a module, if it subtracts a one-position map from itself while training."""
    if positions != 1 or not module.training or torch.compiler.is_compiling():
        return
    if getattr(module, "_met_single_position", False):
        return
    lam = module.mean_scale
    # Looking at lambda waits for the device, so it happens the first time only. A value that is
    # not there (meta) or not one value (vmapped, through functional_call) cannot be looked at.
    if lam is not None and (lam.is_meta or not isinstance(lam, nn.Parameter)):
        return
    module._met_single_position = True  # type: ignore[assignment]
    if lam is None or bool((lam == 1).any()):
        warnings.warn(
            f"{type(module).__name__} got maps of one position: the mean is the value itself, so "
            "where mean_scale (lambda) is 1 the output is just the bias and no gradient passes. "
            "Give it larger maps (before the pooling, say), or start it at lambda 0: "
            "torch.nn.init.zeros_(layer.mean_scale).",
            stacklevel=5,  # past this function, the layer's forward, and Module.__call__
        )
