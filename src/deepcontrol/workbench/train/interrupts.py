"""Handle SIGINT and SIGTERM between two steps. A second SIGINT exits at once."""

import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager

SHOW_CURSOR = "\x1b[?25h"  # progress bars hide it


class Stopped(Exception):  # noqa: N818 (not an error)
    """A signal asked the run to stop, and the current step is finished."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The shell's convention: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signum


class Interrupts:
    """Record the first signal; `signum` is 0 until one arrives."""

    def __init__(self) -> None:
        self.signum = 0

    def raise_if_any(self) -> None:
        """Raise Stopped if a signal has arrived."""
        if self.signum:
            raise Stopped(self.signum)

    def handle(self, signum: int, frame: types.FrameType | None) -> None:
        del frame
        if signum == signal.SIGINT and self.signum:
            if sys.stdout.isatty():
                sys.stdout.write(SHOW_CURSOR + "\n")
                sys.stdout.flush()
            # No cleanup and no waiting for a checkpoint in progress: the previous one is intact.
            os._exit(128 + signum)
        self.signum = self.signum or signum


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Handle both signals while the block runs. Only a main thread receives signals."""
    received = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {s: signal.signal(s, received.handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
