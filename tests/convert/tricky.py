"""Small models with structures that mislead a converter, one per case."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model and its example.

    Attributes:
        make: Builds the model.
        example: Input of the model, a tuple of inputs, or a dict of keyword arguments.
        fused: BatchNorms that must still be fused with their convolution when an example is given.
        skipped: BatchNorms that stay, as the report must say.
        run: Runs the model and returns everything that a user can observe; default: its output.
        warns: Whether the conversion warns.
    """

    make: Callable[[], nn.Module]
    example: Any
    fused: int = 0
    skipped: int = 0
    run: Callable[[nn.Module], Any] | None = None
    warns: bool = False


CASES: dict[str, Case] = {}


def image() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def case(example: Callable[[], Any] = image, **expected: Any) -> Callable[[Any], Any]:
    """Register a function that builds a model."""

    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        CASES[make.__name__] = Case(make, example(), **expected)
        return make

    return register


class Triple(nn.Module):
    """Convolution, BatchNorm, ReLU and a head; subclasses call them in tricky ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.act = nn.ReLU()
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.bn(self.conv(x))))


def forward(example: Callable[[], Any] = image, **expected: Any) -> Callable[[Any], Any]:
    """Register a forward of the layers of Triple."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        kind = type(function.__name__.title().replace("_", ""), (Triple,), {"forward": function})
        CASES[function.__name__] = Case(kind, example(), **expected)
        return function

    return register
