"""Replay a model's forward and backward from CUDA graphs, in your training loop.

`TrainingStep` captures the whole step. `graphed` captures only the model; loss, optimizer and
scheduler stay ordinary Python. It builds on `torch.cuda.make_graphed_callables` and adds:

- Gradient accumulation. A replay writes the gradients to the same memory every time, and autograd
  uses that memory as `.grad`. With torch alone the second backward of an accumulation overwrites
  the gradients of the first one (pytorch/pytorch#181723). So may the second forward, because the
  graphs of forward and backward share their memory.
- Batches of other shapes, evaluation and a second forward before the backward run eagerly. With
  torch alone a smaller batch is broadcast to the captured shape.
- Outputs that stay valid. With torch alone the next forward overwrites them.
"""

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .step import paused_garbage_collection


class GraphedModel:
    """A callable that replays a model's forward and backward. Made by `graphed`.

    Attributes:
        model: The model. It is unchanged, and shares its parameters with the graphs.
        why_eager: Why the last call ran eagerly, or None if it was replayed.
    """

    def __init__(
        self, model: nn.Module, inputs: tuple[Tensor, ...], autocast: torch.dtype | None
    ) -> None:
        self.model, self.autocast = model, autocast
        self.why_eager: str | None = None
        self._obstacle = _obstacle(inputs)
        self._device = inputs[0].device.type
        self._training = model.training
        self._signature = _signature(inputs)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        # The autograd node of the last replayed forward, until its backward runs.
        self._pending: weakref.ref[Any] | None = None
        self._safe_addresses: set[int] = set()  # gradients outside of the graphs' memory
        if self._obstacle is None:
            self._replay = _capture(model, inputs, autocast)

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        self.why_eager = self._obstacle or self._reason_to_run_eagerly(inputs, more)
        if self.why_eager is not None:
            with torch.autocast(self._device, self.autocast, enabled=self.autocast is not None):
                return self.model(*inputs, **more)
        self._keep_gradients()
        outputs = self._replay(*(_with_own_gradient(a) for a in inputs))
        tensors = [a for a in pytree.tree_leaves(outputs) if _has_gradient(a)]
        if tensors:
            node: Any = tensors[0].grad_fn
            node.register_prehook(self._before_backward)
            self._pending = weakref.ref(node)
        # The next replay overwrites the original outputs.
        return pytree.tree_map(lambda a: a.clone() if isinstance(a, Tensor) else a, outputs)

    def _reason_to_run_eagerly(self, inputs: tuple[Any, ...], more: dict[str, Any]) -> str | None:
        if more or not all(isinstance(a, Tensor) for a in inputs):
            return "only positional tensors are captured"
        if self.model.training != self._training:
            return f"the model was captured with training={self._training}"
        if not torch.is_grad_enabled():
            return "gradients are disabled"
        if (found := _signature(inputs)) != self._signature:
            return f"captured for {self._signature}, got {found}"
        if self._pending is not None and self._pending() is not None:
            return "the backward of the previous forward is still to run"
        return None

    def _before_backward(self, gradients: tuple[Tensor | None, ...]) -> None:
        self._pending = None
        self._keep_gradients()  # another backward may have run since the forward

    def _keep_gradients(self) -> None:
        """Move gradients that a replay could overwrite to memory of their own."""
        for parameter in self._parameters:
            old = parameter.grad
            if old is not None and old.data_ptr() not in self._safe_addresses:
                parameter.grad = old.clone()
                self._safe_addresses.add(parameter.grad.data_ptr())


def graphed(model: nn.Module, *inputs: Tensor, autocast: torch.dtype | None = None) -> GraphedModel:
    """Capture a model's forward and backward as CUDA graphs, for your training loop.

        fast = graphed(model, images, autocast=torch.bfloat16)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(fast(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()

    Gradients that are there when `fast` is called are copied, because a replay may overwrite their
    memory. So call zero_grad first, unless you accumulate gradients.

    Any optimizer, scheduler, gradient clipping, accumulation and moving average work as before:
    they see ordinary parameters and gradients. Evaluate, save and copy `model` itself.

    The graphs are replayed for training batches of the captured shapes. Other calls run eagerly:
    other shapes, evaluation, torch.no_grad(), or a second forward before the backward of the first.
    `why_eager` of the result gives the reason. On a CPU all calls run eagerly.

    A replay does not notice changes of Python attributes, of `requires_grad`, or new parameters.
    Call graphed again after such a change. A backward runs once per forward: retain_graph=True
    and second derivatives are not supported. The next backward overwrites the results of
    torch.autograd.grad for parameters; clone them to keep them.

    Args:
        model: The model, in the mode (train or eval) to capture.
        inputs: A batch as the loop will pass it. Its values do not matter.
        autocast: Dtype for torch.autocast inside the model, or None for no autocast.

    Returns:
        A function to call in place of the model, with the same inputs and outputs. See above for
        when it replays the graphs.

    >>> model = nn.Linear(8, 2)
    >>> fast = graphed(model, torch.randn(4, 8))
    >>> fast(torch.randn(4, 8)).shape
    torch.Size([4, 2])
    >>> fast.why_eager
    'CUDA graphs need a CUDA device; the inputs are on cpu'
    """
    if not inputs or not all(isinstance(a, Tensor) for a in inputs):
        raise ValueError(f"expected a batch of tensors to capture, got {inputs!r}")
    return GraphedModel(model, inputs, autocast)


def _capture(model: nn.Module, inputs: tuple[Tensor, ...], autocast: torch.dtype | None) -> Any:
    """Return the function that torch would set as the model's forward."""
    samples = tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in inputs)
    device = inputs[0].device
    with (
        _unchanged_forward(model),
        _unchanged_buffers(model),
        torch.cuda.device(device),
        warnings.catch_warnings(),
        paused_garbage_collection(),
        # The cache would keep casts of the weights from outside of the graphs.
        torch.autocast("cuda", autocast, enabled=autocast is not None, cache_enabled=False),
    ):
        # torch warms up on another stream than it captures on.
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
        captured: Any = torch.cuda.make_graphed_callables(model, samples)
        return captured.forward


@contextlib.contextmanager
def _unchanged_forward(model: nn.Module) -> Iterator[None]:
    """Undo torch's replacement of `model.forward`, which copies would share."""
    own = model.__dict__.get("forward")
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)
        if own is not None:
            model.__dict__["forward"] = own


@contextlib.contextmanager
def _unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers, such as BatchNorm's statistics, which the warm-up updates."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _obstacle(inputs: tuple[Tensor, ...]) -> str | None:
    devices = {str(a.device) for a in inputs}
    if any(a.device.type != "cuda" for a in inputs):
        return f"CUDA graphs need a CUDA device; the inputs are on {', '.join(sorted(devices))}"
    return None


def _signature(inputs: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    """Return shape, dtype and whether a gradient is needed, of every input."""
    return [(tuple(a.shape), a.dtype, a.requires_grad) for a in inputs]


def _with_own_gradient(value: Tensor) -> Tensor:
    """Return a view of an input that copies its gradient out of the graphs' memory."""
    if not value.requires_grad:
        return value
    view = value.view_as(value)
    view.register_hook(torch.clone)
    return view


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None
