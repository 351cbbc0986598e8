"""What went wrong, in words that help: which layer went first, which batch size would fit."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..runfolder import BEST, LAST
from ..sizes import Size
from .devices import peak_mib
from .distributed import is_sharded, whole
from .objective import Loss

REMEDY = "A smaller --lr may help, or a --clip-grad-norm, in a new --out."


class FaultError(Exception):
    """Training cannot go on, and why."""


class NotFiniteError(FaultError):
    """A network whose outputs are infinite or no numbers."""


def what_is_kept(run: Path) -> str:
    """What a run that failed has left. Of `best` alone an evaluation is known to be finite."""
    if not (run / LAST).exists():
        return "nothing was saved yet"
    best = f", {run / BEST} the best" if (run / BEST).exists() else ""
    return f"{run / LAST} is the last checkpoint from before that{best}"


def diverged(epoch: int, kept: str) -> FaultError:
    """After an epoch of finite steps, with which the network still cannot be evaluated."""
    advice = REMEDY if epoch else "It has not been trained yet."
    return FaultError(
        f"after epoch {epoch} the network's outputs on the validation images are not finite. "
        f"Nothing of this epoch was written; {kept}. {advice}"
    )


def not_finite(epoch: int, step: int, culprits: Sequence[str], kept: str) -> FaultError:
    """After a step whose loss or gradient was not finite; culprits are those of each process."""
    found = [c if len(culprits) == 1 else f"process {i}: {c}" for i, c in enumerate(culprits) if c]
    return FaultError(
        f"step {step} of epoch {epoch} is not finite: "
        f"{'; '.join(found) or 'but computed again it is, so some op is not deterministic'}. "
        f"The update was not made; {kept}. {REMEDY}"
    )


def find_culprit(model: nn.Module, loss: Loss, inputs: Tensor, targets: Sequence[Any]) -> str:
    """Which layer gave the first value that is not finite, forward or backward; "" if none did.

    The step is computed again, with a look at every layer. Updates nothing.
    """
    trail = _Trail()
    handles = [
        module.register_forward_hook(trail.forward(name or "the model", module))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        if not _finite(inputs):
            return "the images themselves are not finite"
        value = loss(model(inputs), *targets)
        if not trail.first and not _finite(value):
            trail.first = "the loss was the first, of finite outputs"
        if not trail.first:
            _look_backward(trail, model, value)
        return trail.first
    finally:
        for handle in handles:
            handle.remove()


def _look_backward(trail: "_Trail", model: nn.Module, loss: Tensor) -> None:
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients: Sequence[Tensor | None]
    if any(map(is_sharded, named.values())):  # whole while they are used, so not in this graph
        loss.backward()
        gradients = [p.grad for p in named.values()]
    else:  # not .backward(), which would set off DDP's exchange between the processes
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    for name, gradient in zip(named, gradients, strict=True):
        if not trail.first and gradient is not None and not _finite(gradient):
            trail.first = f"the gradient of {name} was the first"


class _Trail:
    def __init__(self) -> None:
        self.first = ""

    def forward(self, name: str, module: nn.Module) -> Callable[..., None]:
        def look(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            for value in _tensors(output):
                if not self.first and not _finite(value):
                    self.first = f"{name} ({type(module).__name__}) was the first to give it"
                if value.requires_grad:
                    value.register_hook(self.backward(name, module))

        return look

    def backward(self, name: str, module: nn.Module) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if not self.first and not _finite(gradient):
                kind = type(module).__name__
                self.first = f"the gradient at the output of {name} ({kind}) was the first"

        return look


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def _finite(value: Tensor) -> bool:
    return bool(whole(torch.isfinite(value).all()))


def is_out_of_memory(error: BaseException) -> bool:
    """Torch has a class for it on GPUs, words for it on CPUs; cuDNN and cuBLAS have their own."""
    words = ("out of memory", "can't allocate memory", "alloc_failed")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(w in str(error).lower() for w in words)
    )


def out_of_memory(
    device: torch.device, batch_size: int, fits: Callable[[int], bool] | None
) -> FaultError:
    """The peak, and the largest of batch_size / 2, / 4, ... with which a step was seen to fit.

    Without `fits` nothing can be tried, and half is what to try.
    """
    peak = peak_mib(device)  # before the trials
    smaller = batch_size // 2
    while fits is not None and smaller and not fits(smaller):
        smaller //= 2
    advice = "not even batch 1 fits: choose a smaller --size or --width"
    if smaller:
        advice = f"--batch-size {smaller} {'may fit' if fits is None else 'fits, it was tried'}"
    return FaultError(
        f"out of memory on {device} at batch size {batch_size}, with a peak of {peak:,.0f} MiB: "
        f"{advice}. What was saved before is as it was."
    )


def out_of_memory_at_start(device: torch.device, size: Size, width: float) -> FaultError:
    """While data and network were made ready: there is no step yet that could be tried."""
    return FaultError(
        f"out of memory on {device} before the first step, with images of {size[0]}x{size[1]} and "
        f"a network of width {width:g}: choose a smaller --size, --width or --train-limit."
    )


def fits_in_memory(attempt: Callable[[], object]) -> bool:
    """Whether it can be done; nothing of the attempt is left."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where there is no GPU in use
    try:
        attempt()
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return False
        raise
    return True
