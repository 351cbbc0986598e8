"""One training step: forward, loss, backward, update. Replayed from a CUDA graph where that can be.

At batch 1 a GPU waits for Python: a step is hundreds of launches of a few microseconds each. A CUDA
graph records them once and replays them in one go. It replays *exactly* them: the same shapes, the
same memory, the same learning rate. So a step is captured only while all of that stays as it is,
and everything that changes, or cannot be captured at all, runs eagerly with the same result.
"""

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

Engine = Literal["eager", "compile", "graph", "compile+graph"]

WARM_UP = (
    3  # eager steps before a capture: libraries choose algorithms, optimizers make their state
)
MOST_GRAPHS = 4  # shapes that get a graph each; a graph holds the memory of a step


class TrainingStep:
    """step(inputs, *targets) -> loss: model, loss, backward and optimizer in one call.

    loss(model(inputs), *targets) must be a scalar. autocast is the dtype to compute in, or None.

    Engines: "eager"; "compile" (torch.compile over model and loss); "graph" (the whole step is
    replayed from a CUDA graph); "compile+graph". A graph is captured at the fourth step with the
    same shapes and hyperparameters; before that, and wherever `why_eager` gives a reason, the step
    runs eagerly. A new learning rate makes a new capture, so a schedule that changes it at every
    step is never captured, unless it is a tensor (SGD(fused=True) takes one), changed in place.

    What a graph cannot see is a Python attribute: after changing, say, a dropout's p, call reset().

    before_update(loss) -> loss, if given, runs between backward and update and is captured with
    them: it gets the detached loss and returns the one to report.

    The returned loss is detached. Gradients are left in .grad, as after optimizer.step().
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        engine: Engine = "graph",
        autocast: torch.dtype | None = None,
        before_update: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> None:
        if engine not in get_args(Engine):
            engines = ", ".join(get_args(Engine))
            raise ValueError(f"unknown engine {engine!r}: choose one of {engines}")
        self.model, self.optimizer, self.engine, self.autocast = model, optimizer, engine, autocast
        self.why_eager: str | None = None  # why the last step was not replayed from a graph
        self._loss = loss
        self._before_update = before_update
        self._forward = _forward_of(model, loss)
        if engine.startswith("compile"):
            self._forward = torch.compile(self._forward, fullgraph=True)
        self._refused = None if engine.endswith("graph") else f"the engine is {engine!r}"
        self.reset()

    def reset(self) -> None:
        """Forget what was captured: the next steps warm up and capture anew."""
        self._graphs: dict[Any, _Graph] = {}
        self._runs: dict[Any, int] = {}  # eager steps so far of what is not captured yet
        self._too_large: set[Any] = set()
        self._setting: Any = None

    def __call__(self, inputs: Tensor, *targets: Any) -> Tensor:
        batch = (inputs, *targets)
        self.why_eager = self._refused or _cannot_capture(batch, self.model, self.optimizer)
        if self.why_eager is None:
            setting = self._read_setting()
            if setting != self._setting:  # what was captured would go on with the old one
                self.reset()
                self._setting = setting
            shapes = tuple((a.shape, a.dtype, a.stride()) for a in batch)
            if shapes in self._graphs or self._capture(shapes, batch):
                return self._graphs[shapes].replay(batch)
        return self._eager(*batch)

    def _capture(self, shapes: Any, batch: tuple[Tensor, ...]) -> bool:
        runs = self._runs[shapes] = self._runs.get(shapes, 0) + 1
        if runs <= WARM_UP:
            self.why_eager = f"warming up: step {runs} of {WARM_UP} like this"
        elif len(self._graphs) == MOST_GRAPHS:
            self.why_eager = f"{MOST_GRAPHS} other shapes have a graph already"
        elif shapes in self._too_large:
            self.why_eager = "there is too little memory for a graph of these shapes"
        else:
            self.why_eager = _host_state(self.optimizer)
        if self.why_eager is not None:
            return False
        try:
            self._graphs[shapes] = _Graph(self._eager, self.optimizer, batch)
        except torch.OutOfMemoryError:
            self._too_large.add(shapes)
            self.why_eager = "there is too little memory for a graph of these shapes"
            return False
        except RuntimeError as error:
            # Nothing has run: a capture only records. What cannot be recorded runs as it is.
            self.reset()
            self._refused = self.why_eager = f"the capture failed: {str(error).splitlines()[0]}"
            warnings.warn(f"training goes on eagerly: {self.why_eager}", stacklevel=3)
            return False
        self._setting = self._read_setting()
        return True

    def _eager(self, *batch: Any) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(batch[0].device.type, self.autocast, enabled=self.autocast is not None):
            loss = self._forward(*batch)
        loss.backward()
        loss = self._before_update(loss.detach())
        self.optimizer.step()
        return loss

    def _read_setting(self) -> Any:
        """What a graph holds fixed beside the batch: hyperparameters, modes, addresses."""
        groups = [
            tuple((k, id(v) if isinstance(v, Tensor) else v) for k, v in g.items() if k != "params")
            for g in self.optimizer.param_groups
        ]
        optimized = [id(p) for g in self.optimizer.param_groups for p in g["params"]]
        modules = [*self.model.modules()]
        if isinstance(self._loss, nn.Module):
            modules += self._loss.modules()
        modes = [m.training for m in modules]
        addresses = [
            (a.data_ptr(), a.requires_grad)
            for a in (*self.model.parameters(), *self.model.buffers())
        ]
        # The optimizer makes its state in the first steps: it counts once there is a graph.
        state = [a.data_ptr() for a in _state(self.optimizer)] if self._graphs else None
        return groups, optimized, modes, addresses, state


class _Graph:
    def __init__(
        self,
        step: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        batch: tuple[Tensor, ...],
    ) -> None:
        device = batch[0].device
        self.batch = [a.clone() for a in batch]
        optimizer.zero_grad(set_to_none=True)  # so that the gradients are the graph's own
        self.graph = torch.cuda.CUDAGraph()
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.current_stream(device)
        try:
            # thread_local: other threads, such as a loader that pins memory, go on meanwhile.
            with torch.cuda.device(device), torch.cuda.graph(
                self.graph,
                pool=pool,
                stream=torch.cuda.Stream(device),
                capture_error_mode="thread_local",
            ):  # fmt: skip
                self.loss = step(*self.batch)
        except RuntimeError:
            torch.cuda.set_stream(stream)  # torch does not come back to it by itself
            _abandon(pool, device)
            raise
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self.gradients = [(p, p.grad) for p in parameters]

    def replay(self, batch: tuple[Tensor, ...]) -> Tensor:
        for own, given in zip(self.batch, batch, strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        for parameter, gradient in self.gradients:  # after steps of other shapes, not there
            parameter.grad = gradient
        return self.loss.clone()  # the next replay writes over it


def _abandon(pool: Any, device: torch.device) -> None:
    """End what a capture has begun that failed; torch goes on as if it were still there."""
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        give_back = getattr(torch._C, name, None)
        with contextlib.suppress(RuntimeError):
            if give_back is not None:
                give_back(device.index, pool)
    # Nor does it tell the generator of random numbers, which would wait for the capture's end.
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


def _forward_of(model: nn.Module, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(inputs: Tensor, *targets: Any) -> Tensor:
        return loss(model(inputs), *targets)

    # With code of its own: the compiler counts recompilations by code, over a process's models.
    own = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__
    )
    return own


def _cannot_capture(
    batch: tuple[Any, ...], model: nn.Module, optimizer: torch.optim.Optimizer
) -> str | None:
    device = batch[0].device
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device, the batch is on {device}"
    if not all(isinstance(a, Tensor) and a.device == device for a in batch):
        return f"a target that is not a tensor on {device} would be frozen in a graph"
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return "DistributedDataParallel is not captured"
    for group in optimizer.param_groups:
        if group.get("capturable") is False:
            return f"{type(optimizer).__name__} can be captured only with capturable=True"
    return None


def _host_state(optimizer: torch.optim.Optimizer) -> str | None:
    """Why an optimizer cannot be captured whose state a graph would freeze: counters in Python."""
    if any(group.get("capturable") for group in optimizer.param_groups):
        return None
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.is_cpu):
                return f"{type(optimizer).__name__} keeps its {name!r} where a graph cannot see it"
    return None


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (a for a in state.values() if isinstance(a, Tensor) and a.is_cuda)
