"""Behavior that AGC layers share: fx leaves, BatchNorm fusion, loading, 1x1 maps."""

import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

_LOAD_HINT = (
    "The state dict has filters without gain and mean_scale, as a model has before to_agc. Load it "
    'before the conversion: model.load_state_dict(...), then to_agc(model, init="bn"), which takes '
    "gain and bias from the trained BatchNorms. Here gain, bias and mean_scale are left unchanged."
)
_FUSERS = (fuse_conv_bn_eval.__code__, fuse_linear_bn_eval.__code__)


class FxLeaf:
    """Mixin that makes a module a leaf (`call_module`) of every torch.fx graph.

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


class BatchNormFusionGuard:
    """Mixin that makes torch's BatchNorm fusers raise where they would be wrong.

    torch.nn.utils.fusion takes an AGCConv2d for a plain nn.Conv2d and an AGCLinear for a plain
    nn.Linear: it copies the layer and assigns the fused weight and bias. List the mixin before the
    nn.Module base.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias") and sys._getframe(1).f_code in _FUSERS:
            obstacle = self._fusion_obstacle()
            if obstacle is not None:
                raise NotImplementedError(
                    f"cannot fuse a BatchNorm into {type(self).__name__} with "
                    f"activation={getattr(self, 'activation', None)!r}: {obstacle}. Leave the "
                    "BatchNorm unfused, or replace it with deepcontrol.to_agc."
                )
        super().__setattr__(name, value)

    def _fusion_obstacle(self) -> str | None:
        """Return why a BatchNorm after the layer cannot be fused into it, or None."""
        raise NotImplementedError


class LoadHint:
    """Mixin that explains a state dict of the model before its conversion.

    Such a state dict has the filter of a layer, and gain and lambda are missing. List the mixin
    before the nn.Module base.
    """

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if prefix + "weight" in state_dict and prefix + "gain" not in state_dict:
            # Not an error: load_state_dict(strict=False) may be intended.
            warnings.warn(_LOAD_HINT, stacklevel=2)
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def is_plain(layer: Any) -> bool:
    """Return whether a layer subtracts the mean and adds no noise.

    The fused paths require this.
    """
    return layer.background == "mean" and not (layer.is_noisy and layer.training)


def require_mean(model: nn.Module, name: str) -> None:
    """Raise ValueError if a layer of a model has another background than the mean.

    Args:
        name: The function that can only handle means, for the message.
    """
    for path, layer in model.named_modules():
        background = getattr(layer, "background", "mean")
        if hasattr(layer, "mean_scale") and background != "mean":
            raise ValueError(
                f"{name} supports AGC layers that subtract the mean of their map, but "
                f"{path or type(layer).__name__} has background={background!r}. Use the model as "
                "it is, or train it with background='mean'."
            )


def extras_repr(layer: Any) -> str:
    """Return a layer's background and noise for its repr, unless they are defaults."""
    background = layer.background
    shown = "" if background == "mean" else f", background={background!r}"
    return shown + (f", noise={layer.noise:g}" if layer.noise else "")


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
