"""One process to a run folder.

The lock is the kernel's, on the file `lock`: it is gone with the process that held it, however that
ended, so a dead one's is simply taken over. The file's text says who holds it.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_locked(run: Path) -> bool:
    """Whether a process is at work in a run folder; nothing is made or changed."""
    try:
        with (run / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


class RunInUseError(OSError):
    """Somebody else is at work in that folder."""


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the run folder for the time of the block, or say who holds it: RunInUseError."""
    run.mkdir(parents=True, exist_ok=True)
    # Not emptied before the lock is ours, as it names the holder; and no link is followed, since a
    # run folder may come from elsewhere.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with open(os.open(run / "lock", flags, 0o666), "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise RunInUseError(
                f"{run} is in use by {holder}: wait for it, or choose another --out"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield  # closing the file lets go of the lock; the file stays, or two could lock two files
