"""One training step, forward to update, replayed from a CUDA graph if possible.

At batch 1 a GPU waits for Python: a step is hundreds of kernel launches of a few microseconds each.
A CUDA graph records them once and replays them with a single launch. A replay repeats exactly the
recorded kernels, with the same shapes, memory addresses and hyperparameters. A step is therefore
captured only while all of these stay constant. The learning rate may change: a graph reads it from
a tensor. Everything else runs eagerly, with the same result.
"""

import contextlib
import gc
import os
import threading
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
DDP_WARMUP_STEPS = 11  # torch's documentation on CUDA graphs; DDP measures its first 10 steps
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
    last step, or None if it was replayed.

    Schedulers: an ordinary torch scheduler may set the learning rate at every step. SGD, and Adam
    and AdamW with capturable=True or fused=True, are then captured with the learning rate in a
    tensor, which is filled before each replay; SGD uses its fused kernel for that. With other
    optimizers, and for other hyperparameters (the momentum of OneCycleLR: cycle_momentum=False
    keeps it), a change leads to a new capture.

    A graph does not notice changes of Python attributes, such as the p of a dropout. Call reset()
    after changing one.

    DistributedDataParallel is captured with NCCL, after 11 eager steps, if the environment variable
    TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 before init_process_group, find_unused_parameters is False,
    and the model is wrapped on a side stream:

        with torch.cuda.stream(torch.cuda.Stream()):
            model = DistributedDataParallel(model, device_ids=[rank])

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
            separately, as AGC does, the result is that of the whole batch. Gradients of
            DistributedDataParallel are exchanged after the last part.

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
        ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        self._warmup_steps = DDP_WARMUP_STEPS if ddp else WARMUP_STEPS
        self._last_lrs: list[Any] | None = None
        # Whether updates read the learning rate from a tensor: from its first change on.
        self._tensor_lr = any(_needs_capturable(optimizer, g) for g in optimizer.param_groups)
        self._changed = ""  # hyperparameters whose change led to the last reset
        self.reset()

    def reset(self) -> None:
        """Drop all captured graphs: the next steps warm up and capture again."""
        self._graphs: dict[Any, _Graph] = {}
        self._runs: dict[Any, int] = {}  # eager steps so far, by shapes
        self._too_large: set[Any] = set()
        self._captured_state: Any = None
        self._watch: _Watch | None = None
        self._last_replayed: _Graph | None = None
        self._lrs: _LearningRates | None = None

    def __call__(self, inputs: Tensor, *targets: Any) -> Tensor:
        batch = (inputs, *targets)
        self.why_eager = self._obstacle or _capture_obstacle(batch, self.model, self.optimizer)
        if self.why_eager is None:
            if self._watch is None or not self._watch.is_unchanged():
                self._update_state()
            if self._tensor_lr:
                self._lrs = self._lrs or _LearningRates(self.optimizer, inputs.device)
                self._lrs.update()
            shapes = tuple((a.shape, a.dtype, a.stride()) for a in batch)
            if shapes in self._graphs or self._capture(shapes, batch):
                return self._replay(self._graphs[shapes], batch)
        return self._eager(*batch)

    def _update_state(self) -> None:
        """Drop graphs if the state changed: replays would use the old hyperparameters."""
        groups = self.optimizer.param_groups
        lrs = [group["lr"] for group in groups if "lr" in group and _is_number(group["lr"])]
        changed = self._last_lrs is not None and lrs != self._last_lrs
        self._tensor_lr |= changed and _accepts_tensor_lr(self.optimizer)
        self._last_lrs = lrs
        state = self._current_state()
        if state != self._captured_state:
            self._changed = _changed_names(self._captured_state, state)
            self.reset()
            self._captured_state = state
        if self._graphs:
            self._watch = _Watch(self.model, self._loss, self.optimizer, self._tensor_lr)

    def _replay(self, graph: "_Graph", batch: tuple[Tensor, ...]) -> Tensor:
        loss = graph.replay(batch)
        if graph is not self._last_replayed or not graph.has_gradients():
            graph.set_gradients()
            self._last_replayed = graph
        return loss

    def _capture(self, shapes: Any, batch: tuple[Tensor, ...]) -> bool:
        runs = self._runs[shapes] = self._runs.get(shapes, 0) + 1
        if runs <= self._warmup_steps:
            after = f", after a change of {self._changed}" if self._changed else ""
            steps = self._warmup_steps
            self.why_eager = f"warming up: step {runs} of {steps} with these shapes{after}"
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
        self._watch = _Watch(self.model, self._loss, self.optimizer, self._tensor_lr)
        return True

    def _eager(self, *batch: Any) -> Tensor:
        self._last_replayed = None
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        parts = split_batch(batch, self._accumulate)
        for i, part in enumerate(parts):
            with self._without_exchange() if i + 1 < len(parts) else contextlib.nullcontext():
                device = part[0].device.type
                with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
                    loss = self._forward(*part)
                loss.backward()
            losses.append(loss.detach())
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        loss = self._before_update(loss)
        lrs = self._lrs
        if lrs is not None and len(lrs.values) != len(self.optimizer.param_groups):
            lrs = None  # a group was added since
        with contextlib.nullcontext() if lrs is None else lrs.applied():
            self.optimizer.step()
        return loss

    def _without_exchange(self) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            return self.model.no_sync()
        return contextlib.nullcontext()

    def _current_state(self) -> Any:
        """Return a graph's constants: hyperparameters, training flags, addresses."""
        groups = [
            {k: id(v) if isinstance(v, Tensor) else v for k, v in g.items() if k != "params"}
            for g in self.optimizer.param_groups
        ]
        if self._tensor_lr:
            for constants, group in zip(groups, self.optimizer.param_groups, strict=True):
                if "lr" in group and _is_number(group["lr"]):
                    del constants["lr"]
        optimized = [id(p) for g in self.optimizer.param_groups for p in g["params"]]
        modes = [m.training for m in _modules(self.model, self._loss)]
        tensors = _tensors(self.model, self._loss)
        addresses = [(a.data_ptr(), a.requires_grad) for a in tensors]
        # The optimizer creates its state in the first steps; compare it only once there is a graph.
        state = [a.data_ptr() for a in _cuda_state(self.optimizer)] if self._graphs else None
        return groups, optimized, modes, addresses, state


def split_batch(batch: tuple[Any, ...], parts: int) -> list[tuple[Any, ...]]:
    """Split the tensors of a batch into at most `parts` parts, by dimension 0.

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

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        optimizer: torch.optim.Optimizer,
        tensor_lr: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.tensor_lr = tensor_lr
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
        found: list[dict[Any, Any]] = [*self.optimizer.state.values()]
        for module in self.modules:
            found += (module._modules, module._parameters, module._buffers)
        return found

    def _objects(self) -> list[Any]:
        values = chain.from_iterable(map(dict.values, self.tables))
        constants = chain.from_iterable(map(self._constants, self.groups))
        return [*self._tables(), *values, *constants, *chain(*self.lists)]

    def _constants(self, group: dict[str, Any]) -> list[Any]:
        """Return the hyperparameters of a group, without a learning rate that may change."""
        may_change = self.tensor_lr and _is_number(group.get("lr"))
        return [value for name, value in group.items() if name != "lr" or not may_change]


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
            with torch.cuda.device(device), paused_garbage_collection(), torch.cuda.graph(
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


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Keep Python's garbage collector from running while a CUDA graph is captured.

    It may destroy an older graph, and that invalidates the capture (pytorch/pytorch#161037). If
    several threads capture at the same time, the last one turns the collector on again.
    """
    with _PAUSES.lock:
        if _PAUSES.count == 0:
            _PAUSES.was_enabled = gc.isenabled()
            gc.disable()
        _PAUSES.count += 1
    try:
        yield
    finally:
        with _PAUSES.lock:
            _PAUSES.count -= 1
            if _PAUSES.count == 0 and _PAUSES.was_enabled:
                gc.enable()


class _Pauses:
    """The captures now in progress, for which garbage collection is paused."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.was_enabled = False


_PAUSES = _Pauses()


class _LearningRates:
    """Copies of an optimizer's learning rates on the device, for graphs to read."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.values = [group["lr"] for group in optimizer.param_groups]
        self.tensors = [
            torch.tensor(float(lr), device=device) if _is_number(lr) else lr for lr in self.values
        ]

    def update(self) -> None:
        """Copy the learning rates that have changed."""
        for i, group in enumerate(self.optimizer.param_groups):
            if group["lr"] is not self.values[i] and group["lr"] != self.values[i]:
                self.values[i] = group["lr"]
                self.tensors[i].fill_(group["lr"])

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the optimizer read the copies, through kernels that accept a tensor."""
        self.update()  # copies nothing during a capture: __call__ has done it
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        for group, tensor in zip(groups, self.tensors, strict=True):
            group["lr"] = tensor
            if "capturable" in group:
                group["capturable"] = True  # fused Adam has its step count on the device
            else:  # the other kernels of SGD would read the tensor on the host
                group["fused"], group["foreach"] = True, False
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)


def _accepts_tensor_lr(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an update can read the learning rate from a device tensor."""
    groups = optimizer.param_groups
    if type(optimizer) is torch.optim.SGD:
        # The fused kernel has these conditions. A sharded parameter has a device_mesh.
        parameters = [p for group in groups for p in group["params"]]
        plain = all(p.is_floating_point() and not hasattr(p, "device_mesh") for p in parameters)
        plain &= not any(p.grad is not None and p.grad.is_sparse for p in parameters)
        return plain and not any(group["differentiable"] for group in groups)
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return all(group["capturable"] or group["fused"] for group in groups)
    return False


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor)


def _changed_names(before: Any, after: Any) -> str:
    """Return the hyperparameters that differ, or "" if there was no state before."""
    if before is None:
        return ""
    names = {
        name
        for old, new in zip(before[0], after[0], strict=False)
        for name in old.keys() | new.keys()
        if old.get(name) != new.get(name)
    }
    return ", ".join(sorted(names)) or "the model or the optimizer"


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
    if any(a.requires_grad for a in batch):
        return "an input requires a gradient, which a replay would not write"
    if isinstance(model, nn.parallel.DistributedDataParallel) and (why := _ddp_obstacle(model)):
        return why
    for group in optimizer.param_groups:
        if group.get("capturable") is False and not _needs_capturable(optimizer, group):
            return f"{type(optimizer).__name__} can be captured only with capturable=True" + (
                " or fused=True" if "fused" in group else ""
            )
    return None


def _ddp_obstacle(model: nn.parallel.DistributedDataParallel) -> str | None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if os.environ.get(name) != "0":
        return (
            f"DistributedDataParallel can be captured only with {name}=0, set before "
            "init_process_group, and if the model is wrapped on a side stream"
        )
    backend = torch.distributed.get_backend(model.process_group)
    if backend != "nccl":
        return f"DistributedDataParallel can be captured only with NCCL, got {backend}"
    if model.find_unused_parameters:
        return "DistributedDataParallel can be captured only with find_unused_parameters=False"
    return None


def _needs_capturable(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Return whether torch refuses a capture that works.

    Fused Adam counts its steps on the device.
    """
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return is_adam and bool(group["fused"]) and not group["capturable"]


def _host_state(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why an optimizer cannot be captured, or None.

    The reason is state in Python or on the CPU.
    """
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
