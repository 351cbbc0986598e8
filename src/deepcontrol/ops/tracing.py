"""Who is watching: compilers and transforms decide which form of an op they can take."""

import torch
from torch import Tensor


def wants_plain_ops() -> bool:
    """True under export and tracing, whose targets know aten's ops alone, and inside torch.func.

    torch.func (vmap, grad, jvp) refuses the autograd of any op made with torch.library, and
    forward-mode differentiation has no rule for one.
    """
    return (
        _exporting()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def compiles_with_ops() -> bool:
    """Whether torch.compile is tracing and meets the registered ops; without Triton, formulas."""
    return torch.compiler.is_compiling() and _register_ops()


def is_batched(grad: Tensor) -> bool:
    """Whether grad is many in one, in torch.autograd.grad(..., is_grads_batched=True).

    That is the vmap from before torch.func, of which wants_plain_ops knows nothing.
    """
    return torch._C._functorch.is_legacy_batchedtensor(grad)


def wants_derivatives(grad: Tensor, grad_mean: Tensor | None = None) -> bool:
    """Whether a backward must be plain torch: somebody differentiates it, or has many in one."""
    return torch.is_grad_enabled() or grad_mean is not None or is_batched(grad)


def _register_ops() -> bool:
    """Register the ops for torch.compile; False without Triton.

    Called while a model is compiled and not when the package is imported, because to register an
    op that launches Triton's kernels is to import Triton.
    """
    try:
        from .kernels import agc_ops, agc_pool_ops, gain_ops, pool_ops  # noqa: F401
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        return False
    return True


def _exporting() -> bool:
    return torch.compiler.is_exporting()  # of which torch 2.11's compiler says True when it traces


# What torch.compiler.assume_constant_result does, less its import of the whole compiler: a compiler
# calls the function while it traces, and keeps the answer.
for _constant in (_register_ops, _exporting):
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
