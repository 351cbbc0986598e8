"""A run's state as a checkpoint, written by a thread while training goes on."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import Checkpoint, CheckpointError, save_best, save_last
from .distributed import Group, sharded_like, whole

FORMAT = 1  # of state.pt


@dataclass
class Position:
    """How far a run has come, and what it has summed up of the epoch it is in."""

    epoch: int = -1  # the last whose line is written; 0 is before any training
    step: int = 0  # steps done of the epoch after it
    images: int = 0  # seen in these steps
    loss_sum: float = 0.0  # over these images
    seconds: float = 0.0  # taken by these steps
    best_error: float = float("inf")
    best_epoch: int = -1

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Position":
        """From a checkpoint: ValueError unless it is one."""
        position = cls(**values)
        for field in fields(cls):
            value = getattr(position, field.name)
            least = -1 if field.name in ("epoch", "best_epoch") else 0
            if type(value) is not field.type or (field.name != "loss_sum" and not value >= least):
                raise ValueError(f"{field.name} cannot be {value!r}")
        return position


def snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer, position: Position, group: Group
) -> Checkpoint:
    """Everything that goes on, copied to the CPU: training may change it meanwhile.

    All processes have to take part, since each has its own random numbers and perhaps its shards.
    """
    state = {
        "format": FORMAT,
        "position": asdict(position),
        "optimiser": _copied(whole(optimizer.state_dict()["state"])),
        "rng": group.gathered(_rng(group.device)),
    }
    checkpoint = Checkpoint(_copied(whole(model.state_dict())), state)
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)  # once for all copies
    return checkpoint


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group
) -> Position:
    """Put a run back to where a snapshot was taken; CheckpointError if it cannot be one.

    Nothing in the file is taken on trust: an optimizer with a buffer of a wrong size would write
    over memory that is not its own. Hyperparameters are the configuration's, not the file's.
    """
    state = checkpoint.state
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"a checkpoint of format {found}, not {FORMAT}")
    load_weights(model, checkpoint.model)
    try:
        position = Position.of(state["position"])
        _restore_optimizer(optimizer, state["optimiser"])
        _restore_rng(state["rng"], group)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint is not of this run: {error!r}") from error
    return position


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[int, Any]) -> None:
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    restored: dict[int, dict[str, Any]] = {}
    for index, of_one in state.items():
        if type(index) is not int or not 0 <= index < len(parameters):
            raise ValueError(f"there is no parameter {index!r}")
        like = parameters[index]
        restored[index] = {}
        for name, value in of_one.items():
            fits = isinstance(value, Tensor) and value.shape in (like.shape, torch.Size())
            if value is not None and not (fits and value.dtype == like.dtype):
                raise ValueError(f"{name} of parameter {index} does not fit it")
            restored[index][name] = None if value is None else sharded_like(value, like)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": restored})


def _restore_rng(states: list[tuple[Tensor, Tensor | None]], group: Group) -> None:
    if group.rank >= len(states):  # the run had fewer processes then
        return
    cpu, cuda = states[group.rank]
    torch.set_rng_state(cpu)
    if cuda is not None and group.device.type == "cuda":
        torch.cuda.set_rng_state(cuda, group.device)


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """A checkpoint's weights into a model, which may be sharded."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        missing, more = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        raise CheckpointError(f"not this model's weights: missing {missing}, unknown {more}")
    for name, value in weights.items():
        if own[name].shape != value.shape:
            shapes = f"{tuple(value.shape)}, not {tuple(own[name].shape)}"
            raise CheckpointError(f"not this model's weights: {name} is {shapes}")
    model.load_state_dict({k: sharded_like(v, own[k]) for k, v in weights.items()})


class Saver:
    """Writes checkpoints in a thread, one after the other; errors come up at the next call.

    Training never waits for the disk. Where epochs are shorter than it takes to write one, those
    that come meanwhile take each other's place, so that the newest is written next: a run that is
    killed has lost a little more, which it does again. Of the best ones too the newest is written.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._pool = ThreadPoolExecutor(1)
        self._lock = Lock()  # over what is below, up to the empty line
        self._last: Checkpoint | None = None
        self._best: Checkpoint | None = None
        self._is_writing = False

        self._writing: Future[None] | None = None
        self._has_written = False

    def save(self, checkpoint: Checkpoint, is_best: bool = False) -> None:
        """Write `last`, and before it `best`, as soon as what is being written is on the disk."""
        self.check()
        with self._lock:
            self._last = checkpoint
            if is_best:
                self._best = checkpoint
            if not self._is_writing:
                self._is_writing = True
                self._writing = self._pool.submit(self._write_all, self._writing)

    def check(self) -> None:
        """Raise what went wrong by now, if anything did."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Until all is on the disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Leave nothing half written to whoever holds the run folder next."""
        self._pool.shutdown()

    def _write_all(self, before: Future[None] | None) -> None:
        try:
            if before is not None:
                before.result()  # it has ended; an error that nobody has seen yet is not lost
            while (waiting := self._next()) is not None:
                self._write(*waiting)
        except BaseException:
            with self._lock:  # whoever is told of it decides what is saved after it
                self._last = self._best = None
                self._is_writing = False
            raise

    def _next(self) -> tuple[Checkpoint, Checkpoint | None] | None:
        with self._lock:
            last, best = self._last, self._best
            self._last = self._best = None
            self._is_writing = last is not None
        return None if last is None else (last, best)

    def _write(self, last: Checkpoint, best: Checkpoint | None) -> None:
        # The best first: killed in between, the run goes on from before it and saves it again.
        if best is not None:
            about = {k: best.state[k] for k in ("format", "position")}
            save_best(self.run, Checkpoint(best.model, about))
        save_last(self.run, last, last_is_whole=self._has_written)
        self._has_written = True


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _room_for(value).copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copied(v) for v in value]
    return value


def _room_for(value: Tensor) -> Tensor:
    """On the CPU; for a GPU's tensor in pinned memory, which the GPU writes to by itself.

    Torch keeps pinned memory that is given back, so that the next checkpoint has it at once.
    """
    if value.is_cuda:
        try:
            return torch.empty_like(value, device="cpu", pin_memory=True)
        except RuntimeError:  # the system has no more to pin
            pass
    return torch.empty_like(value, device="cpu")


def _rng(device: torch.device) -> tuple[Tensor, Tensor | None]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda
