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
    """The images that an exported network takes: any size from the smallest on, or a fixed one.

    Poolings leave at least two rows and columns of the deepest map, because torch.export takes a
    size of 1 for a constant.
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
        small, step = self.smallest, self.step
        odd = small + (step if step > 1 else 13)
        return [(1, 3, small, small), (3, 3, odd, small + step)]

    def open(self) -> dict[int, Any] | None:
        """What torch.export calls dynamic shapes; None if nothing is left open."""
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
    unit = int(model.unit)  # type: ignore[arg-type]
    sizes = Sizes(2 * unit, unit if isinstance(model, ClassNet) else 1, fixed)
    if fixed is not None and (min(fixed) < unit or any(side % sizes.step for side in fixed)):
        multiple = f" and multiples of {sizes.step}" if sizes.step > 1 else ""
        height, width = fixed
        raise ValueError(f"--size needs sides of at least {unit}{multiple}, got {height}x{width}")
    return sizes


def trace(model: nn.Module, sizes: Sizes) -> ExportedProgram:
    """The network's graph; it holds the model's parameters."""
    with torch.no_grad(), torch_warnings_ignored():
        return torch.export.export(
            model, (torch.randn(sizes.traced),), dynamic_shapes=(sizes.open(),)
        )


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """A network's outputs: SegNet has one, ClassNet two."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


@contextmanager
def torch_warnings_ignored() -> Iterator[None]:
    """Without the warnings that torch has for itself: a user can do nothing about them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
