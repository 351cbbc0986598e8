"""The command line: parse arguments and run the command.

tyro shows an optional number as `{None}|INT` with "(default: None)". Here it is `INT`, and the
description says what happens without it.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import signal
import sys
import textwrap
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

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
from .errors import explain, leave_if_device_failed
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
        print_error(str(error))
        return 1
    except Exception as error:
        message = explain(error, args[0] if args else "", written_to(command))
        print_error(message)
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
        print_error(message)
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


def print_error(message: str) -> None:
    # Escaped, because a path may contain rich markup.
    text = f"[bold red]error:[/] {escape(message)}"
    try:
        SafeConsole(stderr=True).print(text, highlight=False, soft_wrap=True)
    except BrokenPipeError:
        raise
    except (OSError, MemoryError, RuntimeError):  # no memory or descriptor is left for colors
        print(f"error: {printable(message)}", file=sys.stderr)


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
        options: Keyword arguments of tyro.cli.
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
    # tyro prints the name: "Error parsing options: --lr must be positive".
    subclass = type("options", (settings,), body)
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
