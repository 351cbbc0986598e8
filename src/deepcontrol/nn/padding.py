"""Padding of convolutions that torch lacks: strided "same", and other sides."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..ops.neuron import Geometry


class FlexiblePadding:
    """Mixin for "same" padding with a stride, and for different padding on each side.

    torch has neither. "same" pads with zeros so that the output has ceil(size / stride) positions,
    the odd zero at the end, as in TensorFlow. List the mixin before the nn.Module base.
    """

    stride: tuple[int, ...]
    padding: Any
    _reversed_padding_repeated_twice: list[int]

    def __init__(self, *args: Any, stride: Any = 1, padding: Any = 0, **kwargs: Any) -> None:
        sides = _tuple(padding)
        pairs = any(isinstance(side, (tuple, list)) for side in sides)
        strided_same = padding == "same" and set(_tuple(stride)) != {1}
        torch_padding = 0 if pairs or strided_same else padding
        super().__init__(*args, stride=stride, padding=torch_padding, **kwargs)  # type: ignore[call-arg]
        if strided_same:
            self.padding = padding
        if pairs:
            self.padding = tuple(map(_tuple, sides))
            if len(sides) != len(self.stride) or any(len(pair) != 2 for pair in self.padding):
                raise ValueError(
                    f"expected one (before, after) pair for each of {len(self.stride)} dimensions, "
                    f"got padding={padding}"
                )
            self._reversed_padding_repeated_twice = [p for pair in self.padding[::-1] for p in pair]

    @property
    def has_own_padding(self) -> bool:
        """Whether the padding is one that torch's convolution does not have."""
        if self.padding == "same":
            return max(self.stride) > 1
        return any(isinstance(p, tuple) for p in self.padding)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def split_padding(
    conv: _ConvNd, sizes: Sequence[int]
) -> tuple[tuple[list[int], str] | None, Geometry]:
    """Return the arguments of functional.pad, or None, and the geometry that remains.

    The convolution itself pads with zeros, by the same number on both sides.

    Args:
        sizes: Spatial sizes of the maps to pad.
    """
    both_sides = conv._reversed_padding_repeated_twice
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    strided_same = conv.padding == "same" and max(conv.stride) > 1
    if strided_same:
        both_sides = same_padding(sizes, conv.kernel_size, conv.stride, conv.dilation)
    # A branch on a computed padding would fix the size of maps in a compiled model.
    if not (strided_same and torch.compiler.is_compiling()):
        symmetric = both_sides[::2] == both_sides[1::2]  # not "same" with an even kernel, or pairs
        if mode == "constant" and symmetric:
            padding = tuple(both_sides[::-2])
            return None, Geometry(conv.stride, padding, conv.dilation, conv.groups)
    no_padding = (0,) * len(conv.stride)
    return (both_sides, mode), Geometry(conv.stride, no_padding, conv.dilation, conv.groups)


def padded(conv: _ConvNd, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Pad x as far as torch.convolution cannot; return x and the zero padding left."""
    pad, geometry = split_padding(conv, x.shape[2:])
    return x if pad is None else nn.functional.pad(x, *pad), tuple(geometry.padding)


def same_padding(
    sizes: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return "same" padding on both sides of each dimension, the last one first."""
    both_sides = []
    geometry = zip(sizes, kernel_size, stride, dilation, strict=True)
    for size, kernel, step, spacing in reversed(list(geometry)):
        last = (size - 1) // step * step + (kernel - 1) * spacing
        total = torch.sym_max(last + 1 - size, 0)
        both_sides += [total // 2, total - total // 2]
    return both_sides
