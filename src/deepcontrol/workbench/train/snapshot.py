"""Contents of a checkpoint: copy a run's state, and restore it after validation.

A checkpoint is untrusted input. Fused SGD writes through raw pointers, so that a momentum buffer of
another shape, dtype or layout would make it write outside the buffer. Every restored tensor is
therefore compared with the parameter that it belongs to, and copied into memory that was allocated
here, with the parameter's own strides.
"""

import math
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..models import ExternalNetwork
from .checkpoint import FORMAT, Checkpoint, CheckpointError
from .distributed import Group, is_sharded, shard_like, unshard

BUFFER = "momentum_buffer"  # the only state of SGD
STEP = "step"  # AdamW counts the steps of each parameter
ADAMW_BUFFERS = (STEP, "exp_avg", "exp_avg_sq")
# The CPU generator's state: seed (8 bytes), left (4), seeded (4), next (8), 624 words, ...
# It holds 624 random words, of which `left` - 1 are unused, from index `next` on.
GENERATOR_WORDS = 624


@dataclass
class Position:
    """The position in a run, and the sums over the epoch in progress."""

    epoch: int = -1  # last recorded epoch; 0 is the evaluation before training
    step: int = 0  # steps done in the next epoch
    images: int = 0  # seen in these steps
    loss_sum: float = 0.0  # summed over these images
    seconds: float = 0.0  # duration of these steps
    best_error: float = float("inf")
    best_loss: float = float("inf")  # loss of best_epoch; decides between equal errors
    best_epoch: int = -1
    lowest_epoch: int = -1  # the first with best_error, from which --patience counts

    @classmethod
    def from_state(cls, values: dict[str, Any]) -> "Position":
        """Read a position from a checkpoint. Raise ValueError if a value is invalid."""
        position = cls(**values)
        for field in fields(cls):
            value = getattr(position, field.name)
            least = -1 if field.name in ("epoch", "best_epoch", "lowest_epoch") else 0
            if type(value) is not field.type or (field.name != "loss_sum" and not value >= least):
                raise ValueError(f"{field.name} cannot be {value!r}")
        return position


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
    group: Group,
    more: dict[str, Any] | None = None,
) -> Checkpoint:
    """Copy the state of a run to the CPU, to be written while training continues.

    A collective call: each process has its own RNG state and, with FSDP, its own shards. `more` is
    added to the state.
    """
    state = {
        "format": FORMAT,
        "position": asdict(position),
        "optimizer": _copy_to_cpu(unshard(optimizer.state_dict()["state"])),
        "rng": group.all_gather(_rng_state(group.device)),
        **_copy_to_cpu(more or {}),
    }
    checkpoint = Checkpoint(_copy_to_cpu(unshard(model.state_dict())), state)
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)  # one synchronization for all copies
    return checkpoint


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group
) -> Position:
    """Load a checkpoint into a model and its optimizer, and return the position.

    The content is validated. Hyperparameters come from the configuration, not from the file.

    Raises:
        CheckpointError: The checkpoint does not match the run.
    """
    state = checkpoint.state
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"expected a checkpoint of format {FORMAT}, got {found}")
    load_weights(model, checkpoint.model)
    try:
        position = Position.from_state(state["position"])
        # Older versions wrote "optimiser".
        optimizer_state = state["optimizer" if "optimizer" in state else "optimiser"]
        _restore_optimizer(optimizer, optimizer_state)
        _restore_rng(state["rng"], group)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint does not match this run: {error!r}") from error
    return position


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load a checkpoint's weights into a model, which may be sharded.

    Raises:
        CheckpointError: A name, shape or dtype differs.
    """
    if isinstance(model, ExternalNetwork) and model.network.state_dict().keys() == weights.keys():
        model = model.network  # the run was trained by `Trainer` on the network itself
    own = model.state_dict()
    if own.keys() != weights.keys():
        missing, more = (
            sorted(map(str, a.keys() - b.keys())) for a, b in ((own, weights), (weights, own))
        )
        raise CheckpointError(
            f"the weights do not match the model: missing {missing}, unknown {more}"
        )
    for name, value in weights.items():
        if problem := mismatch(value, own[name]):
            raise CheckpointError(f"the weights do not match the model: {name}: {problem}")
    model.load_state_dict({k: shard_like(v, own[k]) for k, v in weights.items()})


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[int, Any]) -> None:
    names = ADAMW_BUFFERS if isinstance(optimizer, torch.optim.AdamW) else (BUFFER,)
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    restored: dict[int, dict[str, Tensor | None]] = {}
    for index, buffers in state.items():
        if type(index) is not int or not 0 <= index < len(parameters):
            raise ValueError(f"there is no parameter {index!r}")
        if set(buffers) - set(names):
            raise ValueError(
                f"parameter {index} has {sorted(map(str, buffers))}, expected {', '.join(names)}"
            )
        restored[index] = {
            name: _restored_buffer(index, name, buffers.get(name), parameters[index])
            for name in names
        }
    # Fused optimizers take the buffers of all parameters of a group, or of none.
    trained = {i for i, p in enumerate(parameters) if p.requires_grad}
    for name in names:
        has_buffer = {i for i, buffers in restored.items() if buffers[name] is not None}
        if has_buffer and has_buffer != trained:
            wrong = sorted(has_buffer ^ trained)
            raise ValueError(f"expected a {name} for each trained parameter, not so for {wrong}")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": restored})


def _restored_buffer(index: int, name: str, value: object, like: Tensor) -> Tensor | None:
    """Return a copy of an optimizer's buffer; raise ValueError if it does not match."""
    if value is None:
        return None
    is_step = name == STEP
    if problem := mismatch(value, torch.zeros(()) if is_step else like):
        raise ValueError(f"{name} of parameter {index}: {problem}")
    assert isinstance(value, Tensor)
    if is_step and not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} of parameter {index} cannot be {float(value)}")
    return value.clone() if is_step else _copy_as(value, like)


def mismatch(value: object, like: Tensor) -> str:
    """Return why a tensor cannot take the place of another; "" if it can."""
    if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
        return "expected a dense tensor"
    if value.device.type != "cpu":  # such as meta, which has no memory
        return f"expected a tensor on the CPU, got {value.device}"
    if value.shape != like.shape or value.dtype != like.dtype:
        expected, got = ((tuple(a.shape), a.dtype) for a in (like, value))
        return f"expected shape {expected[0]} and {expected[1]}, got {got[0]} and {got[1]}"
    return ""


def _copy_as(value: Tensor, like: Tensor) -> Tensor:
    """Return a copy in new memory, with the device and the strides of another tensor."""
    if is_sharded(like):
        return shard_like(value.clone(memory_format=torch.contiguous_format), like)
    return torch.empty_like(like, requires_grad=False).copy_(value)


def _rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda


def _restore_rng(states: list[tuple[Tensor, Tensor | None]], group: Group) -> None:
    if group.rank >= len(states):  # the checkpoint is of a run with fewer processes
        return
    cpu, cuda = states[group.rank]
    _check_generator(cpu)
    torch.set_rng_state(cpu)
    if cuda is not None and group.device.type == "cuda":
        torch.cuda.set_rng_state(cuda, group.device)


def _check_generator(state: Tensor) -> None:
    """Raise ValueError if a state makes the generator read past its words.

    torch checks less.
    """
    if type(state) is not Tensor or state.dtype != torch.uint8 or state.ndim != 1:
        raise ValueError("expected the state of a random number generator")
    content = state.contiguous().numpy().tobytes().ljust(24, b"\0")
    left, following = struct.unpack_from("=8xi4xQ", content)
    if not (1 <= left <= GENERATOR_WORDS and left + following <= GENERATOR_WORDS + 1):
        raise ValueError("the state of the random number generator is invalid")


def _copy_to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _empty_on_cpu(value).copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        return {k: _copy_to_cpu(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copy_to_cpu(v) for v in value]
    return value


def _empty_on_cpu(value: Tensor) -> Tensor:
    """Allocate a CPU tensor, pinned for a GPU tensor: the copy is asynchronous.

    torch reuses freed pinned memory, so only the first checkpoint pays for the allocation.
    """
    if value.is_cuda:
        try:
            return torch.empty_like(value, device="cpu", pin_memory=True)
        except RuntimeError:  # no more pinned memory
            pass
    return torch.empty_like(value, device="cpu")
