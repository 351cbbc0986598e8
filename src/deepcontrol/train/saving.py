"""A run's state as a checkpoint, written by a thread while training goes on."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
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


def snapshot(
    model: nn.Module, optimiser: torch.optim.Optimizer, position: Position, group: Group
) -> Checkpoint:
    """Everything that goes on, copied to the CPU: training may change it meanwhile.

    All processes have to take part, since each has its own random numbers and perhaps its shards.
    """
    state = {
        "format": FORMAT,
        "position": asdict(position),
        "optimiser": _copied(whole(optimiser.state_dict())),
        "rng": group.gathered(_rng(group.device)),
    }
    return Checkpoint(_copied(whole(model.state_dict())), state)


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimiser: torch.optim.Optimizer, group: Group
) -> Position:
    """Put a run back to where a snapshot was taken."""
    state = checkpoint.state
    if state.get("format") != FORMAT:
        raise CheckpointError(f"a checkpoint of format {state.get('format')}, not {FORMAT}")
    load_weights(model, checkpoint.model)
    parameters = [p for g in optimiser.param_groups for p in g["params"]]
    for index, of_one in state["optimiser"]["state"].items():
        for name, value in of_one.items():
            if isinstance(value, Tensor):
                of_one[name] = sharded_like(value, parameters[index])
    optimiser.load_state_dict(state["optimiser"])
    if group.rank < len(state["rng"]):  # fewer, if the run had fewer processes then
        cpu, cuda = state["rng"][group.rank]
        torch.set_rng_state(cpu)
        if cuda is not None and group.device.type == "cuda":
            torch.cuda.set_rng_state(cuda, group.device)
    return Position(**state["position"])


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
    """Writes one checkpoint at a time in a thread; errors come up at the next call."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def save(self, checkpoint: Checkpoint, is_best: bool = False) -> None:
        """Start to write `last`, and before it `best`, once what was being written is."""
        self.wait()
        self._pending = self._pool.submit(self._write, checkpoint, is_best)

    def check(self) -> None:
        """Raise what went wrong by now, if anything did."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Until all is on the disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Leave nothing half written to whoever holds the run folder next."""
        self._pool.shutdown()

    def _write(self, checkpoint: Checkpoint, is_best: bool) -> None:
        # The best first: killed in between, the run goes on from before it and saves it again.
        if is_best:
            about = {k: checkpoint.state[k] for k in ("format", "position")}
            save_best(self.run, Checkpoint(checkpoint.model, about))
        save_last(self.run, checkpoint)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copied(v) for v in value]
    return value


def _rng(device: torch.device) -> tuple[Tensor, Tensor | None]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda
