"""Explain the exception that ended a command in a line."""

import errno
import os
import resource
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from .train.distributed import peak_mib
from .train.faults import FaultError, is_device_failure, is_out_of_memory

# What to change if a command runs out of memory. `train` finds a batch size that fits by itself.
LESS_MEMORY = {
    "train": "Choose a smaller --batch-size, --size or --width.",
    "eval": "Choose a smaller --batch-size.",
    "predict": "Choose a smaller --tile.",
    "export": "Export on a machine with more memory.",
    "report": "Report on fewer runs at a time.",
    "reproduce": "Choose fewer --slots, or a smaller --at-once.",
    "bench": "Choose fewer --batches, or --only smaller networks.",
    "demo": "Close other programs.",
    "data": "Check or draw on a machine with more memory.",
    "doctor": "Close other programs.",
}


def explain(error: Exception, name: str, out: Path | None) -> str:
    """Return the message for an exception that ended a command.

    Expected errors explain themselves. A full disk and exhausted memory get their
    numbers, and a failed GPU is reported as such. Anything else is a bug: its traceback is saved to
    a file that the message names.

    Args:
        error: The exception.
        name: The command, such as "train".
        out: Folder or file that the command writes to, if it is known.
    """
    if is_device_failure(error):
        return device_failed(error)
    if isinstance(error, FaultError):
        return str(error)
    if is_out_of_memory(error):
        return memory_exhausted(error, name)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return disk_full(error, out)
    if has_no_descriptor(error):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"too many open files: this process may open {limit}. Raise it with `ulimit -n`."
    if isinstance(error, (ValueError, OSError)):  # a DataError is a ValueError
        return str(error)
    return unforeseen(error)


def has_no_descriptor(error: BaseException | None) -> bool:
    """Return whether an exception, or its cause, is a lack of file descriptors.

    Libraries report other errors in its place, such as source code that they cannot read.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave_if_device_failed(error: Exception) -> None:
    """Exit at once, with code 1, if an error says that the GPU failed.

    Destructors of CUDA objects would abort the process (SIGABRT) in Python's shutdown.
    """
    if is_device_failure(error):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def disk_full(error: OSError, out: Path | None) -> str:
    """Return the path that could not be written, and the free space."""
    if error.filename is None and out is None:
        return str(error)
    path = Path(os.fsdecode(error.filename or out or "."))
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return (
        f"{path} could not be written: the disk is full, "
        f"{shutil.disk_usage(existing).free:,} bytes are free"
    )


def memory_exhausted(error: Exception, name: str) -> str:
    """Return where memory ran out, its peak, the cause, and what to change."""
    device = torch.device("cpu")
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        device = torch.device("cuda")
    cause = _first_line(error)
    return (
        f"out of memory on {device} (peak {peak_mib(device):,.0f} MiB{': ' * bool(cause)}{cause}). "
        f"{LESS_MEMORY.get(name, LESS_MEMORY['doctor'])}"
    )


def device_failed(error: Exception) -> str:
    """Return that the GPU failed, and where the traceback is.

    The cause may be a kernel of ours.
    """
    what = f"the GPU failed: {_first_line(error)}. `deepcontrol doctor` tests the device."
    if isinstance(error, FaultError):
        what = str(error)
    try:
        return f"{what} The calls that led to it are in {save_traceback(error)}"
    except OSError:
        return what


def unforeseen(error: Exception) -> str:
    """Save the traceback of an unexpected exception; return its first line and place."""
    what = f"unexpected {type(error).__name__}: {_first_line(error)}"
    try:
        path = save_traceback(error)
    except OSError as problem:
        return f"{what}. Its traceback could not be saved: {problem}"
    return f"{what}. This is a bug in deepcontrol; please report it with its traceback, {path}"


def save_traceback(error: Exception) -> str:
    """Write the traceback of an exception to a temporary file and return its path."""
    with tempfile.NamedTemporaryFile(
        "w",
        prefix="deepcontrol-",
        suffix=".txt",
        delete=False,
        encoding="utf-8",
        errors="backslashreplace",
    ) as file:
        file.write("".join(traceback.format_exception(error)))
    return file.name


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]
