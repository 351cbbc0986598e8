"""One training step: forward, loss, backward and update, replayed from a CUDA graph if possible.

At batch 1 a GPU waits for Python: a step is hundreds of kernel launches of a few microseconds each.
A CUDA graph records them once and replays them with a single launch. A replay repeats exactly the
recorded kernels, with the same shapes, memory addresses and learning rate. A step is therefore
captured only while all of these stay constant. Everything else runs eagerly, with the same result.
"""

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

Engine = Literal["eager", "compile", "graph", "compile+graph"]

# Eager steps before a capture: libraries choose algorithms, and optimizers create their state.
WARMUP_STEPS = 3
MAX_GRAPHS = 4  # one graph per input shape; each graph holds the memory of a step


class TrainingStep:
    """Run forward, loss, backward and optimizer update in one call.

        step = TrainingStep(model, loss, optimizer)
        value = step(inputs, *targets)          # loss(model(inputs), *targets), detached

    Gradients are left in `.grad`, as after optimizer.step().

    Engines:
        "eager": no capture.
        "compile": torch.compile over model and loss.
        "graph": the whole step is replayed from a CUDA graph.
        "compile+graph": both.

    A graph is captured at the fourth step with the same shapes and hyperparameters. Before that,
    and whenever a step cannot be captured, it runs eagerly; `why_eager` gives the reason for the
    last step, or None if it was replayed. A new learning rate leads to a new capture, so a schedule
    that changes it at every step is never captured, unless the learning rate is a tensor that is
    changed in-place (SGD(fused=True) accepts one).

    A graph does not notice changes of Python attributes, such as the p of a dropout. Call reset()
    after changing one.

    Args:
        model: The model to train.
        loss: loss(model(inputs), *targets) must return a scalar tensor.
        optimizer: Its parameters are updated in place.
        engine: One of the engines above.
        autocast: Dtype for torch.autocast, or None for no autocast.
        before_update: before_update(loss) -> loss runs between backward and update and is captured
            with them (gradient clipping, for example). It gets the detached loss and returns the
            loss to report.
        accumulate: Split inputs and targets along their first dimension into this many parts, and
            add up their losses and gradients before the update. The loss must weight the parts: for
            parts of equal size, divide it by their number. With layers that treat samples
            separately, as AGC does, the result is that of the whole batch.

    >>> model, x, labels = nn.Linear(8, 2), torch.randn(4, 8), torch.tensor([0, 1, 1, 0])
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = TrainingStep(model, nn.functional.cross_entropy, optimizer)
    >>> step(x, labels).shape
    torch.Size([])
    >>> step.why_eager
    'CUDA graphs need a CUDA device; the batch is on cpu'
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        engine: Engine = "graph",
        autocast: torch.dtype | None = None,
        before_update: Callable[[Tensor], Tensor] = lambda loss: loss,
        accumulate: int = 1,
    ) -> None:
        if engine not in get_args(Engine):
            engines = ", ".join(get_args(Engine))
            raise ValueError(f"unknown engine {engine!r}: choose one of {engines}")
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {accumulate}")
        self.model, self.optimizer, self.engine, self.autocast = model, optimizer, engine, autocast
        self.why_eager: str | None = None  # reason why the last step ran eagerly
        self._loss = loss
        self._before_update = before_update
        self._accumulate = accumulate
        self._forward = _forward_of(model, loss)
        if engine.startswith("compile"):
            self._forward = torch.compile(self._forward, fullgraph=True)
        self._obstacle = None if engine.endswith("graph") else f"the engine is {engine!r}"
        self.reset()

    def reset(self) -> None:
        """Drop all captured graphs: the next steps warm up and capture again."""
        self._graphs: dict[Any, _Graph] = {}
        self._runs: dict[Any, int] = {}  # eager steps so far, by shapes
        self._too_large: set[Any] = set()
        self._captured_state: Any = None
        self._watch: _Watch | None = None
        self._last_replayed: _Graph | None = None

    def __call__(self, inputs: Tensor, *targets: Any) -> Tensor:
        batch = (inputs, *targets)
        self.why_eager = self._obstacle or _capture_obstacle(batch, self.model, self.optimizer)
        if self.why_eager is None:
            if self._watch is None or not self._watch.is_unchanged():
                self._update_state()
            shapes = tuple((a.shape, a.dtype, a.stride()) for a in batch)
            if shapes in self._graphs or self._capture(shapes, batch):
                return self._replay(self._graphs[shapes], batch)
        return self._eager(*batch)

    def _update_state(self) -> None:
        """Drop the graphs if the state changed: a replay would use the old hyperparameters."""
        state = self._current_state()
        if state != self._captured_state:
            self.reset()
            self._captured_state = state
        if self._graphs:
            self._watch = _Watch(self.model, self._loss, self.optimizer)

    def _replay(self, graph: "_Graph", batch: tuple[Tensor, ...]) -> Tensor:
        loss = graph.replay(batch)
        if graph is not self._last_replayed or not graph.has_gradients():
            graph.set_gradients()
            self._last_replayed = graph
        return loss

    def _capture(self, shapes: Any, batch: tuple[Tensor, ...]) -> bool:
        runs = self._runs[shapes] = self._runs.get(shapes, 0) + 1
        if runs <= WARMUP_STEPS:
            self.why_eager = f"warming up: step {runs} of {WARMUP_STEPS} with these shapes"
        elif len(self._graphs) == MAX_GRAPHS:
            self.why_eager = f"{MAX_GRAPHS} other shapes have a graph already"
        elif shapes in self._too_large:
            self.why_eager = "not enough memory for a graph of these shapes"
        else:
            self.why_eager = _host_state(self.optimizer)
        if self.why_eager is not None:
            return False
        try:
            self._graphs[shapes] = _Graph(self._eager, self.optimizer, batch)
        except torch.OutOfMemoryError:
            self._too_large.add(shapes)
            self.why_eager = "not enough memory for a graph of these shapes"
            return False
        except RuntimeError as error:
            # A capture records without running, so the step can still run eagerly.
            self.reset()
            self._obstacle = self.why_eager = f"the capture failed: {str(error).splitlines()[0]}"
            warnings.warn(f"training continues eagerly: {self.why_eager}", stacklevel=3)
            return False
        self._captured_state = self._current_state()
        self._watch = _Watch(self.model, self._loss, self.optimizer)
        return True

    def _eager(self, *batch: Any) -> Tensor:
        self._last_replayed = None
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for part in split_batch(batch, self._accumulate):
            device = part[0].device.type
            with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
                loss = self._forward(*part)
            loss.backward()
            losses.append(loss.detach())
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        loss = self._before_update(loss)
        self.optimizer.step()
        return loss

    def _current_state(self) -> Any:
        """Return all that a graph assumes constant: hyperparameters, training flags, addresses."""
        groups = [
            tuple((k, id(v) if isinstance(v, Tensor) else v) for k, v in g.items() if k != "params")
            for g in self.optimizer.param_groups
        ]
        optimized = [id(p) for g in self.optimizer.param_groups for p in g["params"]]
        modes = [m.training for m in _modules(self.model, self._loss)]
        tensors = _tensors(self.model, self._loss)
        addresses = [(a.data_ptr(), a.requires_grad) for a in tensors]
        # The optimizer creates its state in the first steps; compare it only once there is a graph.
        state = [a.data_ptr() for a in _cuda_state(self.optimizer)] if self._graphs else None
        return groups, optimized, modes, addresses, state


def split_batch(batch: tuple[Any, ...], parts: int) -> list[tuple[Any, ...]]:
    """Split the tensors of a batch along their first dimension, into at most `parts` parts.

    A batch with fewer samples has a part per sample.

    >>> [a.tolist() for a, in split_batch((torch.arange(5),), 2)]
    [[0, 1, 2], [3, 4]]
    """
    parts = min(parts, len(batch[0]))
    if parts <= 1:
        return [batch]
    return list(zip(*(a.tensor_split(parts) for a in batch), strict=True))


class _Watch:
    """Notice changes of all that a graph assumes constant, within a few microseconds.

    It compares the identities of objects in the tables of modules and of the optimizer, and the
    addresses of their tensors, and does not walk the tree of modules. It may report a change where
    `_current_state` finds none, such as a hyperparameter set to an equal value.
    """

    def __init__(self, model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.modules = _modules(model, loss)
        tables: list[dict[Any, Any]] = self._tables()
        self.groups, self.state = optimizer.param_groups, optimizer.state
        self.lists = [group["params"] for group in self.groups]
        self.sizes = (len(self.groups), len(self.state))
        self.empty = [table for table in tables if not table]
        self.tables = [table for table in tables if table]
        self.objects = self._objects()
        self.modes = [m.training for m in self.modules]
        self.tensors = _tensors(model, loss)
        self.with_state = [*self.tensors, *_cuda_state(optimizer)]
        self.addresses = list(map(Tensor.data_ptr, self.with_state))
        self.trained = list(map(_REQUIRES_GRAD, self.tensors))

    def is_unchanged(self) -> bool:
        """Return False if the state may have changed since this object was created."""
        optimizer = self.optimizer
        if optimizer.param_groups is not self.groups or optimizer.state is not self.state:
            return False
        objects = self._objects()
        return (
            not any(self.empty)
            and self.sizes == (len(self.groups), len(self.state))
            and len(objects) == len(self.objects)
            and all(map(is_, objects, self.objects))
            and [m.training for m in self.modules] == self.modes
            and list(map(Tensor.data_ptr, self.with_state)) == self.addresses
            and list(map(_REQUIRES_GRAD, self.tensors)) == self.trained
        )

    def _tables(self) -> list[dict[Any, Any]]:
        found: list[dict[Any, Any]] = [*self.optimizer.param_groups, *self.optimizer.state.values()]
        for module in self.modules:
            found += (module._modules, module._parameters, module._buffers)
        return found

    def _objects(self) -> list[Any]:
        values = chain.from_iterable(map(dict.values, self.tables))
        return [*self._tables(), *values, *chain(*self.lists)]


_REQUIRES_GRAD = attrgetter("requires_grad")


def _modules(model: nn.Module, loss: Any) -> list[nn.Module]:
    return [*model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]


def _tensors(model: nn.Module, loss: Any) -> list[Tensor]:
    """Return the parameters and buffers of the model and of a loss that is a module."""
    owners = [model, loss] if isinstance(loss, nn.Module) else [model]
    return [a for owner in owners for a in (*owner.parameters(), *owner.buffers())]


class _Graph:
    def __init__(
        self,
        step: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        batch: tuple[Tensor, ...],
    ) -> None:
        device = batch[0].device
        self.batch = [a.clone() for a in batch]
        optimizer.zero_grad(set_to_none=True)  # the capture allocates the gradients in its pool
        self.graph = torch.cuda.CUDAGraph()
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.current_stream(device)
        try:
            # thread_local: other threads, such as a pinning data loader, may use CUDA meanwhile.
            with torch.cuda.device(device), torch.cuda.graph(
                self.graph,
                pool=pool,
                stream=torch.cuda.Stream(device),
                capture_error_mode="thread_local",
            ):  # fmt: skip
                self.loss = step(*self.batch)
        except RuntimeError:
            torch.cuda.set_stream(stream)  # torch does not restore it
            # After an out-of-memory error torch has ended the capture in order, and the graph frees
            # its pool itself. Freeing it twice would abort the process.
            if _has_ended(self.graph):
                self.graph.reset()
            else:
                _abort_capture(pool, device)
            raise
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients = [p.grad for p in self.parameters]

    def replay(self, batch: tuple[Tensor, ...]) -> Tensor:
        for static, given in zip(self.batch, batch, strict=True):
            static.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.loss.clone()  # the next replay overwrites it

    def has_gradients(self) -> bool:
        """Return whether the parameters' gradients are those that a replay writes."""
        return all(map(is_, map(_GRAD, self.parameters), self.gradients))

    def set_gradients(self) -> None:
        """Set the gradients, which eager steps and steps with other shapes replace."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient


_GRAD = attrgetter("grad")


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Return whether a capture has come to its end, whatever was raised in it."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _abort_capture(pool: Any, device: torch.device) -> None:
    """Clean up after a failed capture, which torch would treat as still running."""
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        release = getattr(torch._C, name, None)
        with contextlib.suppress(RuntimeError):
            if release is not None:
                release(device.index, pool)
    # The random number generator would also wait for the end of the capture.
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


def _forward_of(model: nn.Module, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(inputs: Tensor, *targets: Any) -> Tensor:
        return loss(model(inputs), *targets)

    # A copy of the code object: torch.compile limits recompilations per code object, and several
    # models of one process would share that limit.
    copied = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__
    )
    return copied


def _capture_obstacle(
    batch: tuple[Any, ...], model: nn.Module, optimizer: torch.optim.Optimizer
) -> str | None:
    device = batch[0].device
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device; the batch is on {device}"
    if not all(isinstance(a, Tensor) and a.device == device for a in batch):
        return f"a target is not a tensor on {device}, so a graph would keep its first value"
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return "steps with DistributedDataParallel are not captured"
    for group in optimizer.param_groups:
        if group.get("capturable") is False:
            return f"{type(optimizer).__name__} can be captured only with capturable=True"
    return None


def _host_state(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why an optimizer cannot be captured: state in Python or on the CPU, or None."""
    if any(group.get("capturable") for group in optimizer.param_groups):
        return None
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.is_cpu):
                return (
                    f"{type(optimizer).__name__} keeps its {name!r} on the CPU, outside of a graph"
                )
    return None


def _cuda_state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (a for a in state.values() if isinstance(a, Tensor) and a.is_cuda)
