"""Checkpoints: files, and a thread that writes them.

See snapshot.py for their contents.

A checkpoint is a folder of plain files:

    model.safetensors    parameters and buffers
    state.pt             optimizer, RNG states, position; loaded with weights_only=True
    config.json          copy of the run's config.json (older versions wrote none)
    digest.json          size and SHA-256 of the others

It is written under a temporary name, synced to the disk and renamed. At every moment an intact
checkpoint exists: `last`, or `previous`, the one before. Those with wrong digests are skipped.
The digest covers the configuration, so that weights are never used with other settings or class
names than those they were trained with.
"""

import hashlib
import json
import pickle  # only for its error class
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from ..folders.runfolder import (
    BEST,
    CONFIG,
    LAST,
    PREVIOUS,
    changed_values,
    parse_config,
    read_config,
)
from ..folders.storage import (
    parse_json,
    parse_object,
    read_bytes,
    remove_tree,
    replacing,
    sync,
    write_atomic,
)
from .config_file import changeable

FORMAT = 1  # format version of state.pt
MODEL, STATE, DIGEST = "model.safetensors", "state.pt", "digest.json"
MAX_DIGEST_BYTES = 10_000


class CheckpointError(OSError):
    """A checkpoint is missing, damaged, of another run, or cannot be written."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        model: Parameters and buffers.
        state: Optimizer, RNG states, position.
        config: Content of the run's config.json; empty in checkpoints of older versions.
    """

    model: dict[str, Tensor]
    state: dict[str, Any]
    config: bytes = b""

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.model.values()) + _nbytes(self.state)


def save_last(run: Path, checkpoint: Checkpoint, last_is_intact: bool = False) -> None:
    """Save as `last`, and keep the former `last` as `previous`.

    A damaged `last` must not replace an intact `previous`. It is verified unless the caller knows
    that it is intact.
    """
    with _written_beside(run / LAST, checkpoint) as new:
        _drop_link(run / LAST)
        if (run / LAST).exists() and not last_is_intact and not is_intact(run / LAST):
            remove_tree(run / LAST)
        if (run / LAST).exists():
            remove_tree(run / PREVIOUS)
            (run / LAST).rename(run / PREVIOUS)  # `previous` is now the intact one
        new.rename(run / LAST)
        sync(run)


def save_best(run: Path, checkpoint: Checkpoint) -> None:
    """Save as `best`, replacing the former one."""
    with _written_beside(run / BEST, checkpoint) as new:
        old = _replaced(run / BEST)
        remove_tree(old)
        _drop_link(run / BEST)
        if (run / BEST).exists():
            (run / BEST).rename(old)
        new.rename(run / BEST)
        sync(run)
        remove_tree(old)


def find(run: Path, name: str) -> Path:
    """Return the folder of a run's checkpoint. Raise ValueError if it does not exist."""
    folder = run / name
    if not folder.is_dir() and not _replaced(folder).is_dir():
        raise ValueError(
            f"{run} has no checkpoint {name!r}: none was saved yet, or its study deleted it. "
            f"Resume the run with `deepcontrol train --out {run}`; `deepcontrol reproduce` keeps "
            "checkpoints with --keep-checkpoints."
        )
    return folder


def load(folder: Path) -> Checkpoint:
    """Load a checkpoint after verifying its digests.

    Raises:
        CheckpointError: A file is missing, damaged, or holds other types than tensors and numbers.
    """
    folder = _existing(folder)
    names = verify(folder)
    try:
        model = load_tensors((folder / MODEL).read_bytes())
        _refuse_compressed(folder / STATE)
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        config = (folder / CONFIG).read_bytes() if CONFIG in names else b""
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{folder / STATE} holds more than tensors and numbers") from error
    except MemoryError:
        raise
    except Exception as error:  # the readers raise anything on a file that was made to harm
        raise CheckpointError(f"{folder}: {error or type(error).__name__}") from error
    return Checkpoint(model, state, config)


def _refuse_compressed(path: Path) -> None:
    """Raise ValueError if a ZIP file is compressed.

    torch writes none, but would inflate any.
    """
    with zipfile.ZipFile(path) as file:
        for about in file.infolist():
            if about.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{about.filename} in {path.name} is compressed")


def load_of_run(run: Path, name: str) -> Checkpoint:
    """Load a run's checkpoint after comparing its configuration with config.json.

    Raises:
        ValueError: There is no such checkpoint.
        CheckpointError: It is damaged, or was trained with another configuration.
    """
    checkpoint = load(find(run, name))
    check_config(run, name, checkpoint.config)
    return checkpoint


def check_config(run: Path, name: str, config: bytes) -> None:
    """Raise CheckpointError if config.json differs from a checkpoint's copy of it.

    Settings that may change when a run is resumed are not compared. A damaged copy is ignored here:
    the digest of its checkpoint reports it.

    Args:
        run: Run folder.
        name: Name of the checkpoint.
        config: Content of the copy; empty in checkpoints of older versions.
    """
    try:
        kept = parse_config(parse_object(config)[0])
    except ValueError:
        return
    if changed := changed_values(read_config(run), kept, changeable(kept)):
        raise CheckpointError(
            f"{run / CONFIG} has changed since {run / name} was saved: {', '.join(changed)}. "
            f"To restore it: cp {run / name / CONFIG} {run / CONFIG}"
        )


def load_last(run: Path, log: Callable[[str], None]) -> tuple[str, Checkpoint] | None:
    """Load `last`, or `previous` if `last` is damaged; None if there is neither."""
    found = [name for name in (LAST, PREVIOUS) if (run / name).exists()]
    for name in found:
        try:
            return name, load(run / name)
        except CheckpointError as error:
            log(f"skipping a damaged checkpoint: {error}")
    if found:
        raise CheckpointError(f"no checkpoint of {run} can be read")
    return None


def verify(folder: Path) -> list[str]:
    """Return the names of the files; raise CheckpointError if one is not as recorded."""
    try:
        text = read_bytes(folder / DIGEST, MAX_DIGEST_BYTES)
        written = parse_json(text)
        if text != _digest_text(written):
            raise ValueError("unexpected content")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {folder / DIGEST}: {error}") from error
    for name, about in written.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != about["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes, expected {about['bytes']}")
        if _sha256(path) != about["sha256"]:
            raise CheckpointError(f"{path} is damaged: its SHA-256 differs from {DIGEST}")
    return list(written)


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
    """Return the folder, or the replaced one if a process died between renames."""
    replaced = _replaced(folder)
    return replaced if not folder.exists() and replaced.exists() else folder


def _drop_link(folder: Path) -> None:
    """Remove a symbolic link at a checkpoint's place; its target stays."""
    if folder.is_symlink():
        folder.unlink()


@contextmanager
def _written_beside(folder: Path, checkpoint: Checkpoint) -> Iterator[Path]:
    """Write a checkpoint under a temporary name, for the block to rename."""
    new = folder.with_name(f".{folder.name}.new")
    try:
        remove_tree(new)
        _write(new, checkpoint)
        yield new
    except (OSError, RuntimeError, SafetensorError) as error:  # torch wraps OSErrors
        with suppress(OSError):
            remove_tree(new)  # frees the space
        raise CheckpointError(
            f"cannot write {folder} ({_system_error(error)}); it needs about "
            f"{checkpoint.nbytes:,} bytes. Earlier checkpoints are unchanged."
        ) from error


def _system_error(error: BaseException | None) -> str:
    """Return the operating system's message, which torch may have wrapped."""
    first = error
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return str(first)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    folder.mkdir()  # without its parents: the run folder may have been moved
    # safetensors requires contiguous tensors that share no memory; GPU filters are channels_last.
    model = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in checkpoint.model.items()
    }
    write_atomic(folder / MODEL, save_tensors(model))
    with replacing(folder / STATE) as file:
        torch.save(checkpoint.state, file)
    names = [MODEL, STATE]
    if checkpoint.config:
        write_atomic(folder / CONFIG, checkpoint.config)
        names.append(CONFIG)
    files = {
        n: {"bytes": (folder / n).stat().st_size, "sha256": _sha256(folder / n)} for n in names
    }
    write_atomic(folder / DIGEST, _digest_text(files))


def _digest_text(written: dict[str, dict[str, Any]]) -> bytes:
    """Return the exact bytes of digest.json, so that a flipped bit in it is detected."""
    names = (MODEL, STATE, CONFIG) if CONFIG in written else (MODEL, STATE)
    files = {name: {key: written[name][key] for key in ("bytes", "sha256")} for name in names}
    return (json.dumps(files, indent=2) + "\n").encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_nbytes(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(v) for v in value)
    return 0


# Background writer


class CheckpointWriter:
    """Write checkpoints in a thread, one at a time. The next call raises errors.

    Training never waits for the disk. A checkpoint that arrives while another is being written
    waits, and is replaced by a newer one that arrives before its turn. The same holds for `best`.

    Args:
        run: Run folder.
        config: Content of its config.json.
        before_write: Called before each write; raises if the folder must not be written to.
    """

    def __init__(
        self, run: Path, config: bytes = b"", before_write: Callable[[], None] = lambda: None
    ) -> None:
        self.run, self.config, self._before_write = run, config, before_write
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
        self._before_write()
        try:
            self._write_files(last, best)
        except OSError:
            self._before_write()  # the folder may have been moved meanwhile
            raise

    def _write_files(self, last: Checkpoint, best: Checkpoint | None) -> None:
        # `best` first: a run killed in between resumes from before it, and saves it again.
        if best is not None:
            about = {k: best.state[k] for k in ("format", "position")}
            save_best(self.run, Checkpoint(best.model, about, self.config))
        last = replace(last, config=self.config)
        save_last(self.run, last, last_is_intact=self._has_written)
        self._has_written = True
