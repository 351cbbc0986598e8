"""Checkpoints: contents, files, and a thread that writes them.

A checkpoint is a folder of plain files:

    model.safetensors    parameters and buffers
    state.pt             optimizer, RNG states, position; loaded with weights_only=True
    digest.json          size and SHA-256 of the other two

It is written under a temporary name, synced to the disk and renamed. At every moment an intact
checkpoint exists: `last`, or `previous`, the one before. Those with wrong digests are skipped.
"""

import hashlib
import json
import os
import pickle  # only for its error class
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..runfolder import BEST, LAST, PREVIOUS
from .distributed import Group, shard_like, unshard

FORMAT = 1  # format version of state.pt
MODEL, STATE, DIGEST = "model.safetensors", "state.pt", "digest.json"


class CheckpointError(OSError):
    """A checkpoint is missing, damaged, of another run, or cannot be written."""


@dataclass(frozen=True)
class Checkpoint:
    model: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.model.values()) + _nbytes(self.state)


# Contents


@dataclass
class Position:
    """The position in a run, and the sums over the epoch in progress."""

    epoch: int = -1  # last recorded epoch; 0 is the evaluation before training
    step: int = 0  # steps done in the next epoch
    images: int = 0  # seen in these steps
    loss_sum: float = 0.0  # summed over these images
    seconds: float = 0.0  # duration of these steps
    best_error: float = float("inf")
    best_epoch: int = -1

    @classmethod
    def from_state(cls, values: dict[str, Any]) -> "Position":
        """Read a position from a checkpoint. Raise ValueError if a value is invalid."""
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
    """Copy the state of a run to the CPU, to be written while training continues.

    A collective call: each process has its own RNG state and, with FSDP, its own shards.
    """
    state = {
        "format": FORMAT,
        "position": asdict(position),
        "optimizer": _copy_to_cpu(unshard(optimizer.state_dict()["state"])),
        "rng": group.all_gather(_rng_state(group.device)),
    }
    checkpoint = Checkpoint(_copy_to_cpu(unshard(model.state_dict())), state)
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)  # one synchronization for all copies
    return checkpoint


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group
) -> Position:
    """Load a checkpoint into a model and its optimizer, and return the position.

    The content is validated: a momentum buffer of a wrong size would make the fused optimizer
    write outside its memory. Hyperparameters come from the configuration, not from the file.

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
    """Load a checkpoint's weights into a model, which may be sharded."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        missing, more = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        raise CheckpointError(
            f"the weights do not match the model: missing {missing}, unknown {more}"
        )
    for name, value in weights.items():
        if own[name].shape != value.shape:
            raise CheckpointError(
                f"the weights do not match the model: expected {name} of shape "
                f"{tuple(own[name].shape)}, got {tuple(value.shape)}"
            )
    model.load_state_dict({k: shard_like(v, own[k]) for k, v in weights.items()})


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[int, Any]) -> None:
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    restored: dict[int, dict[str, Any]] = {}
    for index, buffers in state.items():
        if type(index) is not int or not 0 <= index < len(parameters):
            raise ValueError(f"there is no parameter {index!r}")
        like = parameters[index]
        restored[index] = {}
        for name, value in buffers.items():
            fits = isinstance(value, Tensor) and value.shape in (like.shape, torch.Size())
            if value is not None and not (fits and value.dtype == like.dtype):
                raise ValueError(f"{name} of parameter {index} has a wrong shape or dtype")
            restored[index][name] = None if value is None else shard_like(value, like)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": restored})


def _rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda


def _restore_rng(states: list[tuple[Tensor, Tensor | None]], group: Group) -> None:
    if group.rank >= len(states):  # the checkpoint is of a run with fewer processes
        return
    cpu, cuda = states[group.rank]
    torch.set_rng_state(cpu)
    if cuda is not None and group.device.type == "cuda":
        torch.cuda.set_rng_state(cuda, group.device)


def _copy_to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _empty_on_cpu(value).copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        return {k: _copy_to_cpu(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copy_to_cpu(v) for v in value]
    return value


def _empty_on_cpu(value: Tensor) -> Tensor:
    """Allocate a CPU tensor; pinned for a GPU tensor, so that the copy is asynchronous.

    torch reuses freed pinned memory, so only the first checkpoint pays for the allocation.
    """
    if value.is_cuda:
        try:
            return torch.empty_like(value, device="cpu", pin_memory=True)
        except RuntimeError:  # no more pinned memory
            pass
    return torch.empty_like(value, device="cpu")


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_nbytes(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(v) for v in value)
    return 0


# Files


def save_last(run: Path, checkpoint: Checkpoint, last_is_intact: bool = False) -> None:
    """Save as `last`, and keep the former `last` as `previous`.

    A damaged `last` must not replace an intact `previous`. It is verified unless the caller knows
    that it is intact.
    """
    new = _write_beside(run / LAST, checkpoint)
    if (run / LAST).exists() and not last_is_intact and not is_intact(run / LAST):
        shutil.rmtree(run / LAST)
    if (run / LAST).exists():
        shutil.rmtree(run / PREVIOUS, ignore_errors=True)
        (run / LAST).rename(run / PREVIOUS)  # `previous` is now the intact one
    new.rename(run / LAST)
    _sync(run)


def save_best(run: Path, checkpoint: Checkpoint) -> None:
    """Save as `best`, replacing the former one."""
    new, old = _write_beside(run / BEST, checkpoint), _replaced(run / BEST)
    shutil.rmtree(old, ignore_errors=True)
    if (run / BEST).exists():
        (run / BEST).rename(old)
    new.rename(run / BEST)
    _sync(run)
    shutil.rmtree(old, ignore_errors=True)


def find(run: Path, name: str) -> Path:
    """Return the folder of a run's checkpoint. Raise ValueError if it does not exist."""
    folder = run / name
    if not folder.is_dir() and not _replaced(folder).is_dir():
        raise ValueError(
            f"{run} has no checkpoint {name!r} (yet). A study keeps the checkpoints of its runs "
            "only with --keep-checkpoints."
        )
    return folder


def load(folder: Path) -> Checkpoint:
    """Load a checkpoint after verifying its digests.

    Raises:
        CheckpointError: A file is missing, damaged, or holds other types than tensors and numbers.
    """
    folder = _existing(folder)
    verify(folder)
    try:
        model = load_file(folder / MODEL)
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{folder / STATE} holds more than tensors and numbers") from error
    except (SafetensorError, RuntimeError, OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return Checkpoint(model, state)


def load_last(run: Path, log: Callable[[str], None]) -> Checkpoint | None:
    """Load `last`, or `previous` if `last` is damaged; None if there is neither."""
    found = [run / name for name in (LAST, PREVIOUS) if (run / name).exists()]
    for folder in found:
        try:
            return load(folder)
        except CheckpointError as error:
            log(f"skipping a damaged checkpoint: {error}")
    if found:
        raise CheckpointError(f"no checkpoint of {run} can be read")
    return None


def verify(folder: Path) -> None:
    """Raise CheckpointError unless every file has the recorded size and digest."""
    try:
        text = (folder / DIGEST).read_bytes()
        written = json.loads(text)
        if text != _digest_text(written) or set(written) != {MODEL, STATE}:
            raise ValueError("unexpected content")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {folder / DIGEST}: {error}") from error
    for name, about in written.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else 0
        if size != about["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes, expected {about['bytes']}")
        if _sha256(path.read_bytes()) != about["sha256"]:
            raise CheckpointError(f"{path} is damaged: its SHA-256 differs from {DIGEST}")


def is_intact(folder: Path) -> bool:
    """Return whether a checkpoint passes `verify`, also under its temporary name."""
    try:
        verify(_existing(folder))
    except CheckpointError:
        return False
    return True


def _replaced(folder: Path) -> Path:
    """Return the temporary name of a checkpoint while it is replaced."""
    return folder.with_name(f".{folder.name}.old")


def _existing(folder: Path) -> Path:
    """Return the folder, or the replaced one if a process died between the two renames."""
    replaced = _replaced(folder)
    return replaced if not folder.exists() and replaced.exists() else folder


def _write_beside(folder: Path, checkpoint: Checkpoint) -> Path:
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        _write(new, checkpoint)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch wraps OSErrors
        shutil.rmtree(new, ignore_errors=True)  # frees the space
        raise CheckpointError(
            f"cannot write {folder} ({_system_error(error)}); it needs about "
            f"{checkpoint.nbytes:,} bytes. Earlier checkpoints are unchanged."
        ) from error
    return new


def _system_error(error: BaseException | None) -> str:
    """Return the operating system's message, which torch may have wrapped."""
    first = error
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return str(first)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    folder.mkdir(parents=True)
    # safetensors requires contiguous tensors that share no memory; GPU filters are channels_last.
    model = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in checkpoint.model.items()
    }
    save_file(model, folder / MODEL)
    with (folder / STATE).open("wb") as file:  # a Python file raises OSError on a full disk
        torch.save(checkpoint.state, file)
    shutil.copymode(folder / STATE, folder / MODEL)  # safetensors creates it with mode 600
    written = {}
    for name in (MODEL, STATE):
        content = (folder / name).read_bytes()
        written[name] = {"bytes": len(content), "sha256": _sha256(content)}
    (folder / DIGEST).write_bytes(_digest_text(written))
    for name in (MODEL, STATE, DIGEST):
        _sync(folder / name)
    _sync(folder)


def _digest_text(written: dict[str, dict[str, Any]]) -> bytes:
    """Return the exact bytes of digest.json, so that a flipped bit in it is detected."""
    files = {k: {key: written[k][key] for key in ("bytes", "sha256")} for k in (MODEL, STATE)}
    return (json.dumps(files, indent=2) + "\n").encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Background writer


class CheckpointWriter:
    """Write checkpoints in a thread, one at a time. The next call raises errors.

    Training never waits for the disk. A checkpoint that arrives while another is being written
    waits, and is replaced by a newer one that arrives before its turn. The same holds for `best`.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._pool = ThreadPoolExecutor(1)
        self._task: Future[None] | None = None
        self._has_written = False  # used by the thread only
        self._lock = Lock()  # protects the three attributes below
        self._last: Checkpoint | None = None
        self._best: Checkpoint | None = None
        self._is_writing = False

    def save(self, checkpoint: Checkpoint, is_best: bool = False) -> None:
        """Queue a checkpoint to be written as `last` and, if it is the best, as `best`."""
        self.check()
        with self._lock:
            self._last = checkpoint
            if is_best:
                self._best = checkpoint
            if not self._is_writing:
                self._is_writing = True
                self._task = self._pool.submit(self._write_all, self._task)

    def check(self) -> None:
        """Raise the error of a write that has failed."""
        if self._task is not None and self._task.done():
            self.wait()

    def wait(self) -> None:
        """Wait until all checkpoints are on the disk."""
        task, self._task = self._task, None
        if task is not None:
            task.result()

    def close(self) -> None:
        """Finish writing, before another process may use the run folder."""
        self._pool.shutdown()

    def _write_all(self, before: Future[None] | None) -> None:
        try:
            if before is not None:
                before.result()  # finished; raises an error that is not reported yet
            while (queued := self._next()) is not None:
                self._write(*queued)
        except BaseException:
            with self._lock:
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
        # `best` first: a run killed in between resumes from before it, and saves it again.
        if best is not None:
            about = {k: best.state[k] for k in ("format", "position")}
            save_best(self.run, Checkpoint(best.model, about))
        save_last(self.run, last, last_is_intact=self._has_written)
        self._has_written = True
