"""One training step: forward, loss, backward, update. Replayed from a CUDA graph where that can be.

At batch 1 a GPU waits for Python: a step is hundreds of launches of a few microseconds each. A CUDA
graph records them once and replays them in one go. It replays *exactly* them: the same shapes, the
same memory, the same learning rate. So a step is captured only while all of that stays as it is,
and everything that changes, or cannot be captured at all, runs eagerly with the same result.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

Engine = Literal["eager", "compile", "graph", "compile+graph"]

WARM_UP = (
    3  # eager steps before a capture: libraries choose algorithms, optimisers make their state
)
MOST_GRAPHS = 4  # shapes that get a graph each; a graph holds the memory of a step


class TrainingStep:
    """step(inputs, *targets) -> loss: model, loss, backward and optimiser in one call.

    loss(model(inputs), *targets) must be a scalar. autocast is the dtype to compute in, or None.

    Engines: "eager"; "compile" (torch.compile over model and loss); "graph" (the whole step is
    replayed from a CUDA graph); "compile+graph". A graph is captured at the fourth step with the
    same shapes and hyperparameters; before that, and wherever `why_eager` gives a reason, the step
    runs eagerly. A new learning rate makes a new capture, so a schedule that changes it at every
    step is never captured, unless it is a tensor (SGD(fused=True) takes one), changed in place.

    The returned loss is detached. Gradients are left in .grad, as after optimiser.step().
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        optimiser: torch.optim.Optimizer,
        engine: Engine = "graph",
        autocast: torch.dtype | None = None,
    ) -> None:
        if engine not in get_args(Engine):
            raise ValueError(
                f"unknown engine {engine!r}: choose one of {', '.join(get_args(Engine))}"
            )
        self.model, self.optimiser, self.engine, self.autocast = model, optimiser, engine, autocast
        self.why_eager: str | None = None  # why the last step was not replayed from a graph
        self._loss = loss
        self._forward = self._plain_forward
        if engine.startswith("compile"):
            self._forward = torch.compile(self._plain_forward, fullgraph=True)
        self._refused = None if engine.endswith("graph") else f"the engine is {engine!r}"
        self._graphs: dict[Any, _Graph] = {}
        self._runs: dict[Any, int] = {}  # eager steps so far of what is not captured yet
        self._setting: Any = None

    def __call__(self, inputs: Tensor, *targets: Tensor) -> Tensor:
        batch = (inputs, *targets)
        self.why_eager = self._refused or _cannot_capture(inputs, self.optimiser)
        if self.why_eager is None:
            setting = self._read_setting()
            if setting != self._setting:  # what was captured would go on with the old one
                self._setting = setting
                self._graphs.clear()
                self._runs.clear()
            shapes = tuple((a.shape, a.dtype, a.stride()) for a in batch)
            if shapes in self._graphs or self._capture(shapes, batch):
                return self._graphs[shapes].replay(batch)
        return self._eager(*batch)

    def _capture(self, shapes: Any, batch: tuple[Tensor, ...]) -> bool:
        runs = self._runs[shapes] = self._runs.get(shapes, 0) + 1
        if runs <= WARM_UP:
            self.why_eager = f"warming up: step {runs} of {WARM_UP} like this"
            return False
        if len(self._graphs) == MOST_GRAPHS:
            self.why_eager = f"{MOST_GRAPHS} other shapes have a graph already"
            return False
        try:
            self._graphs[shapes] = _Graph(self._eager, self.optimiser, batch)
        except RuntimeError as error:
            # Nothing has run: a capture only records. What cannot be recorded runs as it is.
            self._refused = self.why_eager = f"the capture failed: {str(error).splitlines()[0]}"
            warnings.warn(f"training goes on eagerly: {self.why_eager}", stacklevel=3)
            return False
        return True

    def _eager(self, *batch: Tensor) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast(batch[0].device.type, self.autocast, enabled=self.autocast is not None):
            loss = self._forward(*batch)
        loss.backward()
        self.optimiser.step()
        return loss.detach()

    def _plain_forward(self, inputs: Tensor, *targets: Tensor) -> Tensor:
        return self._loss(self.model(inputs), *targets)

    def _read_setting(self) -> Any:
        """What a graph holds fixed beside the batch: hyperparameters, mode, addresses."""
        groups = [
            tuple((k, id(v) if isinstance(v, Tensor) else v) for k, v in g.items() if k != "params")
            for g in self.optimiser.param_groups
        ]
        addresses = [
            (a.data_ptr(), a.requires_grad)
            for a in (*self.model.parameters(), *self.model.buffers())
        ]
        state = [a.data_ptr() for a in _tensors(self.optimiser) if a.is_cuda]
        return groups, addresses, state, self.model.training


class _Graph:
    def __init__(
        self,
        step: Callable[..., Tensor],
        optimiser: torch.optim.Optimizer,
        batch: tuple[Tensor, ...],
    ) -> None:
        self.batch = [a.clone() for a in batch]
        optimiser.zero_grad(set_to_none=True)  # so that the gradients are the graph's own
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = step(*self.batch)

    def replay(self, batch: tuple[Tensor, ...]) -> Tensor:
        for own, given in zip(self.batch, batch, strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.loss.clone()  # the next replay writes over it


def _cannot_capture(inputs: Tensor, optimiser: torch.optim.Optimizer) -> str | None:
    if not inputs.is_cuda:
        return f"CUDA graphs need a CUDA device, the batch is on {inputs.device}"
    for group in optimiser.param_groups:
        if group.get("capturable") is False:
            return f"{type(optimiser).__name__} can be captured only with capturable=True"
    return None


def _tensors(optimiser: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimiser.state.values():
        yield from (a for a in state.values() if isinstance(a, Tensor))
