"""The `deepcontrol` command, also run by `python -m deepcontrol`."""

import os
import signal
import sys

from . import __version__
from .workbench import COMMANDS


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
        return _without_workbench(error.name or "")
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


def _without_workbench(missing: str) -> int:
    """Say which extra a command needs. `--help` lists the commands."""
    extra = "export" if sys.argv[1:2] == ["export"] else "workbench"  # export includes it
    install = f'In a clone of the repository, run: pip install ".[{extra}]"'
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print("usage: deepcontrol COMMAND ...", "", *_listed(), "", sep="\n")
        print(
            f"The commands need the extra [{extra}], which is not installed. {install}\n"
            "(export to ONNX: [export], volumes: [medical], COCO: [coco]). The library "
            "(import deepcontrol) needs only torch."
        )
        return 0 if len(sys.argv) > 1 else 2
    print(
        f"deepcontrol: {missing} is not installed; the command line needs the {extra} extra. "
        f"{install}",
        file=sys.stderr,
    )
    return 2


def _listed() -> list[str]:
    width = max(map(len, COMMANDS)) + 2
    return [f"  {name:{width}}{summary}" for name, summary in COMMANDS.items()]


def _is_third_party(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in ("deepcontrol", "streets") and top not in sys.stdlib_module_names


if __name__ == "__main__":
    sys.exit(main())
