"""Find the padding of a convolution that brings a forward of its own.

Libraries subclass nn.Conv2d to pad as TensorFlow does (timm's Conv2dSame, efficientnet_pytorch's
Conv2dStaticSamePadding), or to accept empty batches. They are recognized by their results, not by
their names: a small copy of the convolution runs on inputs of several sizes, in training and in
eval mode, and its outputs must equal those of a known padding followed by torch's convolution.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..nn import AGCConv1d, AGCConv2d, AGCConv3d
from ..nn.conv import _AGCConv, padded
from ..ops.reference import conv as convolution
from .copies import copy_model, preserved_random_state

Padding = Any  # an argument of AGCConv2d: numbers, a name, or pairs

_CONVOLUTIONS: dict[int, tuple[type[_ConvNd], type[_AGCConv]]] = {
    1: (nn.Conv1d, AGCConv1d),
    2: (nn.Conv2d, AGCConv2d),
    3: (nn.Conv3d, AGCConv3d),
}
_METHODS = ("forward", "_conv_forward", "__call__")
_ZERO_PADS = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)


def known_padding(conv: nn.Module) -> Padding | None:
    """Return the padding that makes an AGCConv convolve as `conv` does; None if there is none."""
    dims = next((d for d, (plain, _) in _CONVOLUTIONS.items() if isinstance(conv, plain)), None)
    if dims is None:
        return None
    assert isinstance(conv, _ConvNd)
    plain, agc_conv = _CONVOLUTIONS[dims]
    if all(getattr(type(conv), m) is getattr(plain, m) for m in _METHODS):
        return conv.padding
    # Other children compute something that a small copy may not show, such as quantization.
    if not all(isinstance(child, (nn.Identity, *_ZERO_PADS)) for child in conv.children()):
        return None
    with torch.no_grad(), preserved_random_state():
        try:
            probe = _small_copy(conv)
            inputs = list(_inputs(conv))
            results = [probe.train(mode)(x) for mode in (True, False) for x in inputs]
            for padding in _candidates(conv):
                known = agc_conv(**_options(probe), padding=padding, device="meta")
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


def _options(conv: _ConvNd) -> dict[str, Any]:
    names = ("in_channels", "out_channels", "kernel_size", "stride", "dilation", "groups")
    return {name: getattr(conv, name) for name in (*names, "padding_mode")}


def _convolve(x: Tensor, known: _AGCConv, probe: _ConvNd) -> Tensor:
    """Convolve with the padding of `known` and the filters of `probe`."""
    x, padding = padded(known, x)
    y = convolution(x, probe.weight, known.stride, padding, known.dilation, known.groups)
    return y if probe.bias is None else y + probe.bias.reshape(-1, *(1,) * len(known.stride))


def _equal(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.allclose(a, b)
