"""A run in a process of its own, which ends with whoever started it.

python -m deepcontrol.workbench.study.worker CONFIG trains what the JSON says. Its standard input is
a pipe that nobody writes to: once it closes, because the process at its other end is gone, the run
saves and stops as after SIGTERM.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

from rich.console import Console

from ..train.config import Train, from_json, to_json
from ..train.faults import FaultError
from ..train.loop import train

GRACE = 120.0  # seconds to save in, before a process is killed


def worker_command(config: Train, python: str) -> list[str]:
    return [python, "-m", "deepcontrol.workbench.study.worker", json.dumps(to_json(config))]


def stop(process: "subprocess.Popen[str]", seconds: float) -> int:
    """SIGTERM, and SIGKILL if it takes longer than this; returns its exit code."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(max(0.0, seconds))
        process.kill()
    return process.wait()


def main() -> int:
    threading.Thread(target=leave_with_the_other_end, daemon=True).start()
    try:
        return train(from_json(json.loads(sys.argv[1])), Console(width=200))
    except (ValueError, OSError, FaultError) as error:
        print(f"error: {error}", flush=True)
        return 1


def leave_with_the_other_end() -> None:
    with contextlib.suppress(OSError):
        os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
