"""Blocks in a row: each AGC neuron leaves the sums of its maps to the next, which needs a mean.

A neuron by itself reads its convolution's output twice, for the mean and to rewrite it. With the
sums of its input it reads it once: ops/window_mean.py.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

from torch import Tensor, nn

from ..ops.window_mean import is_worth
from .conv import AGCConv2d, AGCConvPool2d


def in_a_row(
    blocks: nn.Sequential, x: Any, totals: Tensor | None = None, wanted: int = 0
) -> tuple[Any, Tensor | None]:
    """What the blocks make of x, and the sums of its maps if they are wanted.

    totals: the sums of x's maps, if whoever made x has left them. wanted: how many elements the
    next neuron writes, the one that reads what the last block makes; see elements_written.
    """
    for i, block in enumerate(blocks):
        if _may_be_asked(block):
            last = i + 1 == len(blocks)
            read = wanted if last else elements_written(blocks[i + 1], len(x), x.shape[2:])
            x, totals = block.in_a_row(x, totals, leave=is_worth(read))
        else:
            x, totals = block(x), None
    return x, totals


def elements_written(reader: nn.Module, samples: int, size: Sequence[int]) -> int:
    """How many, if it is a neuron, by its convolution of maps of this size; else 0."""
    if not isinstance(reader, AGCConv2d):
        return 0
    return samples * reader.out_channels * math.prod(size)


def _may_be_asked(block: nn.Module) -> TypeGuard[AGCConv2d]:
    """Whether to call a neuron by another name than its own goes unnoticed: no hooks, no subclass.

    torch's FSDP makes it a subclass.
    """
    of_torch = nn.modules.module
    return type(block) in (AGCConv2d, AGCConvPool2d) and not (
        block._forward_hooks
        or block._forward_pre_hooks
        or block._backward_hooks
        or block._backward_pre_hooks
        or of_torch._global_forward_hooks
        or of_torch._global_forward_pre_hooks
        or of_torch._global_backward_hooks
        or of_torch._global_backward_pre_hooks
    )
