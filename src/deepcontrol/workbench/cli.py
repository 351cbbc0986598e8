"""The command line: parse arguments, run the command, explain errors in a line.

tyro shows an optional number as `{None}|INT` with "(default: None)". Here it is `INT`, and the
description says what happens without it.
"""

import ast
import dataclasses
import errno
import inspect
import itertools
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import textwrap
import traceback
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from . import COMMANDS
from .bench import Bench, run_bench
from .data import DATASET_NAMES
from .data_commands import ACTIONS, Check, Data, Init, Sheet, run_check, run_init, run_sheet
from .demo import Demo, run_demo
from .export import Export, run_export
from .folders.runfolder import CONFIG
from .hardware import Doctor, run_doctor
from .predict import Predict, run_predict
from .report import Report, run_report
from .study.command import run_reproduce
from .study.settings import Reproduce
from .terminal import SafeConsole, printable
from .train import Eval, TrainCommand, run_eval, run_train
from .train.config_file import check_code, load_config
from .train.distributed import peak_mib
from .train.faults import FaultError, is_device_failure, is_out_of_memory

# The settings class of each command.
SETTINGS: dict[str, type[Any]] = {
    "train": TrainCommand,
    "eval": Eval,
    "predict": Predict,
    "export": Export,
    "report": Report,
    "reproduce": Reproduce,
    "bench": Bench,
    "data": Data,
    "demo": Demo,
    "doctor": Doctor,
}
T = TypeVar("T")
_ARG = type(tyro.conf.arg())
REGISTRY = ConstructorRegistry()
CONFIGURATION = (tyro.conf.OmitSubcommandPrefixes,)


def main(args: list[str] | None = None) -> int:
    """Run a command and return the exit code."""
    args = sys.argv[1:] if args is None else args
    console, command = SafeConsole(), None
    try:
        command = parse(args)
        return run(command, console)
    except BrokenPipeError as error:
        print(flush=True)  # raises again if the closed pipe is standard output
        print_error("error", str(error), SafeConsole(stderr=True))
        return 1
    except Exception as error:
        message = explain(error, args[0] if args else "", written_to(command))
        print_error("error", message, SafeConsole(stderr=True))
        leave_if_device_failed(error)
        return 1
    except KeyboardInterrupt:  # train and reproduce handle SIGINT themselves
        return 128 + signal.SIGINT


def run(command: object, console: Console) -> int:
    """Run the command of these settings and return the exit code."""
    match command:
        case TrainCommand():
            return run_train(command, console)
        case Eval():
            return run_eval(command, console)
        case Predict():
            return run_predict(command, console, SafeConsole(stderr=True))
        case Export():
            return run_export(command, console)
        case Report():
            return run_report(command, console)
        case Reproduce():
            return run_reproduce(command, console)
        case Bench():
            return run_bench(command, console)
        case Init():
            return run_init(command, console)
        case Check():
            return run_check(command, console)
        case Sheet():
            return run_sheet(command, console)
        case Demo():
            return run_demo(command, console)
        case Doctor():
            return run_doctor(console)
    raise AssertionError(command)


def parse(args: list[str]) -> object:
    """Parse the command line to the settings of a command.

    For `train` with the folder of an existing run, that run's settings are the defaults.
    """
    refuse_empty(args)
    if not args or args[0] not in COMMANDS:  # help, or an error
        about = "AGC (automatic gain control): train, evaluate and benchmark networks."
        listed = {name: (SETTINGS[name], summary) for name, summary in COMMANDS.items()}
        return overview(listed, args, "deepcontrol", f"{about} --version prints the version.")
    name, *flags = args
    if name == "data":
        if not flags or flags[0] not in ACTIONS:
            return overview(ACTIONS, flags, "deepcontrol data", COMMANDS["data"])
        action, *flags = flags
        return parse_settings(ACTIONS[action][0], flags, prog=f"deepcontrol data {action}")
    shared: dict[str, Any] = {"prog": f"deepcontrol {name}", "config": CONFIGURATION}
    if name == "train" and (run := _run_folder(flags)) is not None and (run / CONFIG).exists():
        started = load_config(run)[0]
        if started.data in DATASET_NAMES:
            raise ValueError(
                f"{run} was started from Python with a torch Dataset, which this command cannot "
                "open: resume it with deepcontrol.workbench.train.Trainer, or choose another --out"
            )
        before = TrainCommand(**vars(started))
        command = parse_settings(TrainCommand, flags, before, **shared)
        given = any(flag.partition("=")[0] == "--model" for flag in flags)
        check_code(command, run, command.model if given else None)
        return command
    return parse_settings(SETTINGS[name], flags, **shared)


def refuse_empty(args: list[str]) -> None:
    """Exit with code 2 if a value is empty, as after `--out "$UNSET"`.

    An empty path would mean the current folder, and an empty list all of a kind.
    """
    for previous, word in itertools.pairwise(["", *args]):
        if word and not (word.startswith("--") and word.endswith("=")):
            continue
        flag = word.removesuffix("=") or previous
        place = f"{flag} is empty" if flag.startswith("--") else "an argument is empty"
        message = f"{place}: pass a value, or omit it. Is a variable of the shell unset?"
        print_error("error", message, SafeConsole(stderr=True))
        raise SystemExit(2)


def _run_folder(flags: list[str]) -> Path | None:
    """Return the value of --out.

    The other flags may be valid only with the run's settings.
    """
    values = [value for flag, value in itertools.pairwise([*flags, ""]) if flag == "--out"]
    values += [flag.removeprefix("--out=") for flag in flags if flag.startswith("--out=")]
    return Path(values[-1]) if values else None


def overview(
    commands: Mapping[str, tuple[type[Any], str]], args: list[str], prog: str, description: str
) -> Any:
    """Let tyro list commands, one line each, or report that none of them was given."""
    listed = tuple(
        Annotated[tidied(settings), tyro.conf.subcommand(name, description=summary)]
        for name, (settings, summary) in commands.items()
    )
    choice: Any = Union[listed]  # noqa: UP007
    return tyro.cli(
        choice,
        args=args,
        prog=prog,
        description=description,
        config=CONFIGURATION,
    )


def written_to(command: object) -> Path | None:
    """Return the folder or file that a command writes to, if it is known."""
    return getattr(command, "out", None) or getattr(command, "run", None)


def print_error(kind: str, message: str, console: Console) -> None:
    # Escaped, because a path may contain rich markup.
    text = f"[bold red]{kind}:[/] {escape(message)}"
    try:
        console.print(text, highlight=False, soft_wrap=True)
    except BrokenPipeError:
        raise
    except (OSError, MemoryError, RuntimeError):  # no memory or descriptor is left for colors
        print(f"{kind}: {printable(message)}", file=sys.stderr)


# Help


@REGISTRY.primitive_rule
def optional(
    info: PrimitiveTypeInfo,
) -> PrimitiveConstructorSpec[Any] | UnsupportedTypeAnnotationError | None:
    """Read a value of type `X | None` as an X."""
    if info.type_origin not in (typing.Union, types.UnionType):
        return None
    options = [option for option in typing.get_args(info.type) if option is not types.NoneType]
    if len(options) != 1:
        return None
    of_value = PrimitiveTypeInfo.make(options[0], parent_markers=info.markers)
    spec = ConstructorRegistry.get_primitive_spec(of_value)
    if isinstance(spec, UnsupportedTypeAnnotationError):
        return spec
    return dataclasses.replace(
        spec,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: (
            ["None"] if value is None else spec.str_from_instance(value)
        ),
    )


def parse_settings(
    settings: type[T], args: list[str], default: T | None = None, **options: Any
) -> T:
    """Parse arguments to a dataclass as tyro.cli does, with tidied help.

    Args:
        settings: A dataclass. Its fields are described by strings below them.
        args: The arguments.
        default: Values for the arguments that are not given.
        options: For tyro.cli.
    """
    if not dataclasses.fields(settings):  # type: ignore[arg-type]
        return tyro.cli(settings, args=args, registry=REGISTRY, **options)
    tidy = tidied(settings)
    if default is not None:
        options["default"] = tidy(**vars(default))
    found = tyro.cli(tidy, args=args, registry=REGISTRY, **options)
    return settings(**vars(found))


def tidied(settings: type[T]) -> type[Any]:
    """Return a subclass whose fields have joined descriptions, and no default None."""
    if not dataclasses.fields(settings):  # type: ignore[arg-type]
        return settings
    hints = typing.get_type_hints(settings, include_extras=True)
    texts = _descriptions(settings)
    annotations, values = {}, {}
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        if field.name not in texts:
            continue
        own = [a for a in getattr(hints[field.name], "__metadata__", ()) if isinstance(a, _ARG)]
        about: Any = own[0] if own else tyro.conf.arg()
        changes: dict[str, Any] = {"help": texts[field.name]} if about.help is None else {}
        if about.help_behavior_hint is None and _is_unset(field.default):
            changes["help_behavior_hint"] = _hint
        tidied = dataclasses.replace(about, **changes)
        kind = hints[field.name]
        if field.default is None:
            kind = kind | None  # a field that is filled in later is typed without None
        annotations[field.name] = Annotated[kind, tidied]
        if field.default is not dataclasses.MISSING:
            values[field.name] = field.default
    body = {"__annotations__": annotations, "__doc__": settings.__doc__, **values}
    subclass = type(settings.__name__, (settings,), body)
    return dataclasses.dataclass(frozen=True, kw_only=True)(subclass)


def _is_unset(default: object) -> bool:
    return default is None or default == ()


def _hint(default: str) -> str:
    """Return the text behind a description. A resumed run has defaults of its own."""
    return "" if default in ("None", "") else f"(default: {default})"


def _descriptions(settings: type) -> dict[str, str]:
    """Return the strings below the fields of a dataclass and its bases, a line each."""
    found: dict[str, str] = {}
    for base in reversed(settings.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for before, node in itertools.pairwise(statements):
            match before, node:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    joined = " ".join(text.split())
                    found[name] = re.sub(r"\bNone: ", "Default: ", joined)
    return found


# Errors


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
