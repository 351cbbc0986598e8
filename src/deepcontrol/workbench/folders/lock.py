"""The lock of a run folder, which its training process holds.

The lock is held on the open file `lock`, not on its name. If the file is deleted or the folder is
renamed, another process can lock a new file of that name. `RunLock.check` therefore compares the
held file with the one in the folder; a run checks it at every save.
"""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LOCK = "lock"


class RunInUseError(OSError):
    """Another process is training in this run folder."""


class LockLostError(OSError):
    """The lock file or the run folder was deleted, moved or replaced during a run."""


class RunLock:
    """A held lock.

    Args:
        run: Run folder.
        file: The lock file, open and locked.
        is_new: Whether this process created the file.
    """

    def __init__(self, run: Path, file: TextIO, is_new: bool) -> None:
        self.run, self.is_new, self._file = run, is_new, file

    @property
    def is_valid(self) -> bool:
        """Whether the folder's lock file is the one that is held."""
        try:
            found = os.stat(self.run / LOCK, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._file.fileno()))

    def check(self) -> None:
        """Raise LockLostError unless this process still holds the folder's lock."""
        if not self.is_valid:
            raise LockLostError(
                f"{self.run / LOCK} is no longer the file that this process has locked: the lock "
                "or the folder was deleted, moved or replaced during the run. Nothing more is "
                "written. To continue, run the same command with --out naming the folder that "
                "holds the run's checkpoints."
            )

    def remove(self) -> None:
        """Delete the lock file, if it is still the held one."""
        if self.is_valid:
            (self.run / LOCK).unlink()


@contextmanager
def lock(run: Path, prepare: Callable[[bool], None] = lambda is_new: None) -> Iterator[RunLock]:
    """Hold the run folder's lock while the block runs.

    The kernel releases the lock when its process ends, however it ends, so there are no stale
    locks. The text of the lock file names the holder.

    Args:
        run: Run folder, created if it is missing.
        prepare: Called with whether the lock file is new. For a new one it is called before the
            file is created, so that a folder with a lock is always prepared, even after a kill.

    Raises:
        RunInUseError: Another process holds the lock.
    """
    run.mkdir(parents=True, exist_ok=True)
    is_new = not os.path.lexists(run / LOCK)
    if is_new:
        prepare(is_new)
    # Closing the file releases the lock. The file stays, so that the next process locks the same.
    with _acquire(run) as file:
        held = RunLock(run, file, is_new)
        if not is_new:
            prepare(is_new)
        yield held


def _acquire(run: Path) -> TextIO:
    """Open and lock the lock file, and write this process's name into it."""
    # Truncated only once the lock is held, because the text names the holder.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            file = open(os.open(run / LOCK, flags, 0o666), "a+")  # noqa: SIM115
        except OSError as error:
            raise OSError(
                f"cannot lock {run / LOCK} ({error.strerror}); expected a regular file: remove it, "
                "or choose another --out"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(1000).strip() or "another process"
            file.close()
            raise RunInUseError(
                f"{run} is in use by {holder}; wait for it to finish or choose another --out"
            ) from None
        if RunLock(run, file, is_new=False).is_valid:  # else its holder has just deleted it
            if os.fstat(file.fileno()).st_nlink > 1:  # its text would appear in the other file too
                file.close()
                raise OSError(
                    f"cannot lock {run / LOCK}: it is a hard link to another file; remove it"
                )
            break
        file.close()
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def is_locked(run: Path) -> bool:
    """Return whether a process is training in a run folder."""
    try:
        with open(os.open(run / LOCK, os.O_RDONLY | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False
