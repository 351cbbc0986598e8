"""The `deepcontrol` command, also run by `python -m deepcontrol`."""

import os
import signal
import sys

from . import __version__


def main() -> int:
    """Run the command line and return the exit code.

    Without the workbench extra, print how to install it. A closed pipe
    (`deepcontrol --help | head -1`) and Ctrl-C end the command without a message.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"deepcontrol {__version__}")
        return 0
    try:
        from .workbench.cli import main as run
    except ModuleNotFoundError as error:
        if not _is_third_party(error.name or ""):
            raise
        extra = "export" if sys.argv[1:2] == ["export"] else "workbench"  # export includes it
        print(
            f"deepcontrol: {error.name} is not installed; the command line needs the {extra} "
            f'extra. In a clone of the repository, run: pip install ".[{extra}]"',
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:  # the imports take seconds
        return 128 + signal.SIGINT
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()  # here, since the interpreter would report a closed pipe at its end
    except BrokenPipeError:
        # Python's final flush must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _is_third_party(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in ("deepcontrol", "streets") and top not in sys.stdlib_module_names


if __name__ == "__main__":
    sys.exit(main())
