"""Checkpoints that survive whatever happens while they are written, and say so if they did not.

A checkpoint is a folder of plain files:

    model.safetensors    the model's parameters and buffers
    state.pt             everything else (optimizer, RNG, position), loaded with weights_only=True
    digest.json          the size and SHA-256 of each

It is written beside its place, synced to the disk and renamed, so that at every moment a whole one
is there: `last`, or `previous`, the one before. One whose digests don't match is passed over.
"""

import hashlib
import json
import os
import pickle  # for the name of its error alone
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..runfolder import BEST, LAST, PREVIOUS

MODEL, STATE, DIGEST = "model.safetensors", "state.pt", "digest.json"


class CheckpointError(OSError):
    """A checkpoint that is torn, changed, missing or cannot be written: which file, and why."""


@dataclass(frozen=True)
class Checkpoint:
    model: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.model.values()) + _nbytes(self.state)


def save_last(run: Path, checkpoint: Checkpoint, last_is_whole: bool = False) -> None:
    """Save as `last`, and keep what was `last` as `previous`, unless it is torn.

    Whether it is, is looked up unless the caller knows: a torn one in the place of a whole one
    would leave nothing to go back to.
    """
    fresh = _write_beside(run / LAST, checkpoint)
    if (run / LAST).exists() and not last_is_whole and not is_whole(run / LAST):
        shutil.rmtree(run / LAST)
    if (run / LAST).exists():
        shutil.rmtree(run / PREVIOUS, ignore_errors=True)
        (run / LAST).rename(run / PREVIOUS)  # from here on `previous` is the whole one
    fresh.rename(run / LAST)
    _sync(run)


def save_best(run: Path, checkpoint: Checkpoint) -> None:
    """Save as `best`, in the place of what was."""
    fresh, old = _write_beside(run / BEST, checkpoint), _replaced(run / BEST)
    shutil.rmtree(old, ignore_errors=True)
    if (run / BEST).exists():
        (run / BEST).rename(old)
    fresh.rename(run / BEST)
    _sync(run)
    shutil.rmtree(old, ignore_errors=True)


def find(run: Path, name: str) -> Path:
    """The folder of a run's checkpoint; ValueError if there is none."""
    folder = run / name
    if not folder.is_dir() and not _replaced(folder).is_dir():
        raise ValueError(
            f"{run} has no checkpoint {name!r} (yet; runs of a study keep theirs only if asked to, "
            "with --keep-checkpoints)"
        )
    return folder


def _replaced(folder: Path) -> Path:
    """Where a checkpoint is while another takes its place."""
    return folder.with_name(f".{folder.name}.old")


def _found(folder: Path) -> Path:
    """Itself, or what it was to replace, if whoever renamed them was stopped in between."""
    replaced = _replaced(folder)
    return replaced if not folder.exists() and replaced.exists() else folder


def load(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, once every byte of it is what was written."""
    folder = _found(folder)
    verify(folder)
    try:
        model = load_file(folder / MODEL)
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{folder / STATE} holds more than tensors and numbers") from error
    except (SafetensorError, RuntimeError, OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return Checkpoint(model, state)


def load_last(run: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """`last`, or `previous` where that is torn, with a word about it; None if there is neither."""
    found = [run / name for name in (LAST, PREVIOUS) if (run / name).exists()]
    for folder in found:
        try:
            return load(folder)
        except CheckpointError as error:
            say(f"passed over: {error}")
    if found:
        raise CheckpointError(f"no checkpoint of {run} can be read")
    return None


def verify(folder: Path) -> None:
    """CheckpointError unless every file is there, of the size and digest that were written."""
    try:
        text = (folder / DIGEST).read_bytes()
        written = json.loads(text)
        if text != _digest_text(written) or set(written) != {MODEL, STATE}:
            raise ValueError("it is not what was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / DIGEST} cannot be read: {error}") from error
    for name, about in written.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else 0
        if size != about["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes, not {about['bytes']}")
        if _sha256(path.read_bytes()) != about["sha256"]:
            raise CheckpointError(f"{path} is not what was written: its digest differs")


def is_whole(folder: Path) -> bool:
    """Whether all that was written of a checkpoint is there, if only by its former name."""
    try:
        verify(_found(folder))
    except CheckpointError:
        return False
    return True


def _write_beside(folder: Path, checkpoint: Checkpoint) -> Path:
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        _write(fresh, checkpoint)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch has RuntimeErrors for it
        shutil.rmtree(fresh, ignore_errors=True)  # so that the room is there for others
        raise CheckpointError(
            f"{folder} could not be written ({_reason(error)}). It needs about "
            f"{checkpoint.nbytes:,} bytes. What was saved before is as it was."
        ) from error
    return fresh


def _reason(error: BaseException | None) -> str:
    """What the system said, where torch has wrapped it into words of its own."""
    first = error
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return str(first)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    folder.mkdir(parents=True)
    # Apart from each other and contiguous: safetensors takes nothing else, and filters on a GPU are
    # channels_last.
    model = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in checkpoint.model.items()
    }
    save_file(model, folder / MODEL)
    with (folder / STATE).open("wb") as file:  # Python's file says when the disk is full: _reason
        torch.save(checkpoint.state, file)
    shutil.copymode(folder / STATE, folder / MODEL)  # safetensors lets nobody else read it
    written = {}
    for name in (MODEL, STATE):
        content = (folder / name).read_bytes()
        written[name] = {"bytes": len(content), "sha256": _sha256(content)}
    (folder / DIGEST).write_bytes(_digest_text(written))
    for name in (MODEL, STATE, DIGEST):
        _sync(folder / name)
    _sync(folder)


def _digest_text(written: dict[str, dict[str, Any]]) -> bytes:
    """As it is written, byte for byte: a flipped bit is another text, or another digest."""
    files = {k: {what: written[k][what] for what in ("bytes", "sha256")} for k in (MODEL, STATE)}
    return (json.dumps(files, indent=2) + "\n").encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sync(path: Path) -> None:
    """Until the disk has it: a file's bytes, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_nbytes(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(v) for v in value)
    return 0
