"""Whether an exported file computes what the network does."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .program import Shape, Sizes, as_tuple

TOLERANCE = 1e-4  # of the largest output, or of 1 if that is larger
# Where two values of a pooling window are equal up to rounding, SegNet's decoder may put what was
# pooled at the other: outputs nearby differ although nothing is wrong. That is rare, and a fault
# is not, so each size may have so many inputs until one agrees.
ATTEMPTS = 3

Runner = Callable[[Tensor], tuple[Tensor, ...]]  # images (N, 3, H, W) to outputs


class DisagreementError(ValueError):
    """An exported file does not compute what the network does."""


@dataclass(frozen=True)
class Agreement:
    """How far a file's outputs are from the network's, on random images of some shapes."""

    difference: float  # the largest, of all shapes
    shapes: list[Shape]
    passed_over: list[float]  # differences on inputs that were given up for another


def check(run: Runner, model: nn.Module, sizes: Sizes) -> Agreement:
    """Run both on random images of each shape; DisagreementError if they disagree."""
    generator = torch.Generator().manual_seed(0)
    differences, passed_over = [], []
    for shape in sizes.checked:
        attempts = (
            difference(run, model, torch.randn(shape, generator=generator)) for _ in range(ATTEMPTS)
        )
        seen: list[float] = []
        for found in attempts:
            seen.append(found)
            if found <= TOLERANCE:
                break
        else:
            n, _, height, width = shape
            raise DisagreementError(
                f"the exported network differs from torch by {min(seen):.1e} of its outputs on "
                f"{n} images of {height}x{width}, more than {TOLERANCE:.0e}: nothing was written"
            )
        differences.append(seen[-1])
        passed_over += seen[:-1]
    return Agreement(max(differences), sizes.checked, passed_over)


def difference(run: Runner, model: nn.Module, images: Tensor) -> float:
    """The largest difference of any output, in units of the largest output or of 1."""
    with torch.no_grad():
        expected = as_tuple(model(images))
    found = run(images)
    if [a.shape for a in found] != [b.shape for b in expected]:
        return float("inf")
    parts = [
        (a - b).abs().max() / b.abs().max().clamp(min=1)
        for a, b in zip(found, expected, strict=True)
    ]
    return torch.stack(parts).max().nan_to_num(nan=float("inf")).item()
