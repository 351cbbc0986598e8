"""When to leave the custom ops aside for the plain formulas of reference.py."""

import torch
from torch import Tensor


def wants_plain_ops() -> bool:
    """True under export and tracing, whose targets know aten's ops alone, and inside torch.func.

    torch.func (vmap, grad, jvp) refuses the autograd of any op made with torch.library, and
    forward-mode differentiation has no rule for one.
    """
    return (
        torch.compiler.is_exporting()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def is_batched(grad: Tensor) -> bool:
    """Whether grad is many in one, in torch.autograd.grad(..., is_grads_batched=True).

    That is the vmap from before torch.func, of which wants_plain_ops knows nothing.
    """
    return torch._C._functorch.is_legacy_batchedtensor(grad)
