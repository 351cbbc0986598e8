"""The command line: dataclasses that say what a command takes, and a function that runs each."""

import errno
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from . import doctor
from .bench import Bench, run_bench
from .data import open_source
from .data.check import check
from .data.sheet import contact_sheet
from .export import Export, run_export
from .predict import Predict, run_predict
from .report import Report, run_report
from .sizes import Size
from .study.command import run_reproduce
from .study.settings import Reproduce
from .train.commands import Eval, TrainCommand, run_eval, run_train
from .train.config import CONFIG, load_config
from .train.faults import FaultError


@dataclass(frozen=True)
class Check:
    """Read a data set whole and list everything that is wrong with it.

    Recognizes CamVid (train/, trainannot/, ...) and Cityscapes (leftImg8bit/, gtFine/), and reads
    whichever splits are there. Exits with 1 if there is a fault.
    """

    folder: tyro.conf.Positional[Path]
    """The data set's folder."""


@dataclass(frozen=True)
class Sheet:
    """Draw a contact sheet of samples beside their labels."""

    data: Literal["streets", "camvid", "cityscapes", "cityscapes14"] = "streets"
    """The data set; cityscapes14 is Cityscapes in ClassNet's 14 classes."""
    data_root: Path | None = None
    """The data set's folder; streets needs none."""
    split: Literal["train", "val", "test"] = "train"
    """Which part of it."""
    count: int = 24
    """How many samples."""
    size: Size = (128, 256)
    """Each image's size; the data set's aspect is kept."""
    out: Path = Path("out/sheet.png")
    """The PNG to write."""


@dataclass(frozen=True)
class Data:
    """Check data sets and look at them."""

    action: (
        Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[Sheet, tyro.conf.subcommand("sheet")]
    )


@dataclass(frozen=True)
class Doctor:
    """Say what runs here: versions, devices, and which path the ops take on each, and why.

    Each device is tried with one neuron against fp64. Exits with 1 if one of them is wrong.
    """


COMMANDS: dict[str, Callable[..., object]] = {
    "bench": Bench,
    "data": Data,
    "doctor": Doctor,
    "eval": Eval,
    "export": Export,
    "predict": Predict,
    "report": Report,
    "reproduce": Reproduce,
    "train": TrainCommand,
}
PARSER: dict[str, Any] = {
    "prog": "deepcontrol",
    "description": "AGC (automatic gain control): networks, training, the paper's claims, speed.",
    "config": (tyro.conf.OmitSubcommandPrefixes,),
}


def main(args: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    console = Console()
    try:
        command = parse(sys.argv[1:] if args is None else args)
        match command:
            case Data(action=Check() as action):
                return run_check(action, console)
            case Data(action=Sheet() as action):
                return run_sheet(action, console)
            case Bench():
                return run_bench(command, console)
            case Doctor():
                return run_doctor(console)
            case TrainCommand():
                return run_train(command, console)
            case Eval():
                return run_eval(command, console)
            case Export():
                return run_export(command, console)
            case Predict():
                return run_predict(command, console, Console(stderr=True))
            case Report():
                return run_report(command, console)
            case Reproduce():
                return run_reproduce(command, console)
    except (ValueError, OSError, FaultError) as error:  # a DataError is a ValueError
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            error = disk_full(error, written_to(command))
        complain(Console(stderr=True), "error", error)
        return 1
    except KeyboardInterrupt:  # where a command does not wait for its signal itself
        return 128 + signal.SIGINT
    raise AssertionError(command)


def parse(args: list[str]) -> object:
    """The command that was typed.

    Where train's --out is a run already, flags that are not given are that run's.
    """
    command = tyro.extras.subcommand_cli_from_dict(COMMANDS, args=args, **PARSER)
    if isinstance(command, TrainCommand) and (command.out / CONFIG).exists():
        before = TrainCommand(**vars(load_config(command.out)[0]))
        return tyro.cli(
            TrainCommand, args=args[args.index("train") + 1 :], default=before, **PARSER
        )
    return command


def written_to(command: object) -> Path | None:
    """The folder or file that a command writes to, if that is known."""
    named = getattr(command, "action", command)
    return getattr(named, "out", None) or getattr(named, "run", None)


def disk_full(error: OSError, out: Path | None) -> OSError:
    """The same with where and how much, which the system does not say."""
    if error.filename is None and out is None:
        return error
    where = Path(error.filename or out or ".")
    there = next(folder for folder in (where, *where.absolute().parents) if folder.exists())
    return OSError(
        f"{where} could not be written: the disk is full, "
        f"{shutil.disk_usage(there).free:,} bytes are free"
    )


def complain(console: Console, kind: str, error: Exception) -> None:
    # Escaped, because a path may hold what rich would take for its markup.
    text = f"[bold red]{kind}:[/] {escape(str(error))}"
    console.print(text, highlight=False, soft_wrap=True)


def run_check(action: Check, console: Console) -> int:
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("reading", total=None)
        report = check(
            action.folder, lambda done, total: progress.update(bar, completed=done, total=total)
        )
    found = ", ".join(f"{split} {count}" for split, count in report.splits.items())
    where = escape(str(action.folder))
    console.print(f"{where}: {report.layout}; sound samples: {found or 'none'}", soft_wrap=True)
    labeled = report.histogram[: len(report.classes)]
    if labeled.sum():
        table = Table("class", "pixels %")
        table.columns[1].justify = "right"
        for name, count in zip(report.classes, labeled, strict=True):
            table.add_row(name, f"{100 * count / labeled.sum():.2f}")
        console.print(table)
    for fault in report.faults:
        complain(console, "fault", fault)
    count = len(report.faults)
    console.print(f"{count} fault{'s' * (count > 1)}." if count else "No faults.", style="bold")
    return 1 if count else 0


def run_sheet(action: Sheet, console: Console) -> int:
    if action.count < 1:
        raise ValueError(f"--count must be at least 1, got {action.count}")
    source = open_source(action.data, action.split, action.data_root)
    sheet = contact_sheet(source, action.count, action.size)
    action.out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(action.out)
    console.print(f"{source.name}: {escape(str(action.out))}", soft_wrap=True)
    return 0


def run_doctor(console: Console) -> int:
    for name, version in doctor.versions().items():
        console.print(f"{name:20s} {escape(version)}", highlight=False)
    table = Table("device", "", "ops run on", "error against fp64")
    paths = doctor.paths()
    for path in paths:
        runs = "kernels" if path.why_plain is None else f"plain torch: {path.why_plain}"
        verdict = "ok" if path.sound else f"[bold red]wrong[/]: more than {doctor.TOLERANCE:.0e}"
        table.add_row(path.device, escape(path.name), escape(runs), f"{path.error:.1e} {verdict}")
    console.print(table)
    return 0 if all(path.sound for path in paths) else 1
