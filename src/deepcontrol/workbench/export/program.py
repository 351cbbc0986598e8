"""Trace a network with torch.export, with dynamic batch size, height and width."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..models import ClassNet
from ..sizes import Size

INPUT = "images"
AXES = {0: "batch", 2: "height", 3: "width"}  # dynamic axes
Shape = tuple[int, int, int, int]  # (N, 3, H, W)
Runner = Callable[[Tensor], tuple[Tensor, ...]]  # images (N, 3, H, W) to outputs


@dataclass(frozen=True)
class Sizes:
    """Image sizes that an exported network accepts.

    The deepest feature map must have at least two rows and columns, because torch.export treats a
    size of 1 as a constant.
    """

    smallest: int  # smallest height and width, in pixels
    step: int  # height and width are multiples of it
    fixed: Size | None = None  # the only size, with batch size 1; None for dynamic sizes

    @property
    def traced(self) -> Shape:
        """Shape of the example input. Its sizes differ, so that tracing does not equate them."""
        if self.fixed is not None:
            return (1, 3, *self.fixed)
        return (2, 3, 3 * self.smallest // 2, 2 * self.smallest)

    @property
    def checked(self) -> list[Shape]:
        """Shapes for the check: not the traced one, and with odd sides if allowed."""
        if self.fixed is not None:
            return [self.traced]
        side, step = self.smallest, self.step
        return [(1, 3, side, side), (3, 3, side + (step if step > 1 else 13), side + step)]

    def accept(self, size: Size) -> bool:
        """Return whether the exported network accepts images of this size."""
        return all(side >= self.smallest and side % self.step == 0 for side in size)

    def __str__(self) -> str:
        multiples = f" in multiples of {self.step}" if self.step > 1 else ""
        return f"sides of at least {self.smallest} pixels{multiples}"

    def dynamic_shapes(self) -> dict[int, Any] | None:
        """Return the dynamic shapes for torch.export; None if the size is fixed."""
        if self.fixed is not None:
            return None
        smallest = self.smallest // self.step
        batch, *sides = (Dim(name, min=smallest if axis else 1) for axis, name in AXES.items())
        height, width = (self.step * side if self.step > 1 else side for side in sides)
        return {0: batch, 2: height, 3: width}


def sizes_of(model: nn.Module, fixed: Size | None = None) -> Sizes:
    """Return the sizes that a network can be exported for.

    ClassNet accepts only multiples of its stride, because its padding is constant in the graph.

    Args:
        model: SegNet or ClassNet.
        fixed: The only size to support, for targets without dynamic sizes.

    Raises:
        ValueError: The network does not accept the fixed size.
    """
    stride = int(model.total_stride)  # type: ignore[arg-type]
    sizes = Sizes(2 * stride, stride if isinstance(model, ClassNet) else 1, fixed)
    if fixed is not None and not sizes.accept(fixed):
        raise ValueError(f"--size: expected {sizes}, got {fixed[0]}x{fixed[1]}")
    return sizes


def trace(model: nn.Module, sizes: Sizes) -> ExportedProgram:
    """Trace a network to a graph of torch ops, with its parameters."""
    if isinstance(model, ClassNet):
        model = _TupleOutputs(model)
    with torch.no_grad(), ignore_torch_warnings():
        return torch.export.export(
            model, (torch.randn(sizes.traced),), dynamic_shapes=(sizes.dynamic_shapes(),)
        )


class _TupleOutputs(nn.Module):
    """ClassNet with a plain tuple of outputs: loading the file must not need this package."""

    def __init__(self, network: ClassNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.network(images))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Return the outputs of SegNet (one) or ClassNet (two) as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


@contextmanager
def ignore_torch_warnings() -> Iterator[None]:
    """Ignore deprecation warnings of torch's exporters about their own code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
