"""Build AGC layers and replace old ones by them, wherever a model refers to them.

Libraries subclass nn.Conv2d to pad as TensorFlow does (timm's Conv2dSame, efficientnet_pytorch's
Conv2dStaticSamePadding), or to accept empty batches. They are recognized by their results, not by
their names: see `known_padding`.
"""

import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..nn import (
    AGC1d,
    AGC2d,
    AGC3d,
    AGCConv1d,
    AGCConv2d,
    AGCConv3d,
    AGCConvTranspose1d,
    AGCConvTranspose2d,
    AGCConvTranspose3d,
)
from ..nn.agc import _AGC
from ..nn.conv import _AGCConv
from ..nn.padding import padded
from ..ops.activation import ActivationName, get_activation
from ..ops.reference import conv as convolution
from .dataflow import HOOKS
from .dry_run import copy_model, preserved_random_state
from .start import AGCParameters, computes_parameter

Padding = Any  # an argument of AGCConv2d: numbers, a name, or pairs

_AGC_LAYERS: dict[int, type[_AGC]] = {1: AGC1d, 2: AGC2d, 3: AGC3d}
_CONVOLUTIONS: dict[int, tuple[type[_ConvNd], type[_AGCConv]]] = {
    1: (nn.Conv1d, AGCConv1d),
    2: (nn.Conv2d, AGCConv2d),
    3: (nn.Conv3d, AGCConv3d),
}
_TRANSPOSED: dict[int, tuple[type[_ConvTransposeNd], type[_AGCConv]]] = {
    1: (nn.ConvTranspose1d, AGCConvTranspose1d),
    2: (nn.ConvTranspose2d, AGCConvTranspose2d),
    3: (nn.ConvTranspose3d, AGCConvTranspose3d),
}
_METHODS = ("forward", "_conv_forward", "__call__")
_ZERO_PADS = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
_OWN_DICTS = ("_modules", "_parameters", "_buffers")
_MAX_ITEMS = 1000  # longer containers hold data
_MAX_DEPTH = 4
# Methods that fold BatchNorms into convolutions: ultralytics, timm, RepVGG and its successors.
_FUSERS = ("fuse", "reparameterize", "switch_to_deploy")


def make_agc_conv(
    conv: _ConvNd,
    parameters: AGCParameters,
    activation: ActivationName,
    conv_bias: Tensor | None,
    standardize: bool = False,
) -> _AGCConv:
    """Build an AGCConv or AGCConvTranspose that shares the filters of a convolution.

    A bias b of the convolution is constant over each map, and AGC leaves gamma (1 - lambda) b of
    it. That is added to beta.
    """
    kinds = _TRANSPOSED if isinstance(conv, _ConvTransposeNd) else _CONVOLUTIONS
    agc_conv = kinds[conv.weight.dim() - 2][1]
    options = conv_options(conv) | {"padding": known_padding(conv)}
    # On meta, because all parameters are assigned below.
    neuron = agc_conv(
        **options, activation=activation, weight_standardization=standardize, device="meta"
    )
    bias = parameters.bias
    if conv_bias is not None:
        left = parameters.gain * (1 - parameters.mean_scale) * conv_bias.to(parameters.gain)
        bias = nn.Parameter((bias + left).detach(), bias.requires_grad)
    assert isinstance(conv.weight, nn.Parameter)
    neuron.weight = conv.weight
    neuron.bias, neuron.gain, neuron.mean_scale = bias, parameters.gain, parameters.mean_scale
    return neuron


def set_consumer_(neuron: _AGCConv, consumer: _AGCConv) -> None:
    """Let a neuron store the sums of its maps if its consumer can use them.

    A 3x3 neuron of stride 1 and padding 1 derives its mean from the sums of its input, and reads
    its convolution's output once less (ops/gain_conv.py). This is a hint. It changes no result, and
    the neuron decides by the size of its maps whether it stores sums.
    """
    ones, same = (1, 1), ((1, 1), "same")
    if (
        isinstance(neuron, AGCConv2d)
        and isinstance(consumer, AGCConv2d)
        and (consumer.kernel_size, consumer.stride, consumer.dilation) == ((3, 3), ones, ones)
        and consumer.padding in same
        and (consumer.groups, consumer.padding_mode) == (1, "zeros")
        and all(get_activation(m.activation).needs != "input" for m in (neuron, consumer))
    ):
        neuron.consumer_ratio = consumer.out_channels / consumer.in_channels


def make_agc_layer(dims: int, parameters: AGCParameters) -> _AGC:
    """Build AGC1d, AGC2d or AGC3d with the given parameters."""
    layer = _AGC_LAYERS[dims](len(parameters.gain), device="meta")
    layer.weight, layer.bias = parameters.gain, parameters.bias
    layer.mean_scale = parameters.mean_scale
    return layer


def parameters_of(layer: _AGC, like: Tensor) -> AGCParameters:
    """Return the parameters of an AGC layer, with 1, 0 and 1 for missing ones.

    Args:
        layer: The layer.
        like: Has the dtype and device of the parameters if the layer has none.
    """
    given = (layer.weight, layer.bias, layer.mean_scale)
    like = next((a for a in given if a is not None), like)

    def parameter(value: Tensor | None, default: float) -> nn.Parameter:
        if value is None:
            value = like.new_full((layer.num_features,), default)
        # A parametrized layer computes its parameters.
        return value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach())

    return AGCParameters(*map(parameter, given, (1.0, 0.0, 1.0)))


def conv_options(conv: _ConvNd) -> dict[str, Any]:
    """Return the constructor arguments for another convolution of the same geometry."""
    names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"]
    if isinstance(conv, _ConvTransposeNd):
        names.append("output_padding")
    return {name: getattr(conv, name) for name in (*names, "groups", "padding_mode")}


def known_padding(conv: nn.Module) -> Padding | None:
    """Return the padding with which an AGCConv convolves as `conv` does, or None.

    If the class of `conv` overrides forward, a small copy of it runs on inputs of several sizes, in
    training and in eval mode. Its outputs must equal those of a known padding followed by torch's
    convolution.
    """
    pairs = (*_CONVOLUTIONS.values(), *_TRANSPOSED.values())
    found = next((pair for pair in pairs if isinstance(conv, pair[0])), None)
    if found is None:
        return None
    assert isinstance(conv, _ConvNd)
    plain, agc_conv = found
    if all(getattr(type(conv), m) is getattr(plain, m) for m in _METHODS):
        return conv.padding
    if isinstance(conv, _ConvTransposeNd):
        return None
    # Other children compute something that a small copy may not show, such as quantization.
    if not all(isinstance(child, (nn.Identity, *_ZERO_PADS)) for child in conv.children()):
        return None
    with torch.no_grad(), preserved_random_state():
        try:
            probe = _small_copy(conv)
            inputs = list(_inputs(conv))
            results = [probe.train(mode)(x) for mode in (True, False) for x in inputs]
            for padding in _candidates(conv):
                known = agc_conv(**(conv_options(probe) | {"padding": padding}), device="meta")
                expected = [_convolve(x, known, probe) for x in (*inputs, *inputs)]
                if all(map(_equal, results, expected)):
                    return padding
        except Exception:  # the code of a library can raise anything
            return None
    return None


def _candidates(conv: _ConvNd) -> Iterator[Padding]:
    yield conv.padding
    yield "same"
    pads = [child for child in conv.children() if isinstance(child, _ZERO_PADS)]
    if len(pads) == 1 and pads[0].value == 0 and isinstance(conv.padding, tuple):
        sides = list(map(int, pads[0].padding))  # the last dimension first
        pairs = list(zip(sides[::2], sides[1::2], strict=True))[::-1]
        both = tuple((a + own, b + own) for (a, b), own in zip(pairs, conv.padding, strict=True))
        yield tuple(a for a, _ in both) if all(a == b for a, b in both) else both


def _small_copy(conv: _ConvNd) -> Any:
    """Return a copy with two channels and random filters, in fp64 on the CPU."""
    probe: Any = copy_model(conv).model
    groups = 1 if conv.groups == 1 else 2
    probe.in_channels, probe.out_channels, probe.groups = 2, 2, groups
    shape = (2, 2 // groups, *conv.kernel_size)
    probe.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    if conv.bias is not None:
        probe.bias = nn.Parameter(torch.randn(2, dtype=torch.float64))
    return probe


def _inputs(conv: _ConvNd) -> Iterator[Tensor]:
    """Yield inputs of sizes that the stride divides, and that it does not."""
    geometry = list(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True))
    for more in range(3):
        sizes = [(k - 1) * d + 1 + 2 * s + more + i for i, (k, s, d) in enumerate(geometry)]
        yield torch.randn(1, 2, *sizes, dtype=torch.float64)


def _convolve(x: Tensor, known: _AGCConv, probe: _ConvNd) -> Tensor:
    """Convolve with the padding of `known` and the filters of `probe`."""
    x, padding = padded(known, x)
    y = convolution(x, probe.weight, known.stride, padding, known.dilation, known.groups)
    return y if probe.bias is None else y + probe.bias.reshape(-1, *(1,) * len(known.stride))


def _equal(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.allclose(a, b)


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules wherever they are registered or referred to, in place.

    Besides the registered children these are references in attributes: lists, dicts, tuples,
    sets, plain objects, bound methods, partial functions, and closures and defaults of functions.
    Forward and backward hooks move to the new module, where their handles still remove them.

    Returns:
        The model, or its replacement if the model itself is replaced.
    """
    if not replacements:
        return model
    references = _References(replacements)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]
        for name, value in list(vars(parent).items()):
            if name not in _OWN_DICTS:
                replaced = references.replaced(value)
                if replaced is not value:
                    vars(parent)[name] = replaced
    for old, new in replacements.items():
        move_hooks(old, new)
    return replacements.get(model, model)


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give a module the hooks of the module that it replaces."""
    for name in HOOKS:
        hooks = getattr(old, name)
        for key in [k for k, hook in hooks.items() if computes_parameter(hook)]:
            del hooks[key]
        if hooks:
            # The dicts themselves, because the handles of the hooks refer to them.
            setattr(new, name, hooks)
            for more in (f"{name}_with_kwargs", f"{name}_always_called"):
                if hasattr(old, more):
                    setattr(new, more, getattr(old, more))


def disable_fusers(model: nn.Module, layers: Iterable[nn.Module]) -> list[str]:
    """Make methods that fold BatchNorms leave modules with AGC layers as they are.

    Such a method reads the running statistics of the BatchNorms and builds convolutions with a
    constant bias. AGC has no statistics, and its mean depends on the sample. The method is replaced
    on the instance by one that returns the module, as callers expect.

    Args:
        model: The converted model.
        layers: AGC layers of the model.

    Returns:
        The names of the methods.
    """
    converted = set(layers)
    disabled = []
    for name, module in model.named_modules():
        fusers = [fuser for fuser in _FUSERS if _is_fuser(getattr(type(module), fuser, None))]
        if fusers and not converted.isdisjoint(module.modules()):
            for fuser in fusers:
                setattr(module, fuser, functools.partial(_unchanged, module))
                disabled.append(f"{name}.{fuser}".lstrip("."))
    return disabled


def _is_fuser(method: Any) -> bool:
    """Return whether a method can be called without arguments, as fusers are."""
    if not inspect.isfunction(method):
        return False
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters
    )


def _unchanged(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Return a module that is not fused."""
    return module


class _References:
    """Replace modules inside of attributes, in place if possible."""

    def __init__(self, replacements: Mapping[nn.Module, nn.Module]) -> None:
        self.replacements = replacements
        self.seen = set[int]()

    def replaced(self, value: Any, depth: int = 0) -> Any:
        """Return the value, or its replacement."""
        if isinstance(value, nn.Module):
            return self.replacements.get(value, value)
        if isinstance(value, types.MethodType):
            return self._method(value)
        if isinstance(value, functools.partial):
            return self._partial(value, depth)
        if isinstance(value, tuple):
            return self._tuple(value, depth)
        if id(value) not in self.seen and depth < _MAX_DEPTH:
            self.seen.add(id(value))
            self._replace_inside(value, depth + 1)
        return value

    def _method(self, method: types.MethodType) -> Any:
        new = self.replaced(method.__self__)
        return method if new is method.__self__ else getattr(new, method.__func__.__name__)

    def _partial(self, value: Any, depth: int) -> Any:
        old = (value.func, value.args, value.keywords)
        function, args, keywords = (self.replaced(a, depth) for a in old)
        if (function, args) == old[:2]:
            return value  # keywords are replaced in place
        return functools.partial(function, *args, **keywords)

    def _tuple(self, value: tuple[Any, ...], depth: int) -> Any:
        if len(value) > _MAX_ITEMS:
            return value
        items = [self.replaced(item, depth + 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    def _replace_inside(self, value: Any, depth: int) -> None:
        if isinstance(value, (list, dict)):
            if len(value) <= _MAX_ITEMS:
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in list(pairs):
                    new = self.replaced(item, depth)
                    if new is not item:
                        value[key] = new
        elif isinstance(value, set):
            if any(isinstance(item, nn.Module) for item in value):
                items = [self.replaced(item, depth) for item in value]
                value.clear()
                value.update(items)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                try:
                    content = cell.cell_contents
                except ValueError:  # an empty cell
                    continue
                new = self.replaced(content, depth)
                if new is not content:
                    cell.cell_contents = new
            defaults = self.replaced(value.__defaults__, depth)
            if defaults is not value.__defaults__:
                value.__defaults__ = defaults
            self.replaced(value.__kwdefaults__, depth)
        elif not isinstance(value, (type, types.ModuleType, Tensor)) and hasattr(value, "__dict__"):
            self.replaced(vars(value), depth)
