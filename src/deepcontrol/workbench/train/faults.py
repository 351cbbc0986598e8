"""Detect faults of a run: non-finite steps, exhausted memory, and failed GPUs.

`Guard` tests loss and gradients on the device, between backward and update. From the first bad step
on, the optimizer skips its updates, so the model keeps the weights from before that step. The host
reads the flag later (`GuardReader`) and never waits for the device in between.
"""

import errno
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from .distributed import Group, is_sharded, local_shard, unshard
from .objective import Loss

# In messages of RuntimeErrors and ImportErrors, in lower case. oneDNN reports a failed allocation
# of a workspace as a primitive that it could not create or execute.
OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "alloc_failed",
    "bad_alloc",
    "could not create a primitive",
    "could not execute a primitive",
    "storage size calculation overflowed",
    "can't start new thread",  # no memory for its stack
    "failed to map segment from shared object",  # a library that is imported late
)
# In messages of RuntimeErrors, in lower case: of the driver, cuBLAS, cuDNN and Triton's launches.
DEVICE_FAILED = (
    "cuda error",
    "triton error [cuda]",
    "cudnn error",
    "cudnn_status_",
    "cublas_status_",
)


class FaultError(Exception):
    """Training cannot continue; the message gives the reason and a remedy."""


class NotFiniteError(FaultError):
    """The outputs of a network are infinite or NaN."""


class DeviceError(FaultError):
    """The GPU failed. This process cannot use it any more."""


# Steps that are not finite


class Guard:
    """`before_update` that stops the optimizer at the first non-finite step."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: Group) -> None:
        self.group = group
        self.bad = torch.zeros((), device=group.device)  # 0, and 1 from the first bad step on
        self.good_steps = torch.zeros((), dtype=torch.float64, device=group.device)
        self._parameters = [p for g in optimizer.param_groups for p in g["params"]]
        # Fused optimizers skip updates by these attributes; torch's GradScaler sets the same ones.
        optimizer.found_inf, optimizer.grad_scale = self.bad, None  # type: ignore[attr-defined]

    def __call__(self, loss: Tensor) -> Tensor:
        """Test this step and return the loss, averaged over all processes."""
        gradients = [local_shard(p.grad) for p in self._parameters if p.grad is not None]
        # The maximum norm, because the squares of finite numbers can overflow.
        largest = get_total_norm([g for g in gradients if g.numel()], torch.inf)
        bad = ~(torch.isfinite(loss) & torch.isfinite(largest))
        # All processes must make the same decision. Bad processes are counted, because a maximum
        # over the processes could lose a NaN.
        loss, bad = self.group.mean(torch.stack([loss, bad.to(loss.dtype)]))
        bad = (bad > 0) | ~torch.isfinite(loss)
        self.bad.copy_(torch.maximum(self.bad, bad.float()))
        self.good_steps.add_(1 - self.bad)
        return loss


class GuardStatus(NamedTuple):
    loss: float
    bad: bool  # a step was not finite
    good_steps: int  # before the first bad step


class GuardReader:
    """Copy the guard's status to the host."""

    def __init__(self, guard: Guard) -> None:
        self.guard, on_gpu = guard, guard.bad.is_cuda
        self._host = torch.zeros(3, dtype=torch.float64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._started = False

    def poll(self, loss: Tensor) -> GuardStatus:
        """Return the status after a step; on a GPU that of the previous call."""
        if self._copied is None:
            self._start_copy(loss)
            return self._read()
        if not self._started:  # the first call has no previous one
            self._start_copy(loss)
            self._copied.record()
        self._copied.synchronize()
        status = self._read()
        self._start_copy(loss)
        self._copied.record()
        return status

    def wait(self) -> GuardStatus:
        """Wait until the device has finished all steps. The loss is NaN (unknown)."""
        return GuardStatus(float("nan"), bool(self.guard.bad), int(self.guard.good_steps))

    def _start_copy(self, loss: Tensor) -> None:
        self._started = True
        values = [loss.double(), self.guard.bad.double(), self.guard.good_steps]
        self._host.copy_(torch.stack(values), non_blocking=True)

    def _read(self) -> GuardStatus:
        loss, bad, good_steps = self._host.tolist()
        return GuardStatus(loss, bad > 0, int(good_steps))


def find_first_nonfinite(
    model: nn.Module, loss: Loss, inputs: Tensor, targets: Sequence[Any]
) -> str:
    """Repeat a step without its update, and name the first value that is not finite.

    Returns:
        For example "the output of encoder.0 (AGCConv2d)", or "" if all values are finite.
    """
    if not _is_finite(inputs):
        return "in the input images"
    search = _Search()
    handles = [
        module.register_forward_hook(search.forward_hook(_describe(name, module)))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        value = loss(model(inputs), *targets)
        search.test("the loss", value)
        if not search.first:
            _search_gradients(search, model, value)
        return search.first
    finally:
        for handle in handles:
            handle.remove()


def _search_gradients(search: "_Search", model: nn.Module, loss: Tensor) -> None:
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients: Sequence[Tensor | None]
    if any(map(is_sharded, named.values())):  # FSDP's full parameters are not in this graph
        loss.backward()
        gradients = [p.grad for p in named.values()]
    else:  # .backward() would start DDP's communication
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is not None:
            search.test(f"the gradient of {name}", gradient)


class _Search:
    """Hooks that record the first tensor with a value that is not finite."""

    def __init__(self) -> None:
        self.first = ""

    def test(self, name: str, value: Tensor) -> None:
        if not self.first and not _is_finite(value):
            self.first = name

    def forward_hook(self, layer: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            for value in _float_tensors(output):
                self.test(f"the output of {layer}", value)
                if value.requires_grad:
                    value.register_hook(self.backward_hook(layer))

        return hook

    def backward_hook(self, layer: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.test(f"the gradient at the output of {layer}", gradient)

        return hook


def _describe(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _float_tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def _is_finite(value: Tensor) -> bool:
    return bool(unshard(torch.isfinite(value).all()))


def check_weights(model: nn.Module, checkpoint: Path) -> None:
    """Raise NotFiniteError if a loaded network has weights that are infinite or NaN."""
    for name, value in model.state_dict().items():
        if not _is_finite(value):
            raise NotFiniteError(
                f"{checkpoint}: {name} has values that are not finite, so the network's outputs "
                "mean nothing. Choose another checkpoint, or train again with a smaller --lr."
            )


# Memory and devices


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out.

    torch has an exception class for GPUs only. CPU allocations, oneDNN, cuDNN and cuBLAS raise a
    RuntimeError with a message, and the mapping of a file an OSError.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, (RuntimeError, ImportError))
        and any(message in str(error).lower() for message in OUT_OF_MEMORY)
    )


def is_device_failure(error: BaseException) -> bool:
    """Return whether a GPU failed, for another reason than its memory.

    CUDA reports a fault of a kernel at a later call, and at every call from then on.
    """
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return isinstance(error, DeviceError)
    known = getattr(torch, "AcceleratorError", ())  # newer than torch's oldest supported version
    return isinstance(error, known) or any(m in str(error).lower() for m in DEVICE_FAILED)


def fits_in_memory(attempt: Callable[[], object]) -> bool:
    """Run `attempt` and return whether the memory suffices."""
    gc.collect()
    torch.cuda.empty_cache()  # a no-op without a GPU
    try:
        attempt()
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return False
        raise
    return True
