"""Behavior that the AGC layers share: one torch.fx node per layer, a warning on 1x1 maps."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy


class FxLeaf:
    """Mixin that makes a module a leaf of every torch.fx graph: one `call_module` node.

    The forward of an AGC layer reads the shape and dtype of its input, which a Proxy does not
    have, so torch.fx cannot trace through it. Tracers treat only the modules of `torch.nn` as
    leaves, and users cannot always choose the tracer (torchvision's and timm's feature extraction
    bring their own). A layer that is called with a Proxy therefore records itself in the graph.

    List the mixin before the nn.Module base: hooks and the forward of subclasses then run inside
    the node and are not traced a second time.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Proxy):
            tracer: Any = first.tracer

            def create_node(*args: Any, **kwargs: Any) -> Any:
                return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)

            # Through call_module, where some tracers (torchvision's) keep the current module path.
            return tracer.call_module(self, create_node, args, kwargs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def warn_if_single_position(module: nn.Module, positions: int) -> None:
    """Warn when AGC runs on 1x1 maps, once per module and only in training mode.

    The mean of a one-position map is the value itself: with lambda = 1 the output is beta.
    """
    if positions != 1 or not module.training or torch.compiler.is_compiling():
        return
    if getattr(module, "_met_single_position", False):
        return
    lam = module.mean_scale
    # Reading lambda synchronizes with the device, so it is read only the first time. A meta tensor
    # has no value to read, and neither has a batched one (vmap with functional_call).
    if lam is not None and (lam.is_meta or not isinstance(lam, nn.Parameter)):
        return
    module._met_single_position = True  # type: ignore[assignment]
    if lam is None or bool((lam == 1).any()):
        warnings.warn(
            f"{type(module).__name__} got maps of one position: the mean is the value itself, so "
            "with mean_scale (lambda) = 1 the output is the bias and no gradient passes. "
            "Expected maps of two or more positions. Apply the layer before the pooling, or start "
            "it at lambda 0: torch.nn.init.zeros_(layer.mean_scale).",
            stacklevel=6,  # skip this function, forward, nn.Module's two frames and FxLeaf
        )
