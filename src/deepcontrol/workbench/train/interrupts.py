"""SIGTERM and SIGINT: noted, and acted on between two steps. A second SIGINT leaves at once."""

import os
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

SHOW_CURSOR = "\x1b[?25h"  # which a progress bar hides


class Stopped(Exception):  # noqa: N818 (nothing went wrong)
    """Somebody asked for an end, and the step at hand is done."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """As a shell has it: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signum


class Interrupts:
    """Which signal has arrived: 0 for none."""

    def __init__(self) -> None:
        self.signum = 0

    def raise_if_any(self) -> None:
        """Stopped, if a signal has arrived."""
        if self.signum:
            raise Stopped(self.signum)

    def note(self, signum: int, frame: types.FrameType | None) -> None:
        del frame
        if signum == signal.SIGINT and self.signum:
            if sys.stdout.isatty():
                sys.stdout.write(SHOW_CURSOR + "\n")
                sys.stdout.flush()
            # At once: no clean-up, no waiting for a checkpoint that is being written. The one
            # before is whole.
            os._exit(128 + signum)
        self.signum = self.signum or signum


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Take the two signals for the time of the block."""
    noted = Interrupts()
    before = {s: signal.signal(s, noted.note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
