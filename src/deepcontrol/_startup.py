"""Import torch quietly, before anything else of this package."""

import itertools
import signal
import sys
import types
import warnings
from pathlib import Path


def is_command(arguments: list[str]) -> bool:
    """Return whether this process is `deepcontrol` or `python -m deepcontrol`.

    >>> is_command(["/usr/bin/deepcontrol", "train"]), is_command(["my_training.py", "deepcontrol"])
    (True, False)
    """
    # While `python -m` imports the package, the first argument is "-m".
    of_module = ("-m", "deepcontrol") in itertools.pairwise(sys.orig_argv)
    first = arguments[0] if arguments else ""
    return Path(first).name == "deepcontrol" or (first == "-m" and of_module)


def _end_quietly(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Report an exception as Python does, but a Ctrl-C without a traceback."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if is_command(sys.argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    sys.excepthook = _end_quietly  # importing torch takes seconds, in which a user may press Ctrl-C

with warnings.catch_warnings():
    # Without NumPy torch warns when it is imported. The library does not need NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch  # noqa: F401
