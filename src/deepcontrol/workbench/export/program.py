"""A network as a graph of torch's own ops, with batch, height and width left open."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..models import ClassNet
from ..sizes import Size

INPUT = "images"
AXES = {0: "batch", 2: "height", 3: "width"}  # which are left open
Shape = tuple[int, int, int, int]  # (N, 3, H, W)


@dataclass(frozen=True)
class Sizes:
    """The images that an exported network takes: all from a smallest size on, or those of one.

    The smallest leaves at least two rows and columns of the deepest map, because torch.export
    takes a size of 1 for a constant.
    """

    smallest: int  # pixels a side
    step: int  # sides are multiples of it
    fixed: Size | None = None  # then the batch is 1

    @property
    def traced(self) -> Shape:
        """The shape that the graph is traced with: no two of its sizes are the same."""
        if self.fixed is not None:
            return (1, 3, *self.fixed)
        return (2, 3, 3 * self.smallest // 2, 2 * self.smallest)

    @property
    def checked(self) -> list[Shape]:
        """Shapes to try the result with: other ones, with odd sides where those are allowed."""
        if self.fixed is not None:
            return [self.traced]
        side, step = self.smallest, self.step
        return [(1, 3, side, side), (3, 3, side + (step if step > 1 else 13), side + step)]

    def take(self, size: Size) -> bool:
        """Whether images of that size can be run."""
        return all(side >= self.smallest and side % self.step == 0 for side in size)

    def __str__(self) -> str:
        multiples = f" in multiples of {self.step}" if self.step > 1 else ""
        return f"sides of at least {self.smallest} pixels{multiples}"

    def dynamic_shapes(self) -> dict[int, Any] | None:
        """As torch.export wants them; None if nothing is left open."""
        if self.fixed is not None:
            return None
        smallest = self.smallest // self.step
        batch, *sides = (Dim(name, min=smallest if axis else 1) for axis, name in AXES.items())
        height, width = (self.step * side if self.step > 1 else side for side in sides)
        return {0: batch, 2: height, 3: width}


def sizes_of(model: nn.Module, fixed: Size | None = None) -> Sizes:
    """The sizes that a network can be exported for; ValueError if the fixed one is none of them.

    ClassNet pads its images to a multiple, and by how much must be known when it is traced.
    """
    unit = int(model.total_stride)  # type: ignore[arg-type]
    sizes = Sizes(2 * unit, unit if isinstance(model, ClassNet) else 1, fixed)
    if fixed is not None and not sizes.take(fixed):
        raise ValueError(f"--size: expected {sizes}, got {fixed[0]}x{fixed[1]}")
    return sizes


def trace(model: nn.Module, sizes: Sizes) -> ExportedProgram:
    """The network's graph, with its parameters."""
    if isinstance(model, ClassNet):
        model = _Plain(model)
    with torch.no_grad(), torch_warnings_ignored():
        return torch.export.export(
            model, (torch.randn(sizes.traced),), dynamic_shapes=(sizes.dynamic_shapes(),)
        )


class _Plain(nn.Module):
    """ClassNet with a plain tuple of outputs: a file must not need this package to be loaded."""

    def __init__(self, network: ClassNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.network(images))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """A network's outputs: SegNet has one, ClassNet two."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


@contextmanager
def torch_warnings_ignored() -> Iterator[None]:
    """Without the warnings that exporters have for themselves: a user can do nothing about them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
