"""Blocks in a row: each AGC neuron leaves the sums of its maps to the next, which needs a mean.

A neuron by itself reads its convolution's output twice, for the mean and to rewrite it. With the
sums of its input it reads it once: ops/window_mean.py.
"""

from collections.abc import Iterable
from typing import Any, TypeGuard

from torch import Tensor, nn

from .conv import AGCConv2d, AGCConvPool2d


def in_a_row(
    blocks: Iterable[nn.Module], x: Any, totals: Tensor | None = None
) -> tuple[Any, Tensor | None]:
    """What nn.Sequential(*blocks) makes of x, and the sums of its maps where the last leaves them.

    totals: the sums of x's maps, if whoever made x has left them.
    """
    for block in blocks:
        if _may_be_asked(block):
            x, totals = block.in_a_row(x, totals, leave=True)
        else:
            x, totals = block(x), None
    return x, totals


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
